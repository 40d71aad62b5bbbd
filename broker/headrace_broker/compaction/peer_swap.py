"""Ends a swap of Apache's broker that a kill has interrupted, after which it does not start.

It renames the old log files to NAME.delete, moves the new ones from ``compacting/`` to their
folders, removes the old ones, and does the same with the files of units. As long as some new log
file has not been moved, all old ones still exist.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from headrace_broker.compaction.segments import COMPACTING
from headrace_broker.store.log.batch_units import BATCH_UNIT_DTYPE, used_mask

if TYPE_CHECKING:
    from pathlib import Path

    from headrace_broker.compaction.segments import Folders
    from headrace_broker.store.files.filesystem import Files

_DELETE: Final = ".delete"
_QUEUE_OFFSET_AT: Final = 20


def end_peer_swap(folders: Folders, fs: Files) -> bool:
    """Leave the files before or after the swap; to be called before a log is opened.

    Returns whether there was a swap. Raises OSError.
    """
    old_logs, old_units = (sorted(folder.glob("*" + _DELETE)) for folder in folders)
    new_logs, new_units = (_names(folder) for folder in folders.below(COMPACTING))
    is_moved = bool(new_units) and not new_logs
    if not (old_logs or old_units or is_moved):
        return False
    if old_logs and new_logs:
        _undo(folders, old_logs, fs)
    else:
        _finish(folders, new_units, fs)
        for path in (*old_logs, *old_units):
            fs.unlink(path)
    fs.sync_names()
    return True


def _undo(folders: Folders, old_logs: list[Path], fs: Files) -> None:
    """Give the old log files their names back; their units have not been touched."""
    for path in old_logs:
        fs.rename(path, path.with_name(path.name.removesuffix(_DELETE)))
    fs.mark_names_unsynced(folders.log)
    for name in _names(folders.log) - _names(folders.units):
        fs.unlink(folders.log / name)


def _finish(folders: Folders, new_units: set[str], fs: Files) -> None:
    """Move the new units that fit their log files; remove those without a log file."""
    for name in sorted(new_units):
        new, old = folders.below(COMPACTING).units / name, folders.units / name
        log = folders.log / name
        if log.exists() and _fits(new, log) and not (old.exists() and _fits(old, log)):
            fs.rename(new, old)
    fs.mark_names_unsynced(folders.units)
    for name in _names(folders.units) - _names(folders.log):
        fs.unlink(folders.units / name)


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("[0-9]" * 20)} if folder.exists() else set()


def _fits(units_path: Path, log_path: Path) -> bool:
    """True if the units are those of the records in a log file."""
    count = units_path.stat().st_size // BATCH_UNIT_DTYPE.itemsize
    units = np.fromfile(units_path, BATCH_UNIT_DTYPE, count)
    units = units[used_mask(units)]
    starts = units["physical_offset"].astype(np.int64) - int(log_path.name)
    log = np.memmap(log_path, np.uint8, "r")
    if not len(units) or starts.min() < 0 or starts.max() + _QUEUE_OFFSET_AT + 8 > len(log):
        return False
    sizes = np.ndarray((len(log) - 3,), ">i4", log, strides=(1,))[starts]
    offsets = np.ndarray((len(log) - 7,), ">i8", log, strides=(1,))[starts + _QUEUE_OFFSET_AT]
    return bool((sizes == units["size"]).all() and (offsets == units["queue_offset"]).all())
