"""Ask a broker where its tier keeps messages; see docs/protocol.md "Tier plan"."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.spark.errors import OptionError
from headrace.spark.tier.spans import TierRange
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.tier.location import Location
from headrace_protocol.tier_bodies import TierPlan
from headrace_protocol.tier_headers import TierPlanHeader

if TYPE_CHECKING:
    from headrace.spark.connections import Connections
    from headrace.spark.tier.locations import TierAccess
    from headrace_protocol.bodies import MessageQueue
    from headrace_protocol.tier_bodies import LogSpan, UnitSpan

_REFUSALS = {ResponseCode.REQUEST_CODE_NOT_SUPPORTED, ResponseCode.INVALID_PARAMETER}


def ask_range(
    brokers: Connections,
    address: str,
    queue: MessageQueue,
    offsets: tuple[int, int],
    access: TierAccess,
) -> TierRange:
    """The part of a queue's range that its broker's tier has.

    offsets: at the broker, from the first up to, but not including, the second.

    Raises OptionError if the broker has no tier.
    """
    units: list[UnitSpan] = []
    log: dict[int, LogSpan] = {}
    at, end = offsets
    while True:
        header = TierPlanHeader(
            topic=queue.topic, queue_id=queue.queue_id, start_offset=at, end_offset=end
        )
        answer = brokers.ask(address, [(RequestCode.TIER_PLAN, header, b"")])[0]
        if answer.command.code in _REFUSALS:
            raise OptionError(
                "tier",
                "direct",
                f"broker {queue.broker_name} at {answer.address} can't say where its tier is: "
                f"{answer.command.remark}",
            )
        plan = answer.expect().decode(TierPlan)
        units += plan.units
        log |= {span.base: span for span in plan.log}
        if not at < plan.next_offset < end:
            location = Location(plan.url, plan.endpoint, plan.region, access.config)
            return TierRange(
                access, location, tuple(units), tuple(log[base] for base in sorted(log))
            )
        at = plan.next_offset
