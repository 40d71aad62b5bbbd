"""Finds the oldest unconsumed record and forecasts when the disk will be full."""

from __future__ import annotations

import math
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from headrace_broker.store.queues.cold_queue import ColdQueue
from headrace_broker.store.retention.growth import Growth

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping

    from headrace_broker.store.files.filesystem import DiskUsage
    from headrace_broker.store.log.commit_log import CommitLog
    from headrace_broker.store.settings import Retention
    from headrace_broker.store.store_queue import StoreQueue

    # Given a topic and queue ids, returns by queue id the lowest queue offset that some group has
    # yet to consume, and that group's name; yields now and then.
    LowestUnconsumed = Callable[
        [str, Iterable[int]], Generator[None, None, Mapping[int, tuple[int, str]]]
    ]

ALARM_HOURS: Final = 24.0
ALARM_EVERY_S: Final = 3600.0
SAMPLE_EVERY_S: Final = 60.0
_QUEUES_AT_ONCE: Final = 128


def queue_blocks(queues: Mapping[int, StoreQueue]) -> Iterator[dict[int, StoreQueue]]:
    """A topic's queues in portions, each small enough to scan in less than a millisecond."""
    remaining = iter(list(queues.items()))
    while some := dict(islice(remaining, _QUEUES_AT_ONCE)):
        yield some


def nothing_to_consume(
    _topic: str, _queue_ids: Iterable[int]
) -> Generator[None, None, Mapping[int, tuple[int, str]]]:
    """A ``LowestUnconsumed`` by which no group has anything left to consume."""
    yield from ()
    return {}


class NeededRecord(Protocol):
    """A record for which the log is kept; its text names what needs it."""

    @property
    def physical_offset(self) -> int:
        """Its offset in the log."""


class UnconsumedRecord(NamedTuple):
    """The oldest record of a queue that some group has yet to consume."""

    physical_offset: int
    topic: str
    queue_id: int
    group: str

    def __str__(self) -> str:
        return f"group {self.group}, topic {self.topic}, queue {self.queue_id}"


class DiskForecast:
    """Forecasts a full disk: ``scan`` runs on the loop, ``find_oldest`` in any thread.

    oldest: the oldest record that a group or a follower needs, set by the caller.
    """

    def __init__(
        self, commit_log: CommitLog, topics: Mapping[str, Mapping[int, StoreQueue]]
    ) -> None:
        self.oldest: NeededRecord | None = None
        self.growth = Growth()
        self._others_growth = Growth()
        self._commit_log = commit_log
        self._topics = topics
        self._candidates: list[tuple[ColdQueue, int, str, int, str]] = []
        self._limit_bytes = 0
        self._sampled_s = self._alarm_s = -math.inf

    def scan(self, lowest_unconsumed: LowestUnconsumed) -> Generator[None, None, None]:
        """Collect the lowest unconsumed offset of each queue; yields after some queues."""
        self._candidates = []
        for topic, queues in list(self._topics.items()):
            for some in queue_blocks(queues):
                lowest = yield from lowest_unconsumed(topic, some)
                self._candidates += (
                    (ColdQueue(consume_queue), queue_offset, topic, queue_id, group)
                    for queue_id, (queue_offset, group) in lowest.items()
                    if queue_offset < (consume_queue := some[queue_id].consume_queue).max_offset
                )
                yield

    def find_oldest(self, left_out: Collection[str] = ()) -> UnconsumedRecord | None:
        """The oldest unconsumed record of the last scan, from any thread. Raises OSError.

        left_out: topics whose records don't count.
        """
        log_min_offset = self._commit_log.min_offset
        found = (
            UnconsumedRecord(queue.units.physical_offset(first), topic, queue_id, group)
            for queue, queue_offset, topic, queue_id, group in self._candidates
            if topic not in left_out
            and (first := queue.first_visible(log_min_offset, queue_offset)) < queue.end
        )
        # -1: the queue was deleted since the scan, so nothing is left to consume.
        return min((each for each in found if each.physical_offset >= 0), default=None)

    @property
    def keep_from(self) -> int:
        """Physical offset of ``oldest``; the log's end without one."""
        return self.oldest.physical_offset if self.oldest else self._commit_log.max_offset

    # --- forecast --------------------------------------------------------------------------

    def is_sample_due(self, now_s: float) -> bool:
        """True if it is time to ``scan`` and then ``sample``."""
        return now_s >= self._sampled_s + SAMPLE_EVERY_S

    def used_by_others(self, disk: DiskUsage) -> int:
        """Used bytes of the disk, less those of the log; from any thread. Raises OSError."""
        log_files = self._commit_log.files
        file_count = sum(1 for _ in log_files.directory.glob("*"))
        return disk.used_bytes - file_count * log_files.file_bytes

    def sample(
        self, now_s: float, disk: DiskUsage, others_bytes: int, retention: Retention
    ) -> None:
        """Record how many used bytes no clean-up would free."""
        self._sampled_s = now_s
        self._limit_bytes = disk.used_bytes - disk.excess_bytes(retention.refuse_ratio)
        # Counted in bytes, since whole files come and go in large steps.
        commit_log = self._commit_log
        first = self.keep_from if retention.removes_young else commit_log.min_offset
        kept_bytes = max(commit_log.max_offset - first, commit_log.file_bytes)
        self.growth.add(now_s, others_bytes + kept_bytes)
        self._others_growth.add(now_s, others_bytes)

    @property
    def full_in_hours(self) -> float | None:
        """Hours until messages are refused; None if that is not to be expected."""
        return self.growth.full_in_hours(self._limit_bytes)

    @property
    def is_filled_by_others(self) -> bool:
        """True if files outside the log account for most of the growth."""
        return self._others_growth.bytes_per_s > self.growth.bytes_per_s / 2

    def take_alarm(self, now_s: float) -> float | None:
        """``full_in_hours`` up to ``ALARM_HOURS``, at most once an hour; otherwise None."""
        hours = self.full_in_hours
        if hours is None or hours > ALARM_HOURS or now_s < self._alarm_s + ALARM_EVERY_S:
            return None
        self._alarm_s = now_s
        return hours
