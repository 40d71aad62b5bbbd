"""Plan a read of the tier itself: what it has, and what only the broker has, as separate tasks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from headrace.spark.cluster import Cluster
from headrace.spark.errors import DataLoss, TierGone
from headrace.spark.plan.ranges import not_empty, report
from headrace.spark.plan.splits import SizeCurve, cut, packed_tasks, read_tasks, size_curves
from headrace.spark.tier.locations import expect

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.spark.chains import Item, Queues
    from headrace.spark.options import ReadOptions
    from headrace.spark.plan.ranges import Ranges
    from headrace.spark.plan.tasks import QueueRange, ReadTask
    from headrace.spark.tier.manifest import StoredTier
    from headrace.spark.tier.spans import TierRange
    from headrace_protocol.bodies import MessageQueue

# Units read of a span to see how large its messages are.
_SAMPLES = 64
_MESSAGES_PER_SAMPLE = 4096


def tasks_for(
    source: Cluster | StoredTier, queues: Queues, ranges: Ranges, options: ReadOptions
) -> list[ReadTask]:
    """As ``splits.read_tasks``; with option ``tier``, what the tier has is read there."""
    if options.tier is None:
        assert isinstance(source, Cluster)
        return read_tasks(source, queues, ranges, options.split_bytes)
    pieces: list[tuple[QueueRange, float]] = []
    for queue, parts in source.parts(not_empty(ranges), queues).items():
        for part in parts:
            if part.message_count:
                pieces += _pieces_of(source, queue, part, options)
    return packed_tasks(pieces, options.split_bytes)


def _pieces_of(
    source: Cluster | StoredTier, queue: MessageQueue, part: Item, options: ReadOptions
) -> list[tuple[QueueRange, float]]:
    assert options.tier is not None
    try:
        return list(_pieces(source, queue, part, source.tier_range(part, options.tier), options))
    except TierGone:
        # The tier has changed since it was asked for.
        return list(_pieces(source, queue, part, source.tier_range(part, options.tier), options))


def _pieces(
    source: Cluster | StoredTier,
    queue: MessageQueue,
    part: Item,
    tier: TierRange,
    options: ReadOptions,
) -> Iterator[tuple[QueueRange, float]]:
    delta, split_bytes = part.delta, options.split_bytes
    for start, end, is_there in tier.runs(part.start - delta, part.end - delta):
        run = part.part(start + delta, end + delta)
        if is_there:
            curve = _curve(tier.cut(start, end), run)
            for piece, size in cut(queue, run, curve, split_bytes):
                needed = tier.cut(piece.start_offset - delta, piece.end_offset - delta)
                yield replace(piece, tier=needed), size
        elif isinstance(source, Cluster):
            curves = size_curves(source, [run], split_bytes)
            yield from cut(queue, run, curves[run.physical], split_bytes)
        else:
            found = f"the tier continues at {run.end}"
            loss = DataLoss(queue.topic, queue.broker_name, queue.queue_id, run.start, found)
            report(loss, run.message_count, fail=options.fail_on_data_loss)


def _curve(tier: TierRange, run: Item) -> SizeCurve:
    """The bytes over a run of the tier, by the messages' offsets in the queue's log."""
    start, end = run.start - run.delta, run.end - run.delta
    stored = tier.open()
    log_ends = {span.base: span.end for span in tier.log}
    log_offsets: dict[int, int] = {}
    for span in tier.units:
        if span.log_base >= 0:
            log_offsets |= {span.first: span.log_base, span.end: log_ends[span.log_base]}
            continue
        first, last = max(span.first, start), min(span.end, end) - 1
        samples = min(_SAMPLES, 2 + span.count // _MESSAGES_PER_SAMPLE)
        for offset in np.linspace(first, last, samples, dtype=np.int64).tolist():
            unit = expect(stored.units(offset, 1)).units[0]
            log_offsets[offset] = int(unit["physical_offset"])
        log_offsets[last + 1] = int(unit["physical_offset"]) + int(unit["size"])
    known = sorted(log_offsets)
    offsets = [start, *(offset for offset in known if start < offset < end), end]
    at = np.interp(offsets, known, [log_offsets[offset] for offset in known])
    moved = [offset + run.delta for offset in offsets]
    return SizeCurve(moved, (at - at[0]).tolist())
