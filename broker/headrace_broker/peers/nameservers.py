"""Look-ups of brokers and routes at the nameservers to which this broker is connected.

Source: docs/architecture.md "Other daemons"; tests/broker/peers/test_peers.py.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, TypeVar

from headrace_broker.peers.callers import FENCE, LOOKUPS
from headrace_broker.peers.peers import Ask
from headrace_protocol.bodies import (
    PERM_READ,
    BrokerMemberGroup,
    ClusterInfo,
    GetBrokerMemberGroupResponseBody,
    MessageQueue,
    TopicRouteData,
)
from headrace_protocol.bounds import QUEUE_NUMS_MAX
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.departed import ClusterInfoHeader
from headrace_protocol.drivers.errors import ConnectFailed, HeadraceError
from headrace_protocol.nameserver_headers import GetBrokerMemberGroupHeader, GetRouteInfoHeader
from headrace_protocol.statictopic.mapping import logic_broker_name
from headrace_protocol.waiting import Until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from headrace_broker.peers.peers import Outcome, Peers
    from headrace_protocol.departed import DepartedBroker
    from headrace_protocol.drivers.response import Response
    from headrace_protocol.statictopic.mapping import MappingInfo
    from headrace_protocol.tls.names import ServerNames

T = TypeVar("T")
# By broker name, what the broker has registered of a static topic.
Infos = dict[str, "MappingInfo"]

_MASTER_ID: Final = 0
# The request for the brokers that left.
DEPARTED: Final = (RequestCode.GET_BROKER_CLUSTER_INFO, ClusterInfoHeader(departed=True))


class Nameservers:
    """Look-ups at the nameservers to which this broker is connected.

    addresses: of all its nameservers. peers: its connections. names: learn those of brokers.
    """

    def __init__(
        self, peers: Peers, cluster: str, addresses: Sequence[str], names: ServerNames
    ) -> None:
        self.addresses = addresses
        self.peers = peers
        self._cluster = cluster
        self._names = names
        self._held: list[str] = []

    @asynccontextmanager
    async def hold(self, address: str) -> AsyncIterator[None]:
        """Keep a connection for the time of a block; see ``Peers.hold``."""
        async with self.peers.hold(address):
            self._held.append(address)
            try:
                yield
            finally:
                self._held.remove(address)

    # -- all of them -------------------------------------------------------------------------------

    async def find_address(self, broker_name: str) -> str:
        """The address of a broker of the cluster. Raises HeadraceError."""

        async def look(nameserver: str) -> str | None:
            return (await self.members(nameserver, broker_name)).get(_MASTER_ID)

        address = await self._first(look)
        if address is None:
            raise ConnectFailed(broker_name, "no nameserver knows a master of this name")
        return address

    async def knows(self, address: str) -> bool:
        """True if a nameserver knows a broker at an address. Raises HeadraceError."""

        async def look(nameserver: str) -> bool | None:
            ask = Ask(nameserver, RequestCode.GET_BROKER_CLUSTER_INFO)
            info = (await self.peers.ask(LOOKUPS, ask)).expect().decode(ClusterInfo)
            brokers = info.broker_addr_table.values()
            return any(address in broker.broker_addrs.values() for broker in brokers) or None

        return await self._first(look) is not None

    async def find_infos(self, topic: str) -> list[MappingInfo]:
        """The brokers' mappings of a static topic, if any nameserver has some.

        Raises HeadraceError.
        """

        async def look(nameserver: str) -> Infos | None:
            route = await self.peers.ask(LOOKUPS, _route(nameserver, topic))
            return _infos(route) if route.command.code == ResponseCode.SUCCESS else None

        return [*(await self._first(look) or {}).values()]

    async def find_queues(self, topic: str) -> list[MessageQueue] | None:
        """The readable queues of a topic on all brokers, in RocketMQ's order; None without a route.

        For the coroutine of a request. Raises HeadraceError.
        """

        async def look(nameserver: str) -> list[MessageQueue] | None:
            ask = _route(nameserver, topic)
            route: Outcome = await Until(
                f"nameserver {nameserver}",
                lambda run: self.peers.begin(LOOKUPS, ask, run.resume),
            )
            if isinstance(route, HeadraceError):
                raise route
            is_unknown = route.command.code == ResponseCode.TOPIC_NOT_EXIST
            return None if is_unknown else queues_in(topic, route.expect())

        return await self._first(look)

    async def _first(self, look: Callable[[str], Awaitable[T | None]]) -> T | None:
        """The first result. Raises HeadraceError if there is none and a nameserver has failed."""
        problem: HeadraceError | None = None
        for nameserver in [*self._held]:
            try:
                found = await look(nameserver)
            except HeadraceError as error:
                problem = error
            else:
                if found is not None:
                    return found
        if problem is not None:
            raise problem
        return None

    # -- one of them -------------------------------------------------------------------------------

    async def members(self, nameserver: str, broker_name: str) -> dict[int, str]:
        """The addresses of a broker by id, as a nameserver knows them. Raises HeadraceError."""
        header = GetBrokerMemberGroupHeader(cluster_name=self._cluster, broker_name=broker_name)
        ask = Ask(nameserver, RequestCode.GET_BROKER_MEMBER_GROUP, header=header)
        response = await self.peers.ask(LOOKUPS, ask)
        if response.command.code != ResponseCode.SUCCESS:
            return {}
        body = response.decode(GetBrokerMemberGroupResponseBody)
        addresses = (body.broker_member_group or BrokerMemberGroup()).broker_addrs
        for address in addresses.values():
            self._names.put(address, broker_name, self._cluster)
        return addresses

    async def departed(self, nameserver: str) -> list[DepartedBroker]:
        """The brokers that left, as a nameserver remembers them. Raises HeadraceError.

        Apache RocketMQ's nameservers remember none.
        """
        code, header = DEPARTED
        ask = Ask(nameserver, code, header=header)
        return departed_in(await self.peers.ask(LOOKUPS, ask))

    async def infos(self, nameserver: str, topics: Sequence[str]) -> dict[str, Infos]:
        """The mappings of topics that a nameserver has. Raises HeadraceError."""
        asks = [_route(nameserver, topic) for topic in topics]
        found: dict[str, Infos] = {}
        for topic, outcome in zip(topics, await self.peers.ask_many(FENCE, asks), strict=True):
            if isinstance(outcome, HeadraceError):
                raise outcome
            if outcome.command.code == ResponseCode.SUCCESS:
                found[topic] = _infos(outcome)
        return found


def departed_in(response: Response) -> list[DepartedBroker]:
    """The brokers that left, as the answer to DEPARTED names them. Raises HeadraceError."""
    return response.expect().decode(ClusterInfo).departed_brokers or []


def _route(nameserver: str, topic: str) -> Ask:
    header = GetRouteInfoHeader(topic=topic, accept_standard_json_only=True)
    return Ask(nameserver, RequestCode.GET_ROUTEINFO_BY_TOPIC, header=header)


def _infos(route: Response) -> Infos:
    return route.decode(TopicRouteData).topic_queue_mapping_by_broker or {}


def queues_in(topic: str, route: Response) -> list[MessageQueue]:
    """The readable queues of a topic in its route. Raises HeadraceError."""
    data = route.decode(TopicRouteData)
    infos = (data.topic_queue_mapping_by_broker or {}).values()
    if infos:
        counts = {logic_broker_name(): max(info.total_queues for info in infos)}
    else:
        parts = [part for part in data.queue_datas if part.perm & PERM_READ]
        counts = {part.broker_name: part.read_queue_nums for part in parts}
    if sum(max(0, count) for count in counts.values()) > QUEUE_NUMS_MAX:
        raise route.malformed(f"topic {topic} has over {QUEUE_NUMS_MAX} queues")
    return [MessageQueue(topic, name, n) for name in sorted(counts) for n in range(counts[name])]
