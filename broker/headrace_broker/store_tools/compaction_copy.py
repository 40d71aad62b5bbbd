"""Copies compaction logs, which hold messages that the log has dropped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_broker.compaction.checkpoint import POSITION_FILE, offsets_text, parse
from headrace_broker.compaction.run_state import own_folder
from headrace_broker.compaction.segments import COMPACTION_FOLDER, Folders
from headrace_broker.compaction.swap import JOURNAL_NAME
from headrace_broker.store.errors import StoreError, StoreFormatError
from headrace_broker.store.files.config_file import ConfigFile
from headrace_broker.store.files.filesystem import Files, make_private
from headrace_broker.store_tools.compaction_files import compaction_queues
from headrace_broker.store_tools.directory import data_ranges

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from headrace_broker.store_tools.compaction_files import CompactionQueue
    from headrace_broker.store_tools.directory import StoreDirectory


def check_swaps(source: StoreDirectory, topics: Collection[str]) -> None:
    """Raise StoreError if the files of a queue are neither those before nor those after a swap."""
    for queue in compaction_queues(source):
        journal = own_folder(source.root, queue.topic, queue.queue_id) / JOURNAL_NAME
        is_unfinished = journal.exists() or any(queue.folders.log.glob("*.delete"))
        if queue.topic in topics and is_unfinished:
            raise StoreError(
                f"{queue.folders.log}: a broker was killed while it swapped files there: start "
                "headrace on this store once, then copy"
            )


def copy_compaction(source: StoreDirectory, target: Path, topics: Collection[str]) -> None:
    """Copy the segments of some topics, the state of their runs, and the positions. Raises OSError.

    Queue offsets and positions stay the same, so the files do too. Key indexes are rebuilt.
    """
    for queue in compaction_queues(source):
        if queue.topic in topics:
            _copy_queue(queue, source, target)
    _copy_positions(source, target, topics)


def _copy_queue(queue: CompactionQueue, source: StoreDirectory, target: Path) -> None:
    folders = Folders.of(target, queue.topic, queue.queue_id)
    for segment in queue.segments(source):
        _copy_sparse(segment.log.path, folders.log)
        _copy_sparse(segment.units_file.path, folders.units)
    own, copied = (own_folder(root, queue.topic, queue.queue_id) for root in (source.root, target))
    for path in own.glob("*.json"):
        if (text := ConfigFile(path).load()) is not None:
            ConfigFile(copied / path.name).save(text)


def _copy_sparse(path: Path, folder: Path) -> None:
    """Copy a file without filling its holes."""
    make_private(folder)
    with path.open("rb") as read, (folder / path.name).open("xb") as written:
        written.truncate(path.stat().st_size)
        for start, end in data_ranges(path):
            read.seek(start)
            written.seek(start)
            written.write(read.read(end - start))
    Files().sync(folder / path.name)


def _copy_positions(source: StoreDirectory, target: Path, topics: Collection[str]) -> None:
    path = source.root / COMPACTION_FOLDER / POSITION_FILE
    try:
        offsets = ConfigFile(path).read(parse) or {}
    except StoreFormatError:
        return  # without positions the next runs read all segments again
    kept = {key: offset for key, offset in offsets.items() if key.rpartition("_")[0] in topics}
    if kept:
        ConfigFile(target / COMPACTION_FOLDER / POSITION_FILE).save(offsets_text(kept))
