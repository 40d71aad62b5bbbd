"""Each promise of a simulation finds a bug that breaks it: undo a line, and a seed fails."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace_broker.compaction.follower import CompactionFollower
from headrace_broker.compaction.swap import Swap
from headrace_broker.inner.delivered import Delivered
from headrace_broker.pop.pop_log import PopLog
from headrace_broker.processors.sent_properties import SentProperties
from headrace_broker.schedule.schedule import Schedule
from headrace_broker.statictopic import changes
from headrace_broker.statictopic.own_queues import OwnQueues
from headrace_broker.store.errors import StoreFormatError
from headrace_broker.store.files.file_seal import FileSeal, StoreDamaged
from headrace_broker.store.files.filesystem import Files
from headrace_broker.store.files.mapped_file import MappedFile
from headrace_broker.store.files.mapped_file_queue import MappedFileQueue
from headrace_broker.store.followers import follower_work
from headrace_broker.store.followers.following import Following
from headrace_broker.store.log import commit_log, log_blocks, record_checksum
from headrace_broker.store.log.encoded_records import EncodedRecords
from headrace_broker.store.opening import Opening
from headrace_broker.store.queues import queue_blocks
from headrace_broker.store.retention.cleaner import Cleaner
from headrace_broker.store.retention.disk_forecast import nothing_to_consume
from headrace_broker.store.retention.floor_file import FloorFile
from headrace_broker.store.retention.rules import ClockWatch
from headrace_broker.store.write.flush import Flusher
from headrace_broker.tiered.container.flat_queue import FlatQueue
from headrace_broker.tiered.objects.manifest_file import ManifestFile
from headrace_broker.tiered.objects.object_tier import ObjectTier
from headrace_broker.timer.arrivals import TIMER
from headrace_broker.timer.waiting_timers import WaitingTimers
from headrace_broker.transaction import rebuild
from headrace_broker.transaction.halves import Decision
from headrace_daemon.access.users_file import UsersFile
from headrace_protocol.columns import Array, RecordColumns
from headrace_protocol.errors import CorruptRecord, RequestError
from headrace_protocol.filters.expression import Expression
from headrace_protocol.rights.access import Access
from headrace_protocol.rights.users import User
from headrace_protocol.statictopic import plans
from tests.simulation.history import PromiseBroken
from tests.simulation.run import KINDS, run_seed
from tests.support.followers import CopyingFollower

FLUSH_LOG = Flusher.flush_log
DETACH_FIRST = MappedFileQueue.detach_first
SLOT = record_checksum.checksum_slot
SCAN_PROPERTIES = SentProperties._scan
CONTINUED = plans._continued
READ_BLOCK = queue_blocks.read_block


def nothing(*_: Any) -> None:
    """In the place of what must be done."""


def always(*_: Any) -> bool:
    """In the place of what must be asked."""
    return True


def never(*_: Any) -> bool:
    """As if there were none."""
    return False


def unwatched(*_: Any) -> Any:
    """As if no group had anything to consume."""
    return nothing_to_consume


def detach_one_too_many(files: MappedFileQueue, count: int) -> list[MappedFile]:
    return DETACH_FIRST(files, count + bool(count and len(files.files) > count + 1))


def unflagged(record: bytes) -> bytes:
    """A checksum that is none."""
    return SLOT(record[:-1])


async def flush_log_too_late(flusher: Flusher) -> None:
    """As ``flush_log``, but what waits for it is answered when it begins."""
    flusher.commit_log.flushed_offset = flusher.commit_log.max_offset
    flusher._call_waiters()
    await FLUSH_LOG(flusher)


def wait_for_nothing(scanner: SentProperties, properties: str) -> Any:
    """As if each message had WAIT=false."""
    return *SCAN_PROPERTIES(scanner, properties)[:-1], False


def read_unflushed(queue: Any, first: int, log: Any, _: int) -> Any:
    """As ``read_block``, whether or not the disk has it."""
    return READ_BLOCK(queue, first, log, 1 << 60)


def needs_nothing(_: Following) -> int:
    """As if the follower had all of the log on disk."""
    return sys.maxsize


def own_of_any_writer(manifest: ManifestFile) -> Any:
    """As ``_own``, whoever has written the manifest."""
    return manifest._read()


def names_nothing(_: ObjectTier) -> set[str]:
    """As if the manifest named no object."""
    return set()


def log_end_of(schedule: Schedule) -> int:
    """As if the offsets counted all that a start finds delivered."""
    return schedule._store.commit_log.max_offset


def drop_none(_timers: WaitingTimers, _sources: Array) -> Array:
    """As if the log held no deliveries."""
    return np.empty(0, TIMER)


def no_decisions(*_: Any) -> dict[int, Decision]:
    """As if each decision had its op record."""
    return {}


def no_events(*_: Any) -> Iterator[Any]:
    """As if the log of pops were empty."""
    return iter(())


def flush_nothing(*_: Any) -> Callable[[], None]:
    """A flush that brings nothing to disk."""
    return lambda: None


async def async_nothing(*_: Any) -> None:
    """In the place of what must be waited for."""


def pass_all(_: Expression, records: RecordColumns) -> Array:
    """As without a filter."""
    return np.ones(len(records), bool)


def continue_too_early(chain: Any, closed: Any, end: int) -> Any:
    """As if the old leader ended one message earlier."""
    return CONTINUED(chain, closed, max(end - 1, 0))


def at_once(_store: Any, then: Callable[[None], None]) -> None:
    """As ``when_on_disk``, without the wait."""
    then(None)


# Kind, where the bug is, the bug, and a seed that finds it: with an old one the search is long.
BUGS: dict[str, tuple[str, Any, str, Any, int]] = {
    "acknowledged without sync": ("cluster", MappedFile, "sync", nothing, 2),
    "acknowledged before the sync": ("cluster", Flusher, "flush_log", flush_log_too_late, 6),
    "flushed without sync": ("store", MappedFile, "sync", nothing, 0),
    "names not synced": ("store", Files, "sync_names", nothing, 0),
    "names after a kill not synced": ("store", Opening, "_mark_names_unsynced", nothing, 100),
    "records not checked": ("store", log_blocks, "_check", nothing, 249),
    "seals not checked": ("store", FileSeal, "check", nothing, 2),
    "wrong checksums of records": ("store", commit_log, "checksum_slot", unflagged, 1),
    "encoded blocks not completed": ("store", EncodedRecords, "_fill", nothing, 0),
    "unconsumed cleaned": ("store", Cleaner, "_lowest_unconsumed", unwatched, 1),
    "one file too many cleaned": ("store", MappedFileQueue, "detach_first", detach_one_too_many, 3),
    "cleaned under readers": ("store", MappedFile, "release", always, 15),
    "a clock believed that jumped": ("store", ClockWatch, "is_trusted", always, 0),
    "limits of topics not saved": ("store", FloorFile, "save", nothing, 7),
    "a filter that lets all pass": ("cluster", Expression, "mask", pass_all, 1),
    "no message waited for": ("cluster", SentProperties, "_scan", wait_for_nothing, 12),
    "followed before the flush": ("followed", follower_work, "read_block", read_unflushed, 5),
    "cleaned before it was followed": ("followed", Following, "needed_from", needs_nothing, 8),
    "positions saved before what was followed": ("followed", CopyingFollower, "sync", nothing, 0),
    "deliveries before a crash not looked for": ("waiting", Delivered, "take", nothing, 0),
    "deliveries counted that were not": ("waiting", Schedule, "_counted_to", log_end_of, 96),
    "offsets saved before the deliveries": ("waiting", Flusher, "wait_flushed", async_nothing, 16),
    "delivered timers not looked for": ("waiting", WaitingTimers, "drop_sources", drop_none, 0),
    "commits without op records lost": ("waiting", rebuild.Decisions, "of", no_decisions, 29),
    "what was out forgotten at a start": ("pop", PopLog, "read", no_events, 0),
    "pops that are not on disk count so": ("pop", PopLog, "start_flush", flush_nothing, 4),
    "a queue's new leader starts too early": ("static", plans, "_continued", continue_too_early, 1),
    "a queue closed before it is on disk": ("static", changes, "when_on_disk", at_once, 7),
    "unconsumed items cleaned": ("static", Cleaner, "_lowest_unconsumed", unwatched, 85),
    "cleaned before it was uploaded": ("tiered", Following, "needed_from", needs_nothing, 5),
    "parts of failed uploads kept": ("tiered", FlatQueue, "_settle", nothing, 2),
    "an epoch that is over goes on": ("objects", ManifestFile, "_own", own_of_any_writer, 0),
    "objects swept that the manifest names": ("objects", ObjectTier, "named", names_nothing, 0),
    "objects named before they are there": ("objects", ObjectTier, "put", nothing, 0),
    "swaps not completed after a crash": ("compacted", Swap, "recover", nothing, 11),
    "positions of copies saved too early": ("compacted", CompactionFollower, "sync", nothing, 18),
    "markers gone before what they delete": ("chains", OwnQueues, "has_older", never, 1),
    "changes of users that are not saved": ("users", UsersFile, "save", nothing, 0),
    "rights that outlive a change": ("users", Access, "version", 0, 1),
    "users who sign although disabled": ("users", User, "is_enabled", True, 0),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "owner", "name", "bug", "first_seed"),
    [pytest.param(*bug, id=name) for name, bug in BUGS.items()],
)
def test_a_planted_bug_is_found(
    kind: str,
    owner: Any,
    name: str,
    bug: Any,
    first_seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The search begins at first_seed."""
    monkeypatch.setattr(owner, name, bug)
    # Which of them comes first depends on how this process hashes strings. A tier that notices
    # another writer refuses by name, and nothing that is away explains it. What a compaction has
    # left half done is no record, and no JSON.
    found = (
        *(PromiseBroken, StoreFormatError, StoreDamaged, RequestError, AssertionError),
        *(CorruptRecord, msgspec.DecodeError, ValueError),
    )
    with pytest.raises(found):
        run_seeds(kind, first_seed)


def run_seeds(kind: str, first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 100):
        run_seed(kind, seed)


def test_every_kind_finds_a_bug() -> None:
    assert {kind for kind, *_ in BUGS.values()} == KINDS.keys()
