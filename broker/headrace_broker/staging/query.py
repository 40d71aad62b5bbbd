"""The staged attempts and the state of one query at this broker, in memory and on disk.

A query is settled until it gets a decision. The decision holds once it is on disk, may be replaced
until applying begins, and is then applied until its last record is in the log or an error stops
it. A query whose state is damaged rejects every request.

Nothing here awaits. Methods that wait for the disk may be called from any thread.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from enum import Enum, auto
from itertools import islice
from typing import TYPE_CHECKING, Final

from headrace_broker.staging import owner as owner_file
from headrace_broker.staging import state as state_file
from headrace_broker.staging.blocks import CorruptStage, StagedBlock, read_blocks
from headrace_broker.staging.state import QueryState
from headrace_broker.store.errors import StoreFormatError
from headrace_broker.store.files.filesystem import make_private

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping
    from pathlib import Path

    from headrace_broker.staging.known import KnownQueries
    from headrace_broker.store.files.filesystem import Files
    from headrace_protocol.staging import Decision, StagedAttempt

BLOCKS_SUFFIX = ".blocks"
# Flushed while more blocks arrive or are appended, so that the seal or commit waits for less.
FLUSH_BYTES: Final = 16 * 1024 * 1024
# Renames per slice, half a millisecond.
_VOIDED_AT_ONCE: Final = 32
# Discarded; a thread removes the file.
VOID_SUFFIX = ".void"


class Phase(Enum):
    """Progress of a query with its newest decision."""

    SETTLED = auto()  # no decision, or all its records are in the log
    DECIDING = auto()  # not on disk yet
    REPLACING = auto()  # not on disk yet, unlike the decision that it replaces
    DECIDED = auto()
    APPLYING = auto()
    DAMAGED = auto()


class Event(Enum):
    """A transition of a query from one phase to another."""

    FIND = auto()  # a pending decision on disk, at the start
    DAMAGE = auto()
    DECIDE = auto()
    SAVE = auto()
    REVERT = auto()  # to the decision on disk, since saving the new one failed
    APPLY = auto()
    STOP = auto()
    FINISH = auto()


# A missing pair is a bug.
NEXT_PHASE: Final[Mapping[tuple[Phase, Event], Phase]] = {
    (Phase.SETTLED, Event.FIND): Phase.DECIDED,
    (Phase.SETTLED, Event.DAMAGE): Phase.DAMAGED,
    (Phase.SETTLED, Event.DECIDE): Phase.DECIDING,
    (Phase.DECIDING, Event.SAVE): Phase.DECIDED,
    (Phase.DECIDING, Event.REVERT): Phase.SETTLED,
    (Phase.REPLACING, Event.SAVE): Phase.DECIDED,
    (Phase.REPLACING, Event.REVERT): Phase.DECIDED,
    (Phase.DECIDED, Event.DECIDE): Phase.REPLACING,
    (Phase.DECIDED, Event.APPLY): Phase.APPLYING,
    (Phase.APPLYING, Event.STOP): Phase.DECIDED,
    (Phase.APPLYING, Event.FINISH): Phase.SETTLED,
}
_UNSAVED: Final = frozenset((Phase.DECIDING, Phase.REPLACING))


class Attempt:
    """A file of blocks, with its write position.

    flushed_bytes: bytes that are on disk, or being flushed.
    queues: topics and queue ids of its blocks.
    is_on_disk: whether the whole file and its name are.
    """

    __slots__ = (
        "block_count",
        "file_bytes",
        "flushed_bytes",
        "is_on_disk",
        "path",
        "queues",
        "record_count",
    )

    def __init__(self, path: Path) -> None:
        self.path = path
        self.block_count = self.record_count = self.file_bytes = self.flushed_bytes = 0
        self.queues: set[tuple[str, int]] = set()
        self.is_on_disk = False

    def append(self, block: StagedBlock, files: Files) -> None:
        """Append a block. Raises OSError, and then changes nothing."""
        descriptor = files.open(self.path, os.O_WRONLY | os.O_CREAT)
        try:
            head = block.head()
            files.write(descriptor, head, self.file_bytes)
            files.write(descriptor, block.body, self.file_bytes + len(head))
        finally:
            files.close(descriptor)
        self._count(block, self.file_bytes + len(head) + len(block.body))
        self.is_on_disk = False

    def recover(self, files: Files) -> None:
        """Count the blocks that a killed broker wrote, and cut a torn one off. Raises OSError."""
        with suppress(CorruptStage):
            for block in read_blocks(self.path):
                self._count(block, self.file_bytes + len(block.head()) + len(block.body))
        descriptor = files.open(self.path, os.O_WRONLY)
        try:
            files.truncate(descriptor, self.file_bytes)
        finally:
            files.close(descriptor)

    def _count(self, block: StagedBlock, end: int) -> None:
        self.queues.add((block.topic, block.queue_id))
        self.block_count += 1
        self.record_count += block.record_count
        self.file_bytes = end

    def flush(self, files: Files) -> None:
        """Flush what is written. Raises OSError, also if the attempt was discarded."""
        files.sync(self.path)

    def sync(self, files: Files) -> None:
        """Flush the file and its name. Raises OSError."""
        self.flush(files)
        files.fsync_directory(self.path.parent)
        self.is_on_disk = True


class Query:
    """A query and its folder.

    state: includes the newest decision; on disk if ``is_saved``.
    problem: why the state is unknown in phase DAMAGED.
    owner: the user of its first block, to whom it belongs from then on.
    applied_records: number of records of the pending decision in the log. It is a count and not a
    phase: it stays when applying stops, and from the first record on the decision is final.
    """

    def __init__(
        self,
        folder: Path,
        files: Files,
        on_void: Callable[[Query, int, str], None],
        known: KnownQueries,
    ) -> None:
        """on_void: called with the query, batch id and name of each attempt that is discarded."""
        self.folder = folder
        self._on_void = on_void
        self._known = known
        self.state = QueryState()
        self.phase = Phase.SETTLED
        self.applied_records = 0
        self.problem: Exception | None = None
        self.owner: str | None = None
        # Whether the owner has a file, which is needed until a state has it.
        self._has_owner_file = False
        self.attempts: dict[tuple[int, str], Attempt] = {}
        # Called when applying ends, with None or the error that stopped it.
        self.waiters: list[Callable[[Exception | None], None]] = []
        self._files = files
        self._saved = self.state
        self._lock = threading.Lock()
        self._is_folder_on_disk = False
        self._named_by: Decision | None = None
        self._named: frozenset[str] = frozenset()

    @property
    def has_state(self) -> bool:
        """True if it has a state on disk."""
        return self._saved != QueryState()

    @property
    def is_idle(self) -> bool:
        """True if the query has no state worth keeping."""
        is_undecided = self.phase is Phase.SETTLED and self.state == QueryState()
        return is_undecided and not self.attempts and not self._has_owner_file

    @property
    def is_saved(self) -> bool:
        """True if the state is on disk."""
        return self.phase not in _UNSAVED

    def apply(self, event: Event) -> None:
        """Enter the next phase. Raises KeyError if ``event`` can't happen in this one."""
        self.phase = NEXT_PHASE[self.phase, event]

    def load(self, *, is_known: bool = False) -> None:
        """Read the state; must be called first. is_known: it must be there. Raises OSError."""
        try:
            self.state = self._saved = state_file.load(self.folder, self._files, is_known=is_known)
            kept = owner_file.read(self.folder)
        except StoreFormatError as error:
            self.problem = error
            self.apply(Event.DAMAGE)
            return
        self.owner, self._has_owner_file = self.state.owner or kept, kept is not None
        if not self._has_blocks():
            self._remove_owner()
        if self.state.pending:
            self.apply(Event.FIND)

    def claim(self, user: str | None) -> None:
        """Note the user of a block or a decision; the first one is the owner."""
        if self.owner is None:
            self.owner = user

    def keep_owner(self) -> None:
        """Write the owner beside the blocks, unless it is there or in the state. Raises OSError."""
        if self.owner is None or self._has_owner_file or self._saved.owner is not None:
            return
        try:
            owner_file.write(self.folder, self._files, self.owner)
        except OSError:
            # An empty one would say that there is no block either.
            (self.folder / owner_file.NAME).unlink(missing_ok=True)
            raise
        self._has_owner_file = True

    def _remove_owner(self) -> None:
        if self._has_owner_file:
            (self.folder / owner_file.NAME).unlink(missing_ok=True)
            self._has_owner_file = False
            self.owner = self.state.owner

    def _has_blocks(self) -> bool:
        return bool(self.attempts) or any(self.folder.glob(f"*{BLOCKS_SUFFIX}"))

    def decide(self, state: QueryState) -> None:
        """Adopt a state with another pending decision; ``save`` brings it to disk."""
        self.apply(Event.DECIDE)
        self.state = state

    def save(self) -> None:
        """Bring the state to disk. Raises OSError, and then reverts to the state on disk."""
        with self._lock:
            if self.is_saved:  # another thread saved it first
                return
            try:
                self.write(self.state)
            except OSError:
                self.state = self._saved
                self.apply(Event.REVERT)
                raise
            self._saved = self.state
            self.apply(Event.SAVE)

    def write(self, state: QueryState) -> None:
        """Replace the state on disk. Raises OSError."""
        self.sync_folder()
        state_file.state_file(self.folder, self._files).save(state)
        self._known.add(self.folder.name)

    def finish(self, state: QueryState) -> None:
        """Adopt a state that is on disk and has no pending decision."""
        self.apply(Event.FINISH)
        self.state = self._saved = state
        self.applied_records = 0

    def sync_folder(self) -> None:
        """Create the folder and bring its name to disk, once. Raises OSError."""
        if not self._is_folder_on_disk:
            make_private(self.folder)
            if self._has_owner_file:
                self._files.sync(self.folder / owner_file.NAME)
            for parent in (self.folder.parent, self.folder.parent.parent):
                self._files.fsync_directory(parent)
            self._is_folder_on_disk = True

    # -- attempts ----------------------------------------------------------------------------------

    def path(self, batch_id: int, attempt: str) -> Path:
        """The file of an attempt's blocks."""
        return self.folder / f"{batch_id}.{attempt}{BLOCKS_SUFFIX}"

    def recover_attempt(self, batch_id: int, attempt: str) -> None:
        """Restore an attempt whose blocks were written before a crash. Raises OSError."""
        # Two requests may need it at once; the second must not cut what the first has written.
        with self._lock:
            if (batch_id, attempt) not in self.attempts:
                recovered = Attempt(self.path(batch_id, attempt))
                recovered.recover(self._files)
                self.attempts[batch_id, attempt] = recovered

    def is_complete(self, batch_id: int, staged: StagedAttempt) -> bool:
        """True if the file of an attempt is as long as when it was sealed."""
        try:
            # A decision may name thousands, and creating a Path takes longer than the stat.
            status = os.stat(f"{self.folder}/{batch_id}.{staged.attempt}{BLOCKS_SUFFIX}")  # noqa: PTH116
        except FileNotFoundError:
            return False
        return status.st_size == staged.file_bytes

    def void(self, paths: Iterable[Path]) -> bool:
        """Discard files by renaming them; return whether there were any.

        ``remove_void`` frees their space later. Files named by the pending decision stay.
        """
        to_void = [path for path in paths if not self._is_named(path) and path.exists()]
        for path in to_void:
            self._files.rename(path, path.with_suffix(VOID_SUFFIX))
            self._on_void(self, *_batch_and_attempt(path))
        return bool(to_void)

    def _is_named(self, path: Path) -> bool:
        pending = self.state.pending
        if pending is None:
            return False
        if self._named_by is not pending:
            parts = pending.attempts.values()
            self._named = frozenset(staged.attempt for part in parts for staged in part)
            self._named_by = pending
        batch_id, name = _batch_and_attempt(path)
        return batch_id == pending.batch_id and name in self._named

    def paths_up_to(self, batch_id: int) -> list[Path]:
        """Files of attempts for this batch and earlier ones. Raises OSError."""
        paths = self.folder.glob(f"*{BLOCKS_SUFFIX}")
        return [path for path in paths if _batch_and_attempt(path)[0] <= batch_id]

    def remove_void(self) -> None:
        """Remove discarded files. Raises OSError."""
        for path in self.folder.glob(f"*{VOID_SUFFIX}"):
            with suppress(FileNotFoundError):  # another thread removed it first
                self._files.unlink(path)

    def forget(self) -> None:
        """Remove the state, and the folder unless it has attempts. Raises OSError."""
        (self.folder / state_file.NAME).unlink(missing_ok=True)
        self._remove_owner()
        self.remove_folder()

    def remove_folder(self) -> None:
        """Remove the folder if it is empty, but for the owner of blocks that are gone."""
        if not self._has_blocks():
            self._remove_owner()
        with suppress(OSError):
            self.folder.rmdir()
            self._is_folder_on_disk = False


def voided(query: Query, paths: Iterable[Path]) -> Generator[None, None, bool]:
    """Discard files, a slice at a time; returns whether there were any. Raises OSError."""
    has_voided = False
    remaining = iter(paths)
    while some := list(islice(remaining, _VOIDED_AT_ONCE)):
        has_voided |= query.void(some)
        yield
    return has_voided


def _batch_and_attempt(path: Path) -> tuple[int, str]:
    batch_id, _, attempt = path.stem.partition(".")
    return int(batch_id), attempt
