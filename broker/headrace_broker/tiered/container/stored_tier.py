"""The interface of a broker's tier, whatever the layout."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import numpy as np

from headrace_broker.cold.queue import ReadBlock
from headrace_protocol.choose import choose
from headrace_protocol.tier.driver import Failed, Failure, FailureKind, expect, returns_failure
from headrace_protocol.tier.stored_queue import StoredQueue, read_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from headrace_broker.cold.queue import Wanted
    from headrace_broker.tiered.container.tier_index import IndexHit
    from headrace_protocol.columns import Array, RecordColumns
    from headrace_protocol.tier.driver import Buffer, Range
    from headrace_protocol.tier.paths import QueueName
    from headrace_protocol.tier_bodies import LogSpan, UnitSpan

Name = tuple[str, int]
# Of a read by tags.
_SCANNED_UNITS: Final = 16_384


class Spans(NamedTuple):
    """The spans of a range of messages, up to ``next_offset``."""

    next_offset: int
    units: list[UnitSpan]
    log: list[LogSpan]


class Tail(NamedTuple):
    """The last records of a queue. first, end: queue offsets. newest_ms: highest store time."""

    first: int
    end: int
    byte_count: int
    newest_ms: int


class TierQueue(StoredQueue):
    """A queue of the broker: one thread appends and expires while others read."""

    name: QueueName

    @property
    @abstractmethod
    def log_bytes(self) -> int:
        """Size of all records."""

    @property
    @abstractmethod
    def stored_bytes(self) -> int:
        """Size of all records and of what is kept with them."""

    def tail(self) -> Tail | None:
        """The last records, as far as they are known without a read; None if they are not."""
        return None

    @abstractmethod
    def _keeps(self, wanted: Range) -> bool:
        """True if the queue's log has a range."""

    @abstractmethod
    def spans(self, wanted: Range, count_max: int) -> Spans:
        """The spans of a range of queue offsets; at most ``count_max`` unit spans.

        Reads nothing.
        """

    @returns_failure
    def fetch(self, wanted: Wanted, /, *, check_bodies: bool) -> ReadBlock:
        """As ``ColdQueue.fetch``.

        Which messages match is in their units, so the bodies of others are not read.
        """
        count = wanted.count_max if wanted.tags is None else max(wanted.count_max, _SCANNED_UNITS)
        found = expect(self.units(wanted.queue_offset, count))
        if not len(found.units):
            reason = f"messages from queue offset {wanted.queue_offset} on have expired meanwhile"
            raise Failed(Failure(FailureKind.MISSING, self.path, reason))
        where, _, seen = choose(
            found.units, wanted.tags, wanted.count_max, wanted.bytes_max, bytes_of=read_bytes
        )
        end = found.first + seen
        units, offsets = found.units[where], np.arange(found.first, end)[where]
        records = expect(self.records(units, offsets, check_bodies=check_bodies))
        return ReadBlock(wanted.queue_offset, end, offsets, units, records)

    def record(self, log_offset: int, size: int) -> Buffer | Failure | None:
        """The bytes of a record at an offset of the log; None if it has expired."""
        wanted = log_offset, log_offset + size
        if size <= 0 or not self._keeps(wanted):
            return None
        read = self._read_log([wanted])
        return read if isinstance(read, Failure) else read[0]


class Group(NamedTuple):
    """Records of a queue in order, none before its ``commit_offset``; one tags code for each."""

    records: RecordColumns
    tags_codes: Array


class Limit(Protocol):
    """A topic's own limits, None without one."""

    @property
    def reserved_ms(self) -> int | None:
        """Age at which its messages expire."""

    @property
    def reserved_bytes(self) -> int | None:
        """Size at which its oldest messages expire."""


Limits = Mapping[str, Limit]


def byte_limits(limits: Limits) -> dict[str, int]:
    """Bytes to keep of topics, of those with a limit of bytes."""
    return {
        topic: limit.reserved_bytes
        for topic, limit in limits.items()
        if limit.reserved_bytes is not None
    }


def oldest(pieces: Iterable[Iterable[tuple[int, int]]], excess_bytes: int) -> list[int]:
    """Number of the first pieces of each queue that may go, the oldest of all queues first.

    pieces: time of the newest message and size, by queue. excess_bytes: as much goes at most.
    """
    by_queue = [[*of_queue] for of_queue in pieces]
    counts = [0] * len(by_queue)
    for _, number, size in sorted(
        (end_ms, number, size)
        for number, of_queue in enumerate(by_queue)
        for end_ms, size in of_queue
    ):
        excess_bytes -= size
        if excess_bytes < 0:
            break
        counts[number] += 1
    return counts


class StoredIndex(Protocol):
    """Finds records by key."""

    def query(
        self, topic: str, key: str, begin_ms: int, end_ms: int, count_max: int
    ) -> list[IndexHit] | Failure:
        """Records whose key has the hash of this one, the newest first. Fails as a read.

        begin_ms, end_ms: store times to look for; records up to a second off may be among them.
        """


class StoredTier(Protocol):
    """All queues of a broker, by topic and queue id. All methods may block.

    Whoever appends, creates, deletes, syncs or cleans up excludes the others; reads need no lock.
    """

    @property
    def queues(self) -> Mapping[Name, TierQueue]:
        """The queues that can be read and appended to."""

    @property
    def damaged(self) -> Mapping[Name, Failure]:
        """Failures of the other queues; a start after a repair opens them."""

    @property
    def index(self) -> StoredIndex:
        """Finds records by key."""

    @property
    def takes_all(self) -> bool:
        """True if an append costs the same for any number of queues."""

    def start(self, now_ms: int) -> Failure | None:
        """Open all queues that the store has; called again after UNREACHABLE. Raises OSError."""

    def reopen(self, name: Name, now_ms: int, /) -> Failure | None:
        """Open a queue once more as a start does, after a repair. Raises OSError."""

    def cut(self, name: Name, queue_offset: int, now_ms: int, /) -> Failure | None:
        """Forget a queue's messages from an offset on. Raises OSError."""

    def create(self, queues: Iterable[Name], now_ms: int) -> Failure | None:
        """Create queues without messages. Raises OSError."""

    def append_all(self, groups: Mapping[Name, Group], now_ms: int) -> Failure | None:
        """Keep records for good. After a failure ``commit_offset`` says how many. Raises OSError.

        With ``takes_all`` all or none are kept, and a failure is not that of one queue.
        """

    def index_again(
        self, topic: str, queue_id: int, queue_offset: int, now_ms: int
    ) -> Failure | None:
        """Find all records from an offset on by key, after a crash. Raises OSError."""

    def sync(self) -> None:
        """Bring to the store what is kept in memory or on the local disk only. Raises OSError."""

    def delete(self, topic: str, queue_id: int) -> Failure | None:
        """Delete a queue; a clean-up removes what a failure leaves. Raises OSError."""

    def clean_up(
        self, before_ms: Callable[[str], int] | None, now_ms: int, limits: Limits | None = None
    ) -> list[Failure]:
        """Delete what expired and what deletions left. Raises OSError.

        before_ms: of a topic, the store time before which messages expire; None keeps all.
        limits: of topics that have their own; of a limit of bytes as much is kept at least.
        """

    def merge(self, now_ms: int, /) -> bool | Failure:
        """Join some small pieces into larger ones, beside everything else; false if none is left.

        One thread merges.
        """

    def close(self) -> None:
        """Release local files and threads."""
