"""Ranges of queues cut into tasks of about equal bytes, by a look into the ConsumeQueues.

Of each range some units are read, spread over it. Where the log grew by much more between two of
these places than the units there say, larger messages may hide: more units are read in between.
Other queues' messages make the log grow as well, so there is an end to that.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

from headrace.spark.errors import OptionError
from headrace.spark.plan.ranges import Range, not_empty, place
from headrace.spark.plan.tasks import QueueRange, ReadTask

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from headrace.spark.cluster import Cluster, Queues
    from headrace.spark.plan.ranges import Ranges
    from headrace_protocol.bodies import ConsumeQueueData, MessageQueue

_WINDOW_UNITS = 16
# A look costs a broker some 100 µs, a message read half a microsecond.
_MESSAGES_PER_LOOK = 16_384
_FIRST_LOOKS_MAX = 64
_LOOKS_MAX = 256
# A task costs Spark some 20 ms, as much as reading this.
_PACKED_BYTES = 8 * 1024 * 1024
# Far more than Spark plans in reasonable time; sizes are whatever a broker reports.
_PIECES_MAX = 1_000_000


class SizeCurve(NamedTuple):
    """Bytes of a range's messages before some of its offsets, straight lines between them."""

    offsets: list[int]
    bytes_before: list[float]

    @property
    def total_bytes(self) -> float:
        """Of the whole range."""
        return self.bytes_before[-1]

    def offset_at(self, bytes_before: float) -> int:
        """The offset with so many bytes before it."""
        after = bisect_left(self.bytes_before, bytes_before)
        if after in {0, len(self.offsets)}:
            return self.offsets[min(after, len(self.offsets) - 1)]
        low, high = self.bytes_before[after - 1], self.bytes_before[after]
        first, last = self.offsets[after - 1], self.offsets[after]
        return first + round((last - first) * (bytes_before - low) / (high - low))


class _Look(NamedTuple):
    """Some neighbouring units."""

    first_physical_offset: int
    sizes: list[int]

    @classmethod
    def of(cls, units: list[ConsumeQueueData]) -> _Look:
        sizes = [unit.physic_size for unit in units]
        return cls(units[0].physic_offset if units else 0, sizes)

    @property
    def mean_bytes(self) -> float:
        return sum(self.sizes) / max(1, len(self.sizes))


_Looks = dict[int, _Look]


def size_curves(
    cluster: Cluster, queues: Queues, ranges: Ranges, step_bytes: int
) -> dict[MessageQueue, SizeCurve]:
    """How the bytes of each range, none of them empty, are spread over it.

    step_bytes: what matters: so much should not hide between two places.
    """
    looks: dict[MessageQueue, _Looks] = {queue: {} for queue in ranges}
    wanted = {queue: _spread(each) for queue, each in ranges.items()}
    while places := [(queue, offset) for queue, offsets in wanted.items() for offset in offsets]:
        for (queue, offset), units in cluster.units(places, _WINDOW_UNITS, queues).items():
            looks[queue][offset] = _Look.of(units)
        wanted = {
            queue: _doubtful(looks[queue], each, step_bytes) for queue, each in ranges.items()
        }
    return {queue: _curve(looks[queue], each) for queue, each in ranges.items()}


def _spread(each: Range) -> list[int]:
    count = each.end - each.start
    if count <= _WINDOW_UNITS * 2:
        return list(range(each.start, each.end, _WINDOW_UNITS))
    looks = min(max(1, count // _MESSAGES_PER_LOOK), _FIRST_LOOKS_MAX)
    last = each.end - _WINDOW_UNITS
    return [*(each.start + (count * index // looks) for index in range(looks)), last]


def _segments(looks: _Looks, each: Range) -> Iterator[tuple[int, int]]:
    return pairwise([*sorted(looks), each.end])


def _doubtful(looks: _Looks, each: Range, step_bytes: int) -> list[int]:
    """The middles of where more than ``step_bytes`` may be hidden, the worst first."""
    doubts = {
        (start + end) // 2: span - _least(looks, start, end)
        for start, end in _segments(looks, each)
        for span in [_span(looks, start, end)]
        if span is not None
    }
    worst = sorted(doubts, key=lambda middle: -doubts[middle])[: _LOOKS_MAX - len(looks)]
    return [middle for middle in worst if doubts[middle] > step_bytes]


def _span(looks: _Looks, start: int, end: int) -> int | None:
    """How much the log grew from one place to the next; None where all units are known."""
    if end - start <= _WINDOW_UNITS:
        return None
    return looks[end].first_physical_offset - looks[start].first_physical_offset


def _least(looks: _Looks, start: int, end: int) -> float:
    return min(looks[start].mean_bytes, looks[end].mean_bytes) * (end - start)


def _estimate(looks: _Looks, start: int, end: int) -> float:
    span = _span(looks, start, end)
    if span is None:
        return sum(looks[start].sizes[: end - start])
    mean = (looks[start].mean_bytes + looks[end].mean_bytes) / 2
    # The span is negative if a broker reports nonsense.
    return max(0.0, min(mean * (end - start), span))


def _curve(looks: _Looks, each: Range) -> SizeCurve:
    sizes = [_estimate(looks, *segment) for segment in _segments(looks, each)]
    return SizeCurve([*sorted(looks), each.end], list(accumulate(sizes, initial=0.0)))


def read_tasks(
    cluster: Cluster, queues: Queues, ranges: Ranges, split_bytes: int
) -> list[ReadTask]:
    """``ranges`` as tasks of up to ``split_bytes`` or so; small ones share a task."""
    ranges = not_empty(ranges)
    curves = size_curves(cluster, queues, ranges, split_bytes)
    pieces = [
        (piece, curve.total_bytes / count)
        for queue, curve in curves.items()
        for count in [_piece_count(queue, curve, split_bytes)]
        for piece in _cut(queue, queues[queue], curve, count)
    ]
    return [ReadTask(tuple(group)) for group in _packed(pieces, min(_PACKED_BYTES, split_bytes))]


def _piece_count(queue: MessageQueue, curve: SizeCurve, split_bytes: int) -> int:
    """How many tasks share a queue. Raises OptionError."""
    count = max(1, -int(-curve.total_bytes // split_bytes))
    if count > _PIECES_MAX:
        raise OptionError(
            "splitBytes",
            str(split_bytes),
            f"makes {count} tasks of {place(queue)}, which its broker says has "
            f"{curve.total_bytes:.3g} bytes; {_PIECES_MAX} are the most: set a larger one, or "
            "read less with starting and ending",
        )
    return count


def _cut(queue: MessageQueue, address: str, curve: SizeCurve, count: int) -> Iterator[QueueRange]:
    step = curve.total_bytes / count
    inner = [curve.offset_at(step * index) for index in range(1, count)]
    for start, end in pairwise([curve.offsets[0], *inner, curve.offsets[-1]]):
        if start < end:
            yield QueueRange(queue.topic, queue.broker_name, address, queue.queue_id, start, end)


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
