"""All queues of a broker in the tier, with their metadata."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from headrace_broker.tiered.container.flat_file import FileAddress
from headrace_broker.tiered.container.flat_queue import FlatQueue, SegmentLimits
from headrace_broker.tiered.container.lost_units import complete_units
from headrace_broker.tiered.container.metadata import UNKNOWN_OFFSET, SegmentRow
from headrace_broker.tiered.container.recovery import recover
from headrace_broker.tiered.container.stored_tier import byte_limits, oldest
from headrace_protocol.tier.driver import Failed, Failure, FailureKind, expect, returns_failure
from headrace_protocol.tier.paths import (
    FileKind,
    QueueName,
    is_segment,
    sizes_by_folder,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from headrace_broker.tiered.container.metadata import TierMetadata
    from headrace_broker.tiered.container.stored_tier import Group, Limits
    from headrace_broker.tiered.container.tier_index import TierIndex
    from headrace_protocol.columns import Array, RecordColumns
    from headrace_protocol.tier.driver import AppendDriver
    from headrace_protocol.tier.paths import Home, Sizes

_INDEXED_AT_ONCE: Final = 4096
_HOUR_MS: Final = 3_600_000


class Tier:
    """The queues as files; see ``StoredTier``."""

    takes_all = False

    def __init__(
        self,
        driver: AppendDriver,
        home: Home,
        metadata: TierMetadata,
        limits: SegmentLimits,
        index: TierIndex,
    ) -> None:
        """index: finds appended records by key."""
        self.queues: dict[tuple[str, int], FlatQueue] = {}
        self.damaged: dict[tuple[str, int], Failure] = {}
        self.metadata = metadata
        self._driver = driver
        self._home = home
        self._folder = home.cluster_folder
        self._limits = limits
        self.index = index

    def start(self, now_ms: int) -> Failure | None:
        """As ``StoredTier.start``."""
        # Without metadata all files would count as leftovers: a lost disk must not cost the tier
        # as well. If all queues were deleted, files are leftovers indeed.
        return self.rebuild(now_ms) if self.metadata.is_new else self.open(now_ms)

    @returns_failure
    def open(self, now_ms: int) -> None:
        """Bring all queues in line with the store.

        Fails with UNREACHABLE; the next call continues with the remaining queues. Raises OSError.
        """
        stored = sizes_by_folder(expect(self._driver.entries(self._home.folder)))
        for name in self.metadata.queues():
            key = name.topic, name.queue_id
            if name.broker != self._home.broker or key in self.queues or key in self.damaged:
                continue
            queue = self._queue(name)
            failure = recover(queue, stored, now_ms)
            if failure is None:
                self.queues[key] = queue
            elif failure.kind is FailureKind.UNREACHABLE:
                raise Failed(failure)
            else:
                self.damaged[key] = failure
        # What a killed process has saved may be in memory only.
        self.metadata.save()

    def reopen(self, name: tuple[str, int], now_ms: int) -> Failure | None:
        """As ``StoredTier.reopen``."""
        self.queues.pop(name, None)
        self.damaged.pop(name, None)
        return self.open(now_ms)

    def cut(self, name: tuple[str, int], queue_offset: int, now_ms: int) -> Failure | None:
        """As ``StoredTier.cut``."""
        queue = self.queues.get(name)
        if queue is None or queue_offset <= queue.min_offset:
            return self.delete(*name)
        failure = queue.cut(queue_offset, now_ms)
        self.metadata.save()
        return failure or self.reopen(name, now_ms)

    def _queue(self, name: QueueName) -> FlatQueue:
        return FlatQueue(self._driver, self._folder, name, self.metadata, self._limits)

    @returns_failure
    def create(self, queues: Iterable[tuple[str, int]], now_ms: int) -> None:
        """Create queues without messages; files of deleted queues of these names are removed.

        Raises OSError if the metadata can't be saved.
        """
        names = [QueueName(self._home.broker, *queue) for queue in queues]
        for name in names:
            self._delete_files(name)
        for name in names:
            self.metadata.topic_id(name.topic, now_ms)
            # A file is made only for a queue that has a row: the row tells it from a leftover.
            self.metadata.set_queue(name, 0, 0, now_ms)
        self.metadata.save()
        for name in names:
            self.queues[name.topic, name.queue_id] = self._queue(name)

    # -- upload ------------------------------------------------------------------------------------

    @returns_failure
    def append_all(self, groups: Mapping[tuple[str, int], Group], now_ms: int) -> None:
        """As ``StoredTier.append_all``."""
        for name, group in groups.items():
            expect(self.append(*name, *group, now_ms))

    def append(
        self,
        topic: str,
        queue_id: int,
        records: RecordColumns,
        tags_codes: Array,
        now_ms: int,
    ) -> Failure | None:
        """As ``FlatQueue.append``, and add what is kept to the index. Raises OSError."""
        queue = self.queues[topic, queue_id]
        log_end = queue.log_end
        failure = queue.append(records, tags_codes, now_ms)
        kept = records.select(records.queue_offset < queue.commit_offset)
        log_offsets = log_end + np.cumsum(kept.size) - kept.size
        self.index.add(topic, queue_id, kept, log_offsets, now_ms)
        return failure

    @returns_failure
    def index_again(self, topic: str, queue_id: int, queue_offset: int, now_ms: int) -> None:
        """Add all records from an offset on to the index: after a crash, from the last ``sync`` on.

        Fails as ``FlatQueue.records``. Raises OSError.
        """
        queue, at = self.queues[topic, queue_id], queue_offset
        while at < queue.commit_offset:
            found = expect(queue.units(at, _INDEXED_AT_ONCE))
            at = found.first + len(found.units)
            offsets = np.arange(found.first, at)
            records = expect(queue.records(found.units, offsets))
            self.index.add(topic, queue_id, records, records.physical_offset, now_ms)
            if not len(offsets):
                break

    def sync(self) -> None:
        """Bring metadata and index to disk; the records are there already. Raises OSError."""
        self.metadata.save()
        self.index.sync()

    # -- removal -----------------------------------------------------------------------------------

    @returns_failure
    def delete(self, topic: str, queue_id: int) -> None:
        """Delete a queue; after a failure ``sweep`` removes the rest. Raises OSError."""
        name = QueueName(self._home.broker, topic, queue_id)
        self.queues.pop((topic, queue_id), None)
        self.damaged.pop((topic, queue_id), None)
        self.metadata.remove_queue(name)
        self.metadata.save()
        self._delete_files(name)

    def _delete_files(self, name: QueueName) -> None:
        entries = expect(self._driver.entries(f"{self._folder}/{name.path}"))
        expect(self._driver.delete([entry.path for entry in entries]))

    @returns_failure
    def expire(self, topic: str, queue_id: int, before_ms: int, now_ms: int) -> None:
        """Delete a queue's segments whose messages were all stored before a time.

        The metadata goes first, so that it never names a file that is gone. Raises OSError.
        """
        self._remove(expect(self.queues[topic, queue_id].expire(before_ms, now_ms)))

    @returns_failure
    def shrink(self, topic: str, bytes_max: int, now_ms: int) -> None:
        """Delete a topic's oldest segments while the rest is at least of a size. Raises OSError."""
        queues = [queue for (name, _), queue in self.queues.items() if name == topic]
        excess_bytes = sum(queue.log_bytes for queue in queues) - bytes_max
        rows = [queue.log.segments[:-1] for queue in queues]
        sizes = [[(row.end_timestamp, row.size) for row in of_queue] for of_queue in rows]
        for queue, count in zip(queues, oldest(sizes, excess_bytes), strict=True):
            self._remove(expect(queue.drop(count, now_ms)))

    def _remove(self, paths: list[str]) -> None:
        if paths:
            self.metadata.save()
            expect(self._driver.delete(paths))

    def clean_up(
        self, before_ms: Callable[[str], int] | None, now_ms: int, limits: Limits | None = None
    ) -> list[Failure]:
        """As ``StoredTier.clean_up``; full index files are uploaded as well."""
        failures = [self.index.upload(now_ms)]
        if before_ms is not None:
            failures += self._expire_all(before_ms, now_ms, limits or {})
        failures.append(self.sweep())
        return [failure for failure in failures if failure is not None]

    def _expire_all(
        self, before_ms: Callable[[str], int], now_ms: int, limits: Limits
    ) -> list[Failure | None]:
        failures = []
        befores = {topic: before_ms(topic) for topic, _ in self.queues}
        for topic in befores:  # Apache's broker reads it there
            own_ms = limits[topic].reserved_ms if topic in limits else None
            hours = -1 if own_ms is None else own_ms // _HOUR_MS
            self.metadata.set_reserve_hours(topic, hours, now_ms)
        for topic, queue_id in list(self.queues):
            failures.append(self.expire(topic, queue_id, befores[topic], now_ms))
        for topic, bytes_max in byte_limits(limits).items():
            failures.append(self.shrink(topic, bytes_max, now_ms))
        if befores:
            failures.append(self.index.expire(min(befores.values())))
        return failures

    def merge(self, _now_ms: int) -> bool | Failure:
        """As ``StoredTier.merge``: files grow, so nothing is small for long."""
        return False

    def close(self) -> None:
        """As ``StoredTier.close``."""
        self.index.close()

    @returns_failure
    def sweep(self) -> None:
        """Delete what no row names: leftovers of expiries and deletions that were cut short.

        Never while the index uploads: its file has no row until it is whole.
        """
        entries = expect(self._driver.entries(self._home.folder))
        # After the listing: a file that is begun meanwhile is not in it.
        names = [*self.metadata.queues(), self._home.index_queue]
        kept = {
            FileAddress(self._folder, name, kind).segment_path(row.base_offset)
            for name in names
            for kind in FileKind
            for row in self.metadata.segments(name, kind)
        }
        damaged = [QueueName(self._home.broker, *queue) for queue in self.damaged]
        spared = tuple(f"{self._folder}/{name.path}/" for name in damaged)
        paths = [entry.path for entry in entries if entry.path not in kept]
        left = [path for path in paths if is_segment(path) and not path.startswith(spared)]
        expect(self._driver.delete(left))

    @returns_failure
    def rebuild(self, now_ms: int) -> None:
        """Open all queues that the store has, also those that the metadata lost. Raises OSError.

        Records without units get them: nothing tells what a crash left from what was lost with the
        metadata. Files of deleted queues that no ``sweep`` removed are found too.
        """
        stored = sizes_by_folder(expect(self._driver.entries(self._home.folder)))
        expect(complete_units(self._driver, stored, self._limits.units_bytes))
        for folder, found in sorted(stored.items()):
            topic, queue_id, kind = folder.split("/")[-3:]
            name = QueueName(self._home.broker, topic, int(queue_id))
            if kind == FileKind.COMMIT_LOG.name and self.metadata.queue(name) is None:
                self.metadata.topic_id(topic, now_ms)
                self.metadata.set_queue(name, 0, UNKNOWN_OFFSET, now_ms)
                if _has_hole(found):
                    # Without rows all behind the hole would count as what a crash left.
                    log = FileKind.COMMIT_LOG
                    rows = [SegmentRow(name.path, log, base, size=found[base]) for base in found]
                    self.metadata.set_segments(name, log, rows)
        expect(self.open(now_ms))


def _has_hole(found: Sizes) -> bool:
    return any(base + found[base] != other for base, other in pairwise(sorted(found)))
