"""An operator's view of quotas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.admin.requests import BrokerRequests
from headrace.errors import ConfigurationError
from headrace_protocol.codes import RequestCode
from headrace_protocol.errors import RequestError
from headrace_protocol.quotas import QuotaList

if TYPE_CHECKING:
    from headrace.admin.requests import BrokerProblem
    from headrace_protocol.quotas import Quota


class QuotaAdmin(BrokerRequests):
    """The methods of Admin for quotas."""

    async def set_quota(self, quota: Quota, *, broker: str | None = None) -> None:
        """Set the limits of a user, topic or group on each broker, in place of those it has.

        Each broker applies them to what it serves itself. A quota without limits removes them.
        Raises ConfigurationError for limits that can't be kept.
        """
        try:
            quota.check()
        except RequestError as error:
            raise ConfigurationError(error.remark) from None
        masters = await self._masters(broker)
        await self._ask_all(masters, RequestCode.SET_QUOTA, None, quota.encode())

    async def quotas(
        self, *, problems: list[BrokerProblem] | None = None
    ) -> dict[str, list[Quota]]:
        """The quotas of each broker, by broker name. Apache RocketMQ's brokers have none."""
        ask = self._asking(RequestCode.LIST_QUOTAS, QuotaList)
        found = await self._gather(await self._masters(), ask, problems)
        return {name: each.quotas for name, each in found.items()}
