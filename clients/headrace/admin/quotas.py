"""An operator's view of quotas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.admin.requests import BrokerRequests
from headrace.errors import ConfigurationError
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.quotas import QuotaList

if TYPE_CHECKING:
    from headrace.admin.requests import BrokerProblem
    from headrace_protocol.drivers.response import Response
    from headrace_protocol.quotas import Quota


class QuotaAdmin(BrokerRequests):
    """The methods of Admin for quotas.

    Each master and each nameserver applies them to what it serves itself. Apache RocketMQ's
    nameservers have none, and are skipped.
    """

    async def set_quota(self, quota: Quota, *, broker: str | None = None) -> None:
        """Set the limits of a user, topic or group at each daemon, in place of those it has.

        Nameservers get those of a user's limits that they can apply. A quota without limits removes
        them. broker: set them at this broker alone.
        Raises ConfigurationError for limits that can't be kept.
        """
        try:
            quota.check()
        except RequestError as error:
            raise ConfigurationError(error.remark) from None
        at_nameserver = quota.at_nameserver()
        nameservers = self._quota_nameservers() if at_nameserver and broker is None else {}

        async def ask(address: str) -> None:
            is_broker = address not in nameservers.values()
            wanted = quota if is_broker or at_nameserver is None else at_nameserver
            await self._ask_quotas(address, RequestCode.SET_QUOTA, wanted.encode())

        await self._gather(await self._masters(broker) | nameservers, ask, None)

    async def quotas(
        self, *, problems: list[BrokerProblem] | None = None
    ) -> dict[str, list[Quota]]:
        """The quotas of each daemon, by name of a broker, or as ``nameserver HOST:PORT``."""

        async def ask(address: str) -> list[Quota] | None:
            response = await self._ask_quotas(address, RequestCode.LIST_QUOTAS)
            return None if response is None else response.decode(QuotaList).quotas

        return await self._gather(await self._masters() | self._quota_nameservers(), ask, problems)

    def _quota_nameservers(self) -> dict[str, str]:
        return {f"nameserver {each}": each for each in self._instance.nameservers}

    async def _ask_quotas(self, address: str, code: int, body: bytes = b"") -> Response | None:
        """A daemon's answer; None of a nameserver of Apache RocketMQ."""
        self._instance.check_open("Admin")
        response = await self._instance.request(address, code, None, body)
        is_unknown = response.command.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
        if is_unknown and address in self._instance.nameservers:
            return None
        return response.expect()
