"""The swap: new segments of a run take the place of the old ones, whatever happens in between.

1. A run has written new files to ``compacting/`` and brought them to disk.
2. The journal is written and renamed to its name: the point of no return.
3. New files get their names, and lose those in ``compacting/``; old files are removed.
4. The list of segments in memory is replaced.
5. The state of the runs is saved, and the journal is removed.

A start that finds a journal resumes at step 3, and otherwise discards what is in ``compacting/``.
Each step is on disk before the next begins: an old journal must not come back beside the unfinished
files of a later run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from headrace_broker.compaction.run import Group  # noqa: TC001 - msgspec decodes it
from headrace_broker.compaction.run_state import RunState, StateFile
from headrace_broker.compaction.segments import COMPACTING, Segment
from headrace_broker.store.errors import StoreFormatError
from headrace_broker.store.files.config_file import sealed, unsealed
from headrace_broker.store.files.filesystem import read_file

if TYPE_CHECKING:
    from pathlib import Path

    from headrace_broker.compaction.queue_log import QueueLog
    from headrace_broker.compaction.segments import Folders
    from headrace_broker.store.files.filesystem import Files

JOURNAL_NAME: Final = "swap.json"


class Plan(msgspec.Struct, frozen=True):
    """The contents of a journal. state: to be saved with the swap."""

    groups: list[Group]
    state: RunState


class Swap:
    """The swaps of one queue; in the thread that appends to its compaction log."""

    def __init__(self, folders: Folders, own_folder: Path, fs: Files) -> None:
        """own_folder: see ``run_state.own_folder``."""
        self.folders = folders
        self._journal_path = own_folder / JOURNAL_NAME
        self._state_file = StateFile(own_folder, fs)
        self._fs = fs

    def recover(self) -> None:
        """Finish or discard what a crash has interrupted; before the log is loaded.

        Raises OSError; StoreFormatError for a damaged journal.
        """
        plan = self._read_journal()
        if plan is not None:
            self._move(plan)
            self._finish(plan)
        self.discard()

    def discard(self) -> None:
        """Remove the files of an unfinished run. Raises OSError."""
        for folder in self.folders.below(COMPACTING):
            if folder.exists():
                for path in folder.iterdir():
                    self._fs.unlink(path)
        self._fs.sync_names()

    def swap(self, log: QueueLog, groups: list[Group], state: RunState) -> None:
        """Put the new segments of a run in place and save the state.

        Raises OSError; if ``is_begun`` then, call ``resume`` until it succeeds.
        """
        plan = Plan(groups, state)
        if groups:
            self._fs.replace(self._journal_path, sealed(msgspec.json.encode(plan)))
            self._complete(log, plan)
        else:
            self._state_file.save(state)

    @property
    def is_begun(self) -> bool:
        """True if a swap has passed the point of no return and is not finished."""
        return self._journal_path.exists()

    def resume(self, log: QueueLog) -> None:
        """Finish a swap that has failed on the way. Raises OSError, StoreFormatError."""
        plan = self._read_journal()
        if plan is not None:
            self._complete(log, plan)

    def _complete(self, log: QueueLog, plan: Plan) -> None:
        self._move(plan)
        _replace(log, plan.groups)
        self._finish(plan)

    def _read_journal(self) -> Plan | None:
        try:
            text = read_file(self._journal_path)
        except FileNotFoundError:
            return None
        try:
            return msgspec.json.decode(unsealed(text), type=Plan)
        except (ValueError, msgspec.MsgspecError) as error:
            raise StoreFormatError(
                self._journal_path,
                f"is damaged ({error}), so it is unknown which files of {self.folders.log} and "
                f"{self.folders.units} are old",
                "restore the three from a backup, or remove the three for an empty compaction log",
            ) from error

    def _move(self, plan: Plan) -> None:
        """Step 3; what a crash has left of it, if any.

        A new file has both its names until both folders are on disk: after a rename from one
        folder to another, a power cut could leave it without any.
        """
        fs = self._fs
        for folder, below in zip(self.folders, self.folders.below(COMPACTING), strict=True):
            for group in plan.groups:
                names = {f"{file.base:020d}" for file in group.new}
                for name in {f"{base:020d}" for base in group.old} - names:
                    if (folder / name).exists():
                        fs.unlink(folder / name)
                for name in sorted(names):
                    self._put(below / name, folder / name)
            fs.mark_names_unsynced(folder)
        fs.sync_names()
        self.discard()

    def _put(self, source: Path, target: Path) -> None:
        """Give a new file its name, unless it has it."""
        if not source.exists() or (target.exists() and target.samefile(source)):
            return
        if target.exists():
            self._fs.unlink(target)
        self._fs.link(source, target)

    def _finish(self, plan: Plan) -> None:
        self._state_file.save(plan.state)
        self._fs.unlink(self._journal_path)
        self._fs.sync_names()


def _replace(log: QueueLog, groups: list[Group]) -> None:
    """Replace the segments of a log whose files have changed; may be repeated."""
    changed = {base for group in groups for base in group.old}
    changed |= {file.base for group in groups for file in group.new}
    old = tuple(segment for segment in log.segments if segment.base <= max(changed))
    new = [segment for segment in old if segment.base not in changed]
    new += (
        Segment.open(log.folders, file.base, log.sizes, log.fs).cut(file.record_count).add_seals()
        for group in groups
        for file in group.new
    )
    log.replace(old, tuple(sorted(new, key=lambda segment: segment.base)))
