"""Records that a lone store was given, and those that clean-up may have taken since.

The rules of docs/retention.md read from the side of the records, for the checks: the store may keep
more than they say, but nothing less.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace_broker.store.files.filesystem import DiskUsage
from headrace_broker.store.retention.topic_floors import TopicLimit
from headrace_broker.store.settings import Retention

Name = tuple[str, int]  # topic and queue id


class Record(NamedTuple):
    """A message as it was appended; byte_count: of its record in the log."""

    topic: str
    queue_id: int
    queue_offset: int
    physical_offset: int
    byte_count: int
    store_ms: int
    body: bytes

    @property
    def name(self) -> Name:
        """Its queue."""
        return self.topic, self.queue_id


@dataclass
class Appended:
    """All records in the order of the log; the first ``flushed_count`` are safe.

    consumed: of each queue that a group has to consume, where that goes on.
    log_from: physical offset; nothing at or past it may be gone from the log.
    queues_from: queue offset; nothing at or past it may be out of reach while it is in the log.
    """

    records: list[Record] = field(default_factory=list)
    flushed_count: int = 0
    written_count: int = 0
    consumed: dict[Name, int] = field(default_factory=dict)
    log_from: int = 0
    queues_from: defaultdict[Name, int] = field(default_factory=lambda: defaultdict(int))

    def by_queue(self) -> dict[Name, list[Record]]:
        queues = defaultdict(list)
        for record in self.records:
            queues[record.name].append(record)
        return queues

    def count_to(self, physical_offset: int) -> int:
        """The number of records appended below it."""
        return sum(record.physical_offset < physical_offset for record in self.records)

    def end(self, count: int) -> None:
        """A start has found so many records, and what came after them is gone for good."""
        self.records = self.records[:count]
        self.flushed_count = self.written_count = count
        ends = {record.name: record.queue_offset + 1 for record in self.records}
        for offsets in (self.consumed, self.queues_from):
            offsets.update({name: min(at, ends.get(name, 0)) for name, at in offsets.items()})

    def expire(self, facts: Facts) -> None:
        """A round of clean-up begins; it may be cut off at any point."""
        for topic, limit in facts.limits.items():
            self._expire_topic([r for r in self.records if r.topic == topic], limit, facts)
        self.log_from = max(self.log_from, self._log_from(facts))

    def _expire_topic(self, records: list[Record], limit: TopicLimit, facts: Facts) -> None:
        left = []
        for record in records:
            if record.queue_offset < facts.queues_from[record.name]:
                continue
            if facts.is_old(record.store_ms, limit.reserved_ms) and self._may_go(record, facts):
                self._give_up(record)
            else:
                left.append(record)
        if limit.reserved_bytes is None:
            return
        excess_bytes = sum(record.byte_count for record in left) - limit.reserved_bytes
        for record in left:
            if excess_bytes > 0 and self._may_go(record, facts):
                self._give_up(record)
                excess_bytes -= record.byte_count

    def _give_up(self, record: Record) -> None:
        self.queues_from[record.name] = max(self.queues_from[record.name], record.queue_offset + 1)

    def _may_go(self, record: Record, facts: Facts) -> bool:
        consumed = self.consumed.get(record.name, record.queue_offset + 1)
        return facts.retention.removes_unconsumed or record.queue_offset < consumed

    def _log_from(self, facts: Facts) -> int:
        held = [
            record.physical_offset
            for record in self.records
            if record.physical_offset >= facts.log_begin
            and record.queue_offset >= self.queues_from[record.name]
            and not self._may_go(record, facts)
        ]
        keep_from = min(held, default=facts.log_end)
        begin = facts.log_begin
        for number in range(facts.retention.files_max):
            end = begin + facts.file_bytes
            times_ms = [r.store_ms for r in self.records if begin <= r.physical_offset < end]
            is_over = facts.excess_bytes > number * facts.file_bytes
            if end > keep_from or not (is_over or facts.is_expired(max(times_ms, default=0))):
                break
            begin = end
        return begin


class Facts(NamedTuple):
    """The state of the store when a round begins.

    log_begin, log_end: physical offsets. queues_from: the queue offset that each queue shows first.
    """

    retention: Retention
    limits: Mapping[str, TopicLimit]
    now_ms: int
    disk: DiskUsage
    file_bytes: int
    log_begin: int
    log_end: int
    queues_from: Mapping[Name, int]
    is_requested: bool
    is_clock_trusted: bool
    wanted_bytes: int

    @property
    def excess_bytes(self) -> int:
        """The bytes that may go whatever their age."""
        if not self.retention.removes_young:
            return 0
        excess_bytes = self.disk.excess_bytes(self.retention.force_ratio)
        if self.wanted_bytes:
            missing_bytes = self.disk.excess_bytes(self.retention.refuse_ratio) + self.wanted_bytes
            excess_bytes = max(excess_bytes, missing_bytes, 1)
        return excess_bytes

    def is_old(self, store_ms: int, reserved_ms: int | None) -> bool:
        """True if a time is over by a clock that can be trusted."""
        is_over = reserved_ms is not None and store_ms + reserved_ms <= self.now_ms
        return is_over and self.is_clock_trusted

    def is_expired(self, newest_ms: int) -> bool:
        """True if a file may go because of its age."""
        is_hour = time.localtime(self.now_ms / 1000).tm_hour in self.retention.delete_hours
        is_due = is_hour or self.is_requested or self.disk.ratio > self.retention.clean_ratio
        return is_due and self.is_old(newest_ms, self.retention.reserved_ms)
