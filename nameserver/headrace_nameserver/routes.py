"""Who serves which topic: a table in memory, fed by registering brokers.

It knows no clock, socket or task: time comes as an argument, in ms of a clock that never goes
back, and a channel is only something to compare. An address belongs to one broker at a time; a
broker is in the table with each of its live addresses, and a topic is there as long as a broker
that has it is.
Source: docs/protocol.md "Registration"; tests/nameserver/test_routes.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from headrace_protocol.bodies import (
    MASTER_ID,
    PERM_READ,
    PERM_WRITE,
    BrokerData,
    BrokerMemberGroup,
    ClusterInfo,
    QueueData,
    TopicRouteData,
)
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from headrace_protocol.bodies import (
        DataVersion,
        RegisterBrokerBody,
        TopicConfig,
        TopicConfigSerializeWrapper,
        TopicQueueMappingInfo,
    )
    from headrace_protocol.headers import RegisterBrokerHeader

BROKER_TIMEOUT_MS = 120_000

# Enough to explain a failing cluster; each holds the names of its topics.
LOST_BROKERS_MAX = 100

_UNIT = 1
_UNIT_SUB = 2
_BROKER_MEMBER_TOPIC = "rmq_sys_SYNC_BROKER_MEMBER_"


class LiveBroker(msgspec.Struct):
    """One address that is registered."""

    name: str
    cluster: str
    address: str
    ha_address: str
    data_version: DataVersion
    channel: object
    timeout_ms: int
    last_heard_ms: int

    @property
    def expires_ms(self) -> int:
        """When its silence will have been too long."""
        return self.last_heard_ms + self.timeout_ms


class LostBroker(msgspec.Struct):
    """One address that was registered.

    cause: what became of it, to stand between its name and a time: "was shut down".
    since_ms: time of that; of a silent broker when it was last heard.
    topics: those that the broker had; none if other addresses of it are left.
    """

    name: str
    address: str
    cause: str
    since_ms: int
    topics: set[str]


class RouteTable:
    """Brokers, their topics and what became of the brokers that are gone.

    broker_timeout_ms: silence that ends a registration which does not set its own limit.
    support_acting_master: show clients the smallest slave as master of a broker without one, if
    that broker allows it.
    """

    def __init__(
        self, *, broker_timeout_ms: int = BROKER_TIMEOUT_MS, support_acting_master: bool = False
    ) -> None:
        self._broker_timeout_ms = broker_timeout_ms
        self._support_acting_master = support_acting_master
        self._topics: dict[str, dict[str, QueueData]] = {}
        self._mappings: dict[str, dict[str, TopicQueueMappingInfo]] = {}
        self._brokers: dict[str, BrokerData] = {}
        self._live: dict[str, LiveBroker] = {}
        self._lost: list[LostBroker] = []

    # -- brokers come ------------------------------------------------------------------------------

    def register(
        self,
        header: RegisterBrokerHeader,
        body: RegisterBrokerBody,
        channel: object,
        now_ms: int,
    ) -> LiveBroker | None:
        """Take what a broker says of itself; returns its master if it is a slave that has one.

        Raises RequestError, and changes nothing, for a new broker that names one topic only (a
        lost change notice: it will name them all) and for one with an older state than the broker
        whose place it wants.
        """
        wrapper = body.topic_config_serialize_wrapper
        self._check_place(header, wrapper)
        self._leave_other_name(header, now_ms)
        is_first = self._put_address(header)
        self._lost = [lost for lost in self._lost if lost.name != header.broker_name]
        if self._speaks_for_broker(header):
            self._put_topics(header, wrapper, is_first=is_first)
        self._live[header.broker_addr] = LiveBroker(
            name=header.broker_name,
            cluster=header.cluster_name,
            address=header.broker_addr,
            ha_address=header.ha_server_addr,
            data_version=wrapper.data_version,
            channel=channel,
            timeout_ms=self._timeout_ms(header),
            last_heard_ms=now_ms,
        )
        return self._master_of(header)

    def _timeout_ms(self, header: RegisterBrokerHeader) -> int:
        wanted_ms = header.heartbeat_timeout_millis
        return wanted_ms if wanted_ms and wanted_ms > 0 else self._broker_timeout_ms

    def _check_place(
        self, header: RegisterBrokerHeader, wrapper: TopicConfigSerializeWrapper
    ) -> None:
        holder = self.holder(header.broker_name, header.broker_id)
        if holder is None and len(wrapper.topic_config_table) == 1:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR,
                f"broker {header.broker_name} ({header.broker_addr}) is not registered yet: its "
                "first registration must name all its topics, not one",
            )
        if holder is None or holder == header.broker_addr:
            return
        state_version = self._live[holder].data_version.state_version
        if state_version > wrapper.data_version.state_version:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR,
                f"broker {header.broker_name} with id {header.broker_id} is {holder}, of state "
                f"{state_version}; {header.broker_addr} comes with state "
                f"{wrapper.data_version.state_version}: it must follow its master first",
            )

    def _leave_other_name(self, header: RegisterBrokerHeader, now_ms: int) -> None:
        live = self._live.get(header.broker_addr)
        if live and live.name != header.broker_name:
            self._remove(live, f"became broker {header.broker_name}", now_ms)

    def holder(self, name: str, broker_id: int) -> str | None:
        """The address that is registered as this broker."""
        broker = self._brokers.get(name)
        return broker.broker_addrs.get(broker_id) if broker else None

    def _put_address(self, header: RegisterBrokerHeader) -> bool:
        """Returns whether the id is new."""
        broker = self._brokers.setdefault(
            header.broker_name, BrokerData(broker_name=header.broker_name)
        )
        broker.cluster = header.cluster_name
        broker.enable_acting_master = bool(header.enable_acting_master)
        broker.zone_name = header.zone_name
        holder = broker.broker_addrs.get(header.broker_id)
        if holder != header.broker_addr:
            # A slave that became master, or another machine in the place of one.
            self._live.pop(holder or "", None)
            broker.broker_addrs = _without(broker.broker_addrs, header.broker_addr)
            broker.broker_addrs[header.broker_id] = header.broker_addr
        return holder is None

    def _speaks_for_broker(self, header: RegisterBrokerHeader) -> bool:
        return header.broker_id == MASTER_ID or self._is_prime_slave(header)

    def _is_prime_slave(self, header: RegisterBrokerHeader) -> bool:
        return (
            header.enable_acting_master is not None
            and header.broker_id != MASTER_ID
            and header.broker_id == min(self._brokers[header.broker_name].broker_addrs)
        )

    def _put_topics(
        self, header: RegisterBrokerHeader, wrapper: TopicConfigSerializeWrapper, *, is_first: bool
    ) -> None:
        live = self._live.get(header.broker_addr)
        changed = is_first or live is None or live.data_version != wrapper.data_version
        # An acting master takes no messages: the master may come back with its own.
        is_read_only = self._is_prime_slave(header) and bool(header.enable_acting_master)
        perm_mask = ~PERM_WRITE if is_read_only else ~0
        for topic, config in wrapper.topic_config_table.items():
            queues = self._topics.setdefault(topic, {})
            if changed or header.broker_name not in queues:
                queues[header.broker_name] = _queue_data(header.broker_name, config, perm_mask)
        if changed:
            for topic, info in wrapper.topic_queue_mapping_info_map.items():
                self._mappings.setdefault(topic, {})[info.bname] = info

    def _master_of(self, header: RegisterBrokerHeader) -> LiveBroker | None:
        if header.broker_id == MASTER_ID:
            return None
        address = self.holder(header.broker_name, MASTER_ID)
        return self._live[address] if address else None

    def heartbeat(self, address: str, now_ms: int) -> None:
        """A broker is alive; nothing happens when it is not registered."""
        live = self._live.get(address)
        if live:
            live.last_heard_ms = now_ms

    def data_version(self, address: str) -> DataVersion | None:
        """The version of the topics that a broker registered last."""
        live = self._live.get(address)
        return live.data_version if live else None

    # -- brokers go --------------------------------------------------------------------------------

    def unregister(self, name: str, address: str, now_ms: int) -> bool:
        """A broker says goodbye; returns whether it was there."""
        live = self._live.get(address)
        if live is None or live.name != name:
            return False
        self._remove(live, "was shut down", now_ms)
        return True

    def close_channel(self, channel: object, now_ms: int) -> list[LiveBroker]:
        """A connection ended; returns the brokers that were registered through it."""
        closed = [live for live in self._live.values() if live.channel is channel]
        for live in closed:
            self._remove(live, "closed its connection", now_ms)
        return closed

    def expire(self, now_ms: int) -> list[LiveBroker]:
        """Drop the brokers that were silent for too long, and return them."""
        expired = [live for live in self._live.values() if live.expires_ms <= now_ms]
        for live in expired:
            self._remove(live, "is silent, last heard", live.last_heard_ms)
        return expired

    def next_expiry_ms(self) -> int | None:
        """When ``expire`` will next have something to do if nobody is heard; None: never."""
        return min((live.expires_ms for live in self._live.values()), default=None)

    def _remove(self, live: LiveBroker, cause: str, since_ms: int) -> None:
        del self._live[live.address]
        broker = self._brokers[live.name]
        broker.broker_addrs = _without(broker.broker_addrs, live.address)
        topics: set[str] = set()
        if not broker.broker_addrs:
            del self._brokers[live.name]
            topics = self._drop_queues(live.name)
        elif broker.enable_acting_master and MASTER_ID not in broker.broker_addrs:
            self._change_perm(live.name, lambda perm: perm & ~PERM_WRITE)
        self._lost.append(LostBroker(live.name, live.address, cause, since_ms, topics))
        del self._lost[:-LOST_BROKERS_MAX]

    def _drop_queues(self, name: str) -> set[str]:
        """Take a broker out of all topics, and topics without brokers out of the table."""
        topics = {topic for topic, queues in self._topics.items() if queues.pop(name, None)}
        for topic in topics:
            if not self._topics[topic]:
                del self._topics[topic]
        return topics

    # -- permissions and topics --------------------------------------------------------------------

    def wipe_write_perm(self, name: str) -> int:
        """Let no client send to a broker; returns the number of its topics."""
        return self._change_perm(name, lambda perm: perm & ~PERM_WRITE)

    def add_write_perm(self, name: str) -> int:
        """Let clients read from and send to a broker; returns the number of its topics."""
        return self._change_perm(name, lambda _: PERM_READ | PERM_WRITE)

    def _change_perm(self, name: str, change: Callable[[int], int]) -> int:
        found = [queues[name] for queues in self._topics.values() if name in queues]
        for queue_data in found:
            queue_data.perm = change(queue_data.perm)
        return len(found)

    def register_topic(self, topic: str, queue_datas: Iterable[QueueData]) -> None:
        """Add a topic to brokers that are registered; raises RequestError for others."""
        by_broker = {queue_data.broker_name: queue_data for queue_data in queue_datas}
        missing = by_broker.keys() - self._brokers.keys()
        if missing:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR,
                f"topic {topic}: no broker {min(missing)} is registered here",
            )
        if by_broker:
            self._topics.setdefault(topic, {}).update(by_broker)

    def delete_topic(self, topic: str, cluster: str | None = None) -> None:
        """Forget a topic, everywhere or in one cluster."""
        for name in list(self._topics.get(topic, ())):
            if cluster in {None, self._brokers[name].cluster}:
                del self._topics[topic][name]
                self._mappings.get(topic, {}).pop(name, None)
        if not self._topics.get(topic):
            self._topics.pop(topic, None)
            self._mappings.pop(topic, None)
        for lost in self._lost:
            lost.topics.discard(topic)

    # -- questions ---------------------------------------------------------------------------------

    def route(self, topic: str) -> TopicRouteData | None:
        """Where a topic lives, or None. The parts are the table's: encode them, keep none."""
        queues = self._topics.get(topic)
        if queues is None:
            return None
        may_act = self._support_acting_master and not topic.startswith(_BROKER_MEMBER_TOPIC)
        brokers = [self._brokers[name] for name in queues]
        if may_act:
            brokers = [_with_acting_master(b, queues[b.broker_name]) for b in brokers]
        return TopicRouteData(
            queue_datas=list(queues.values()),
            broker_datas=brokers,
            topic_queue_mapping_by_broker=self._mappings.get(topic),
        )

    def route_age_ms(self, route: TopicRouteData, now_ms: int) -> int:
        """How long the quietest broker of a route has been silent."""
        addresses = (a for broker in route.broker_datas for a in broker.broker_addrs.values())
        return now_ms - min(self._live[address].last_heard_ms for address in addresses)

    def lost_brokers(self, topic: str) -> list[LostBroker]:
        """Brokers that had a topic and are gone, the last one first."""
        return [lost for lost in reversed(self._lost) if topic in lost.topics]

    def cluster_info(self) -> ClusterInfo:
        """All brokers. The parts are the table's: encode them, keep none."""
        clusters: dict[str, list[str]] = {}
        for name, broker in self._brokers.items():
            clusters.setdefault(broker.cluster, []).append(name)
        return ClusterInfo(broker_addr_table=self._brokers, cluster_addr_table=clusters)

    def member_group(self, cluster: str, name: str) -> BrokerMemberGroup:
        """The addresses of one broker; none when it is not here."""
        broker = self._brokers.get(name)
        addresses = broker.broker_addrs if broker else {}
        return BrokerMemberGroup(cluster=cluster, broker_name=name, broker_addrs=addresses)

    def topics(self) -> list[str]:
        """All topics."""
        return list(self._topics)

    def topics_of_cluster(self, cluster: str) -> list[str]:
        """Topics that a broker of the cluster has."""
        names = {name for name, broker in self._brokers.items() if broker.cluster == cluster}
        return [topic for topic, queues in self._topics.items() if not names.isdisjoint(queues)]

    def unit_topics(self, *, unit: bool | None = None, unit_sub: bool | None = None) -> list[str]:
        """Topics by the flags of the unit deployment; None: whatever the flag."""
        return [
            topic
            for topic, queues in self._topics.items()
            if _has_flag(queues, _UNIT, unit) and _has_flag(queues, _UNIT_SUB, unit_sub)
        ]

    def system_topics(self) -> list[str]:
        """The topics that each cluster and each broker has of its own name."""
        info = self.cluster_info()
        return [*info.cluster_addr_table, *info.broker_addr_table]

    def any_address(self) -> str | None:
        """The address of some broker."""
        return next(iter(self._live), None)


def _without(addresses: dict[int, str], address: str) -> dict[int, str]:
    return {broker_id: other for broker_id, other in addresses.items() if other != address}


def _queue_data(name: str, config: TopicConfig, perm_mask: int) -> QueueData:
    return QueueData(
        broker_name=name,
        read_queue_nums=config.read_queue_nums,
        write_queue_nums=config.write_queue_nums,
        perm=config.perm & perm_mask,
        topic_sys_flag=config.topic_sys_flag,
    )


def _with_acting_master(broker: BrokerData, queue_data: QueueData) -> BrokerData:
    """The broker, its smallest slave as master if it has none and takes no messages."""
    addresses = broker.broker_addrs
    if MASTER_ID in addresses or not broker.enable_acting_master or queue_data.perm & PERM_WRITE:
        return broker
    smallest = min(addresses)
    acting = {MASTER_ID: addresses[smallest]}
    slaves = {broker_id: a for broker_id, a in addresses.items() if broker_id != smallest}
    return msgspec.structs.replace(broker, broker_addrs=acting | slaves)


def _has_flag(queues: dict[str, QueueData], flag: int, wanted: bool | None) -> bool:
    if wanted is None:
        return True
    first = next(iter(queues.values()))
    return bool(first.topic_sys_flag & flag) == wanted
