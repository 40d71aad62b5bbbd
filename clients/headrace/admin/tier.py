"""An operator's view of tiered storage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.admin.requests import BrokerRequests
from headrace.admin.waiting import CannotList
from headrace_protocol.codes import RequestCode
from headrace_protocol.headers import TierStatusHeader
from headrace_protocol.tier_bodies import TierStatus

if TYPE_CHECKING:
    from headrace.admin.requests import BrokerProblem

_COUNT = 32


class TierAdmin(BrokerRequests):
    """The methods of Admin for tiered storage."""

    async def tier_status(
        self,
        topic: str | None = None,
        *,
        max_count: int = _COUNT,
        problems: list[BrokerProblem] | None = None,
    ) -> dict[str, TierStatus]:
        """The state of each broker's tier, by broker name.

        topic: only the queues of this one. max_count: of each broker, the queues that are furthest
        behind. Raises RouteNotFound for an unknown topic, CannotList for brokers of Apache
        RocketMQ, BrokerError for brokers without a tier.
        """
        header = TierStatusHeader(topic=topic, max_num=max_count)

        async def ask(address: str) -> TierStatus:
            if not await self._is_headrace(address):
                raise CannotList("queues of tiered storage")
            return (await self._ask(address, RequestCode.TIER_STATUS, header)).decode(TierStatus)

        masters = await (self._masters() if topic is None else self._topic_masters(topic))
        return await self._gather(masters, ask, problems)
