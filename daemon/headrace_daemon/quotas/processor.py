"""SET_QUOTA and LIST_QUOTAS. Source: docs/protocol.md "Quotas"."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_protocol.codes import RequestCode
from headrace_protocol.quotas import Quota, QuotaList
from headrace_protocol.serving import Reply

if TYPE_CHECKING:
    from headrace_daemon.host_log import HostLog
    from headrace_daemon.quotas.table import QuotaTable
    from headrace_protocol.serving import Registry, Request


class QuotaProcessor:
    """Serves both requests. changes: logs what clients change."""

    def __init__(self, table: QuotaTable, changes: HostLog) -> None:
        self._table, self._changes = table, changes

    def register(self, registry: Registry) -> None:
        """Route the requests."""
        registry.route(RequestCode.SET_QUOTA, self.set)
        registry.route(RequestCode.LIST_QUOTAS, self.list)

    async def set(self, request: Request) -> Reply:
        """Set or remove a quota, from the next request of any client on."""
        quota = Quota.decode(request.body)
        await self._table.put(quota)
        self._changes.info(
            request.channel.address,
            "quota set" if quota.limits else "quota removed",
            of=quota.of,
            name=quota.name,
        )
        return Reply()

    def list(self, _request: Request) -> Reply:
        """All quotas, by kind and name."""
        quotas = sorted(self._table.all(), key=lambda quota: (quota.of, quota.name))
        return Reply(body=(QuotaList(quotas=quotas).encode(),))
