"""An operator's view of tiered storage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.admin.requests import BrokerRequests
from headrace.admin.waiting import CannotList
from headrace_protocol.bounds import ITEMS_MAX
from headrace_protocol.codes import RequestCode
from headrace_protocol.tier_bodies import TierStatus
from headrace_protocol.tier_headers import TierForgetHeader, TierResumeHeader, TierStatusHeader

if TYPE_CHECKING:
    from headrace.admin.requests import BrokerProblem
    from headrace_protocol.headers import RequestHeader


class TierAdmin(BrokerRequests):
    """The methods of Admin for tiered storage."""

    async def tier_status(
        self,
        topic: str | None = None,
        *,
        max_count: int = ITEMS_MAX,
        problems: list[BrokerProblem] | None = None,
    ) -> dict[str, TierStatus]:
        """The state of each broker's tier, by broker name.

        topic: only the queues of this one. max_count: of each broker, the queues that are furthest
        behind; its ``queue_count`` tells whether there are more. Raises RouteNotFound for an
        unknown topic, CannotList for brokers of Apache RocketMQ, BrokerError for brokers without a
        tier.
        """
        header = TierStatusHeader(topic=topic, max_num=max_count)
        return await self._ask_tiers(RequestCode.TIER_STATUS, header, topic, problems)

    async def tier_resume(
        self, topic: str | None = None, *, problems: list[BrokerProblem] | None = None
    ) -> dict[str, TierStatus]:
        """Have each broker try its uploads at once, also of queues that it has given up.

        topic: only the queues of this one. Returns the queues that were given up, by broker name;
        ``tier_status`` says what became of them. Raises as ``tier_status``.
        """
        header = TierResumeHeader(topic=topic)
        return await self._ask_tiers(RequestCode.TIER_RESUME, header, topic, problems)

    async def tier_forget(
        self, topic: str, queue_id: int, *, broker: str, from_offset: int
    ) -> TierStatus:
        """Have a broker drop what its tier has of a queue that is given up, and upload it anew.

        from_offset: messages before it are kept. What the log does not have is lost. Raises as
        ``tier_status``, and BrokerError for a queue that is not given up.
        """
        header = TierForgetHeader(topic=topic, queue_id=queue_id, from_offset=from_offset)
        (address,) = (await self._masters(broker)).values()
        return await self._ask_tier(address, RequestCode.TIER_FORGET, header)

    async def _ask_tiers(
        self,
        code: int,
        header: RequestHeader,
        topic: str | None,
        problems: list[BrokerProblem] | None,
    ) -> dict[str, TierStatus]:
        async def ask(address: str) -> TierStatus:
            return await self._ask_tier(address, code, header)

        if topic is not None:
            return await self._ask_topic(topic, ask, problems)
        return await self._gather(await self._masters(), ask, problems)

    async def _ask_tier(self, address: str, code: int, header: RequestHeader) -> TierStatus:
        if not await self._is_headrace(address):
            raise CannotList("queues of tiered storage")
        return (await self._ask(address, code, header)).decode(TierStatus)
