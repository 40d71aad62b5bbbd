"""Split queue ranges into tasks of roughly equal bytes, by sampling the ConsumeQueues.

Units are sampled at offsets spread over each range. Where the log grew between two of them by much
more than the samples account for, larger messages may be hidden, so more units are sampled in
between. Messages of other queues make the log grow as well, so the number of samples is bounded.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

from headrace.spark.errors import OptionError
from headrace.spark.plan.ranges import Range, not_empty, shown
from headrace.spark.plan.tasks import QueueRange, ReadTask

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from headrace.spark.chains import Item, Queues
    from headrace.spark.cluster import Cluster
    from headrace.spark.plan.ranges import Ranges
    from headrace_protocol.bodies import ConsumeQueueData, MessageQueue

_WINDOW_UNITS = 16
# A sample costs a broker about 100 µs, reading a message half a microsecond.
_MESSAGES_PER_SAMPLE = 16_384
_FIRST_SAMPLES_MAX = 64
_SAMPLES_MAX = 256
# Starting a task costs Spark about 20 ms, as much as reading this many bytes.
_PACKED_BYTES = 8 * 1024 * 1024
# Far more than Spark plans in reasonable time. Sizes are reported by brokers, so not trusted.
_PIECES_MAX = 1_000_000


class SizeCurve(NamedTuple):
    """Cumulative bytes of a range's messages at some offsets, linear between them."""

    offsets: list[int]
    bytes_before: list[float]

    @property
    def total_bytes(self) -> float:
        """Bytes of the whole range."""
        return self.bytes_before[-1]

    def offset_at(self, bytes_before: float) -> int:
        """The offset with this many bytes before it."""
        after = bisect_left(self.bytes_before, bytes_before)
        if after in {0, len(self.offsets)}:
            return self.offsets[min(after, len(self.offsets) - 1)]
        low, high = self.bytes_before[after - 1], self.bytes_before[after]
        first, last = self.offsets[after - 1], self.offsets[after]
        return first + round((last - first) * (bytes_before - low) / (high - low))


class _Sample(NamedTuple):
    """Consecutive units from one offset on."""

    first_physical_offset: int
    sizes: list[int]

    @classmethod
    def of(cls, units: list[ConsumeQueueData]) -> _Sample:
        sizes = [unit.physic_size for unit in units]
        return cls(units[0].physic_offset if units else 0, sizes)

    @property
    def mean_bytes(self) -> float:
        return sum(self.sizes) / max(1, len(self.sizes))


_Samples = dict[int, _Sample]


def size_curves(
    cluster: Cluster, parts: Iterable[Item], step_bytes: int
) -> dict[MessageQueue, SizeCurve]:
    """The distribution of bytes over each part, by its physical queue. No part may be empty.

    step_bytes: the precision wanted: no more than this should be hidden between two samples.
    """
    ranges = {
        part.physical: Range(part.start - part.delta, part.end - part.delta) for part in parts
    }
    queues = {part.physical: part.address for part in parts}
    samples: dict[MessageQueue, _Samples] = {queue: {} for queue in ranges}
    wanted = {queue: _spread(each) for queue, each in ranges.items()}
    while starts := [(queue, offset) for queue, offsets in wanted.items() for offset in offsets]:
        for (queue, offset), units in cluster.units(starts, _WINDOW_UNITS, queues).items():
            samples[queue][offset] = _Sample.of(units)
        wanted = {
            queue: _uncertain_midpoints(samples[queue], each, step_bytes)
            for queue, each in ranges.items()
        }
    return {
        part.physical: _curve(samples[part.physical], ranges[part.physical], part.delta)
        for part in parts
    }


def joined(curves: Iterable[SizeCurve]) -> SizeCurve:
    """The curve of consecutive ranges; there are no bytes between them."""
    offsets: list[int] = []
    bytes_before: list[float] = []
    for curve in curves:
        base = bytes_before[-1] if bytes_before else 0.0
        offsets += curve.offsets
        bytes_before += [base + each for each in curve.bytes_before]
    return SizeCurve(offsets or [0], bytes_before or [0.0])


def _spread(each: Range) -> list[int]:
    count = each.end - each.start
    if count <= _WINDOW_UNITS * 2:
        return list(range(each.start, each.end, _WINDOW_UNITS))
    samples = min(max(1, count // _MESSAGES_PER_SAMPLE), _FIRST_SAMPLES_MAX)
    last = each.end - _WINDOW_UNITS
    return [*(each.start + (count * index // samples) for index in range(samples)), last]


def _segments(samples: _Samples, each: Range) -> Iterator[tuple[int, int]]:
    return pairwise([*sorted(samples), each.end])


def _uncertain_midpoints(samples: _Samples, each: Range, step_bytes: int) -> list[int]:
    """Midpoints of segments that may hide more than ``step_bytes``, the worst first."""
    unexplained_bytes = {
        (start + end) // 2: span - _least(samples, start, end)
        for start, end in _segments(samples, each)
        for span in [_span(samples, start, end)]
        if span is not None
    }
    worst = sorted(unexplained_bytes, key=lambda middle: -unexplained_bytes[middle])[
        : _SAMPLES_MAX - len(samples)
    ]
    return [middle for middle in worst if unexplained_bytes[middle] > step_bytes]


def _span(samples: _Samples, start: int, end: int) -> int | None:
    """The log's growth from one sample to the next; None if all units between are known."""
    if end - start <= _WINDOW_UNITS:
        return None
    return samples[end].first_physical_offset - samples[start].first_physical_offset


def _least(samples: _Samples, start: int, end: int) -> float:
    return min(samples[start].mean_bytes, samples[end].mean_bytes) * (end - start)


def _estimate(samples: _Samples, start: int, end: int) -> float:
    span = _span(samples, start, end)
    if span is None:
        return sum(samples[start].sizes[: end - start])
    mean = (samples[start].mean_bytes + samples[end].mean_bytes) / 2
    # The span is negative if a broker reports nonsense.
    return max(0.0, min(mean * (end - start), span))


def _curve(samples: _Samples, each: Range, delta: int) -> SizeCurve:
    sizes = [_estimate(samples, *segment) for segment in _segments(samples, each)]
    offsets = [offset + delta for offset in (*sorted(samples), each.end)]
    return SizeCurve(offsets, list(accumulate(sizes, initial=0.0)))


def read_tasks(
    cluster: Cluster, queues: Queues, ranges: Ranges, split_bytes: int
) -> list[ReadTask]:
    """``ranges`` as tasks of about ``split_bytes`` at most; small ranges share a task.

    A task reads the messages of a static topic's queue from the brokers that have them.
    """
    parts = cluster.parts(not_empty(ranges), queues)
    wanted = [(queue, part) for queue, some in parts.items() for part in some if part.message_count]
    curves = size_curves(cluster, [part for _, part in wanted], split_bytes)
    pieces = [
        piece
        for queue, part in wanted
        for piece in cut(queue, part, curves[part.physical], split_bytes)
    ]
    return packed_tasks(pieces, split_bytes)


def cut(
    queue: MessageQueue, part: Item, curve: SizeCurve, split_bytes: int
) -> list[tuple[QueueRange, float]]:
    """Ranges of about ``split_bytes`` at most, with their bytes. Raises OptionError."""
    count = _piece_count(queue, curve, split_bytes)
    return [(each, curve.total_bytes / count) for each in _cut(queue, part, curve, count)]


def packed_tasks(pieces: Iterable[tuple[QueueRange, float]], split_bytes: int) -> list[ReadTask]:
    """Tasks for ranges of some bytes each; small ones share a task."""
    return [ReadTask(tuple(group)) for group in _packed(pieces, min(_PACKED_BYTES, split_bytes))]


def _piece_count(queue: MessageQueue, curve: SizeCurve, split_bytes: int) -> int:
    """The number of tasks for a queue. Raises OptionError."""
    count = max(1, -int(-curve.total_bytes // split_bytes))
    if count > _PIECES_MAX:
        raise OptionError(
            "splitBytes",
            str(split_bytes),
            f"would make {count} tasks of {shown(queue)}, which has {curve.total_bytes:.3g} bytes "
            f"according to its broker; the maximum is {_PIECES_MAX}: set a larger splitBytes, or "
            "read less with starting and ending",
        )
    return count


def _cut(queue: MessageQueue, part: Item, curve: SizeCurve, count: int) -> Iterator[QueueRange]:
    physical = part.physical if part.physical != queue else None
    step = curve.total_bytes / count
    inner = [curve.offset_at(step * index) for index in range(1, count)]
    for start, end in pairwise([curve.offsets[0], *inner, curve.offsets[-1]]):
        if start < end:
            yield QueueRange(
                queue.topic,
                queue.broker_name,
                part.address,
                queue.queue_id,
                start,
                end,
                physical,
                part.delta,
            )


def _packed(
    pieces: Iterable[tuple[QueueRange, float]], bytes_max: int
) -> Iterator[list[QueueRange]]:
    group: list[QueueRange] = []
    group_bytes = 0.0
    for piece, piece_bytes in pieces:
        if group and group_bytes + piece_bytes > bytes_max:
            yield group
            group, group_bytes = [], 0.0
        group.append(piece)
        group_bytes += piece_bytes
    if group:
        yield group
