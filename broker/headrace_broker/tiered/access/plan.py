"""TIER_PLAN: the spans of a queue in the tier, for those who read it themselves.

Source: docs/protocol.md "Tier plan"; tests/broker/tiered/test_tiered_plan.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.serving import Reply
from headrace_protocol.tier_bodies import TierPlan
from headrace_protocol.tier_headers import TierPlanHeader

if TYPE_CHECKING:
    from headrace_broker.tiered.access.tier_reader import TierReader
    from headrace_broker.topics.table import TopicTable
    from headrace_protocol.serving import Registry, Request

# In one answer; a turn of the loop is short.
_SPANS_MAX: Final = 1024


class TierPlanRequests:
    """Serves TIER_PLAN, without a read of the tier."""

    def __init__(self, reader: TierReader, topics: TopicTable) -> None:
        self._reader = reader
        self._topics = topics

    def register(self, registry: Registry) -> None:
        """Route the request."""
        registry.route(RequestCode.TIER_PLAN, self.plan)

    async def plan(self, request: Request) -> Reply:
        """The location of the tier, and the spans of a range in it."""
        header, reader = request.header(TierPlanHeader), self._reader
        self._topics.expect(header.topic)
        location = reader.access.location()
        if location is None:
            raise RequestError(ResponseCode.INVALID_PARAMETER, "this tier is kept in memory")
        if not reader.access.is_open:
            await reader.open_first()
        url, endpoint, region = location
        plan = TierPlan(url=url, endpoint=endpoint, region=region, next_offset=header.end_offset)
        queue = reader.access.queue(header.topic, header.queue_id)
        if queue is not None:
            wanted = header.start_offset, header.end_offset
            plan.next_offset, plan.units, plan.log = queue.spans(wanted, _SPANS_MAX)
        return Reply(body=(plan.encode(),))
