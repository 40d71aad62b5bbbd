"""Counts of requests that cross brokers because of static topics."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from headrace_broker.statictopic.forward import Forwarding
    from headrace_broker.statictopic.remote_queue import RemoteReader
    from headrace_broker.statictopic.table import MappingTable


class StaticTraffic(NamedTuple):
    """Counts since the start."""

    mappings: MappingTable
    remote: RemoteReader
    forwarding: Forwarding

    def runtime_info(self) -> dict[str, str]:
        """Counters for GET_BROKER_RUNTIME_INFO."""
        return {
            "staticQueueRemoteReads": str(self.remote.relayed_count),
            "staticQueueRemoteBytes": str(self.remote.relayed_bytes),
            "staticQueueForwardedRequests": str(self.forwarding.forwarded_count),
        }
