"""A run: reads the sealed segments of a queue and writes new ones without superseded messages.

A *round* enters the keys of records from the position on in the ``OffsetMap`` until it is full, and
drops what is older than the newest record of a key: among the records entered as it goes, before
them by a second pass. The next round begins where this one ended, with an empty map; no round
touches records past its end. After all rounds the kept records are written once, so a further round
costs reads and no writes.

A record is dropped only if the log has a newer record of its key, or if it is a delete marker that
an earlier run contained long enough ago and that hides no value in another queue. All others are
kept, also those without a key. A run writes nothing but new files in ``compacting/``; ``swap.py``
puts them in place.
"""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from headrace_broker.compaction.key_hash import KeyHash
from headrace_broker.compaction.offset_map import OffsetMap
from headrace_broker.compaction.queue_log import QueueLog
from headrace_broker.compaction.record_blocks import Marks, RecordSequence
from headrace_broker.compaction.run_state import MarkerTimes  # noqa: TC001 - msgspec decodes it
from headrace_broker.store.queues.queue_blocks import QueueBlock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace_broker.compaction.record_blocks import Block
    from headrace_broker.compaction.segments import Folders, Segment
    from headrace_broker.compaction.units import FileSizes
    from headrace_broker.store.files.filesystem import Files
    from headrace_protocol.columns import Array


class Job(NamedTuple):
    """The task of a run.

    position: first queue offset whose key no run has entered yet.
    stored_until_ms: the run ends before the first record that was stored later (minimum lag).
    markers_before_ms: delete markers that a run contained before this time are dropped, unless the
    run ``keeps_markers``.
    """

    position: int
    now_ms: int
    stored_until_ms: int
    markers_before_ms: int
    marker_times: MarkerTimes
    map_bytes_max: int
    keeps_markers: bool = False


class Merge(NamedTuple):
    """The first segments of a run are a master's, the others the queue's own.

    segment_count: of the master's. hides_from: records of the master from this queue offset on
    only supersede older ones; they are not kept.
    """

    segment_count: int
    hides_from: int


class NewFile(NamedTuple):
    """A new segment: its name, its number of records and where they end in its log."""

    base: int
    record_count: int
    log_end: int


class Group(NamedTuple):
    """Names of adjacent segments, and the new files that replace them."""

    old: list[int]
    new: list[NewFile]


class Result(NamedTuple):
    """The outcome of a run. The counts are of messages; bytes are those of records and units.

    next_position: the next run's ``position``. kept_end: one past the last queue offset that is
    kept. marker_count: delete markers that are kept.
    key_count: keys entered by all rounds. map_bytes: size of the map.
    """

    groups: list[Group]
    next_position: int
    kept_end: int
    marker_times: MarkerTimes
    kept_count: int
    dropped_count: int
    marker_count: int
    key_count: int
    round_count: int
    map_bytes: int
    bytes_read: int
    bytes_written: int


class Run:
    """One run over the sealed segments of a queue, in any thread or process.

    pace: called with a number of bytes before they are read or written; may wait, or raise to end
    the run. merge: None for a run over the queue's own segments.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        job: Job,
        pace: Callable[[int], None],
        merge: Merge | None = None,
    ) -> None:
        self._sequence = RecordSequence(segments, pace)
        self._job = job
        self._pace = pace
        self._merge = merge
        self._hash = KeyHash()
        self._dropped = Marks(self._sequence.count)
        self._markers = Marks(self._sequence.count)
        self._round_count = 0
        self._key_count = 0

    def compact(self, folders: Folders, sizes: FileSizes, fs: Files) -> Result:
        """Write new segments into ``folders``, which hold no files yet; they are on disk then.

        Raises OSError, SegmentDamaged.
        """
        job, sequence = self._job, self._sequence
        begin, end = sequence.range_of(job.position, job.stored_until_ms)
        offset_map = OffsetMap(job.map_bytes_max, end - begin)
        self._run_rounds(begin, end, offset_map)
        next_position = max(sequence.queue_offset(end), job.position)
        if self._merge is not None:
            next_position = self._drop_hiding(self._merge, end, next_position)
        groups, bytes_written = self._write(folders, sizes, fs)
        dropped_count = self._dropped.count()
        return Result(
            groups=groups,
            next_position=next_position,
            kept_end=self._kept_end(),
            marker_times=job.marker_times.after_run(
                next_position, job.now_ms, job.markers_before_ms
            ),
            kept_count=sequence.count - dropped_count,
            dropped_count=dropped_count,
            marker_count=self._markers.count() - self._markers.common_count(self._dropped),
            key_count=self._key_count,
            round_count=self._round_count,
            map_bytes=offset_map.size_bytes,
            bytes_read=sequence.bytes_read,
            bytes_written=bytes_written,
        )

    # --- deciding ----------------------------------------------------------------------------

    def _run_rounds(self, begin: int, end: int, offset_map: OffsetMap) -> None:
        dirty = begin
        while not self._round_count or begin < end:
            round_end = self._enter(begin, end, offset_map)
            for block in self._sequence.blocks(0, begin, self._dropped):
                hashes, has_key = self._hash.of_records(block.records)
                self._drop_older(block, hashes, has_key, offset_map)
                if begin == dirty:
                    self._drop_markers(block, has_key)
            self._round_count += 1
            self._key_count += offset_map.key_count
            offset_map.clear()
            begin = round_end

    def _enter(self, begin: int, end: int, offset_map: OffsetMap) -> int:
        """Enter the keys of records until the map is full; returns where the round ends."""
        for block in self._sequence.blocks(begin, end, self._dropped):
            hashes, has_key = self._hash.of_records(block.records)
            numbers = block.numbers[has_key]
            count, replaced = offset_map.put(hashes[:, has_key], numbers)
            self._dropped.set(replaced)
            if count < len(numbers):
                end = int(numbers[count])
            is_marker = has_key & (block.records.body_bytes == 0) & (block.numbers < end)
            self._markers.set(block.numbers[is_marker])
            if end <= block.numbers[-1]:
                break
        return end

    def _drop_older(
        self, block: Block, hashes: Array, has_key: Array, offset_map: OffsetMap
    ) -> None:
        """Drop the records of a block, before the round, whose keys the round has entered."""
        is_older = has_key.copy()
        is_older[has_key] = offset_map.newest(hashes[:, has_key]) >= 0
        self._dropped.set(block.numbers[is_older])

    def _drop_markers(self, block: Block, has_key: Array) -> None:
        """Drop the delete markers of a block whose time is over."""
        is_marker = has_key & (block.records.body_bytes == 0)
        offsets, before_ms = block.records.queue_offset, self._job.markers_before_ms
        is_over = is_marker & self._job.marker_times.is_over(offsets, before_ms)
        self._markers.set(block.numbers[is_marker])
        if not self._job.keeps_markers:
            self._dropped.set(block.numbers[is_over])

    def _drop_hiding(self, merge: Merge, end: int, next_position: int) -> int:
        """Drop the master's records that only supersede; returns the next run's position."""
        sequence = self._sequence
        own_first = sequence.firsts[merge.segment_count]
        segments = sequence.segments[: merge.segment_count]
        for first, segment in zip(sequence.firsts, segments, strict=False):
            offsets = segment.read_units()["queue_offset"]
            self._dropped.set(first + np.flatnonzero(offsets >= merge.hides_from))
        return min(next_position, merge.hides_from) if end < own_first else next_position

    def _kept_end(self) -> int:
        sequence = self._sequence
        kept = np.flatnonzero(~self._dropped.get(0, sequence.count))
        return sequence.queue_offset(int(kept[-1])) + 1 if len(kept) else 0

    # --- writing -----------------------------------------------------------------------------

    def _write(self, folders: Folders, sizes: FileSizes, fs: Files) -> tuple[list[Group], int]:
        groups, bytes_written = [], 0
        segments, firsts = self._sequence.segments, self._sequence.firsts
        for first, end in self._ranges(sizes):
            log = QueueLog(folders, sizes, fs, base=segments[first].base)
            for block in self._sequence.blocks(firsts[first], firsts[end], self._dropped):
                bytes_written += self._append(block, log)
            log.sync()
            new = [NewFile(file.base, file.count, file.log_end) for file in log.segments]
            groups.append(Group([old.base for old in segments[first:end]], new))
        return groups, bytes_written

    def _append(self, block: Block, log: QueueLog) -> int:
        byte_count = int(block.records.size.sum()) + block.units.nbytes
        self._pace(byte_count)
        block.check_bodies()
        first, last = (int(block.units["queue_offset"][at]) for at in (0, -1))
        log.append(QueueBlock("", 0, first, last + 1, block.units, block.records))
        return byte_count

    def _ranges(self, sizes: FileSizes) -> list[tuple[int, int]]:
        """The segments to write anew: those with dropped records, and small neighbours.

        What is kept of a range needs at most as many files as the range has, so that new files
        can take the names of old ones.
        """
        segments, pairs = self._sequence.segments, pairwise(self._sequence.firsts)
        if self._merge is not None:
            return [(0, len(segments))]
        is_dirty = [bool(self._dropped.get(*pair).any()) for pair in pairs]
        numbers = range(len(segments))
        is_wanted = [is_dirty[at] or _is_small(segments[at], sizes) for at in numbers]
        ranges = []
        for wanted, group in groupby(numbers, is_wanted.__getitem__):
            first, *rest = group
            if wanted and (rest or is_dirty[first]):
                ranges.append((first, first + len(rest) + 1))
        return ranges


def _is_small(segment: Segment, sizes: FileSizes) -> bool:
    """True if two such segments fit into one."""
    return 2 * segment.log_end < sizes.log_bytes and 2 * segment.count < sizes.units_max
