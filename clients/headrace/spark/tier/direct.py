"""The work of a task that reads a tier itself.

One offset says how far the task is, whatever it reads from: the tier, the tier after a new plan, or
the broker. So there is no gap and no overlap where it goes from one to the other.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from headrace.consumer.subscription import Subscription
from headrace.errors import HeadraceError
from headrace.spark.connections import TASK_TIMEOUT_MS, Connections
from headrace.spark.errors import DataLoss, TierGone
from headrace.spark.tier.manifest import open_tier
from headrace.spark.tier.plans import ask_range
from headrace.spark.tier.reader import slices
from headrace_protocol.java_hash import java_hash

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.spark.plan.tasks import QueueRange, ReadPlan
    from headrace.spark.tier.spans import TierRange
    from headrace_protocol.columns import RecordColumns

# Plans without a message read in between.
_PLANS_MAX: Final = 2

_logger = logging.getLogger(__name__)


def read_direct(
    plan: ReadPlan, part: QueueRange, tier: TierRange
) -> Iterator[tuple[int, RecordColumns | None]]:
    """The records of a range, each block with the next offset to read.

    Ends at ``part.end_offset``, or before it where only the broker has the rest.

    Raises TierUnreachable, and DataLoss for messages that have expired from a tier without broker.
    """
    offset, plan_count = part.start_offset, 0
    current: TierRange | None = tier
    while current is not None and offset < part.end_offset:
        try:
            for next_offset, columns in _read(plan, part, current, offset):
                offset, plan_count = next_offset, 0
                yield offset, columns
            reason = "has expired from the tier"
        except TierGone as error:
            _logger.info("another plan for the tier is needed: %s", error)
            reason = str(error)
        if offset < part.end_offset:
            plan_count += 1
            current = _new_plan(plan, part, tier, offset) if plan_count < _PLANS_MAX else None
    if offset < part.end_offset and not part.address:
        loss = DataLoss(part.topic, part.broker, part.queue_id, offset, reason)
        if plan.fail_on_data_loss:
            raise loss
        _logger.warning("skipped %s lost messages: %s", part.end_offset - offset, loss)


def _read(
    plan: ReadPlan, part: QueueRange, tier: TierRange, offset: int
) -> Iterator[tuple[int, RecordColumns | None]]:
    delta = part.offset_delta
    start, end = offset - delta, part.end_offset - delta
    read = slices(tier.open(), start, end, _codes(plan, part), plan.slice_bytes)
    for next_offset, columns in read:
        if columns is not None and delta:
            columns.queue_offset = columns.queue_offset + delta
        yield next_offset + delta, columns


def _codes(plan: ReadPlan, part: QueueRange) -> frozenset[int] | None:
    """Hashes of the wanted tags; None for all."""
    tags = plan.predicates.tags if plan.predicates else None
    wanted = Subscription(part.topic, plan.tags).tags if tags is None else tags
    return frozenset(map(java_hash, wanted)) if wanted else None


def _new_plan(plan: ReadPlan, part: QueueRange, tier: TierRange, offset: int) -> TierRange | None:
    """The tier's messages of the queue by now; None if the broker can't say."""
    if tier.access.manifest is not None:
        return open_tier(tier.access).ranges.get(part.physical)
    offsets = offset - part.offset_delta, part.end_offset - part.offset_delta
    with suppress(HeadraceError), Connections(plan.dial, TASK_TIMEOUT_MS) as brokers:
        return ask_range(brokers, part.address, part.physical, offsets, tier.access)
    return None
