"""The in-memory route table: brokers and their topics, from the brokers' registrations.

Free of clocks, sockets and tasks: time is an argument, in ms of a monotonic clock. A broker and its
topics stay in the table while it has a live address, and in the memory of departed brokers for
some time after. The first connection to register an address, or a broker's id, owns it until the
connection ends. A static topic keeps its number of queues while a broker is away.
Source: docs/protocol.md "Registration"; tests/nameserver/test_routes.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from headrace_nameserver.brokers import Broker, LiveBroker, host_of
from headrace_nameserver.departed import LIMITS, Departed, DepartedBrokers, Known, Limits
from headrace_protocol.bodies import (
    MASTER_ID,
    PERM_READ,
    PERM_WRITE,
    BrokerData,
    BrokerMemberGroup,
    ClusterInfo,
    DataVersion,
    QueueData,
    TopicRouteData,
)
from headrace_protocol.bounds import OutOfBounds
from headrace_protocol.codes import ResponseCode
from headrace_protocol.departed import Departure
from headrace_protocol.errors import RequestError
from headrace_protocol.system_topics import BROKER_MEMBER_PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from headrace_nameserver.registrations import BrokerTopics
    from headrace_protocol.channel import Channel
    from headrace_protocol.nameserver_headers import RegisterBrokerHeader
    from headrace_protocol.statictopic.mapping import MappingInfo

BROKER_TIMEOUT_MS = 120_000
DEPARTED_HOURS = 24

_UNIT = 1
_UNIT_SUB = 2


class RouteTable:
    """Live brokers with their topics, and the memory of departed ones.

    broker_timeout_ms: silence after which a broker expires, unless it requests its own limit.
    support_acting_master: present the slave with the smallest id as master of a broker without
        one, if that broker permits it.
    departed_ms: how long a departed broker is remembered.
    departed: see ``DepartedBrokers``.
    lost_count: how many addresses were lost or unregistered so far.
    """

    def __init__(
        self,
        *,
        broker_timeout_ms: int = BROKER_TIMEOUT_MS,
        support_acting_master: bool = False,
        departed_ms: int = DEPARTED_HOURS * 3_600_000,
        limits: Limits = LIMITS,
    ) -> None:
        self.limits = limits
        self._broker_timeout_ms = broker_timeout_ms
        self._support_acting_master = support_acting_master
        self._brokers: dict[str, Broker] = {}
        self.departed = DepartedBrokers(departed_ms, limits)
        self._live: dict[str, LiveBroker] = {}
        self.lost_count = 0
        self._topic_changes = 0

    # -- registration ------------------------------------------------------------------------------

    def register(
        self,
        header: RegisterBrokerHeader,
        topics: BrokerTopics,
        channel: Channel,
        now_ms: int,
    ) -> LiveBroker | None:
        """Store a registration; for a slave, returns its master if there is one.

        Raises RequestError, without a change, if ``check_conflict`` rejects the broker, if a limit
        is exceeded, or if a new broker names only one topic: that is an update meant for an earlier
        registration, and the broker will send all of its topics next.
        """
        self.check_conflict(header, channel)
        self._check_first(header, topics)
        self._check_room(header, topics, channel)
        self._remove_previous_name(header, now_ms)
        is_first = self._put_address(header)
        if self._sets_topics(header):
            self._put_topics(header, topics, is_first=is_first)
            self.departed.forget(header.broker_name)
        self._live[header.broker_addr] = LiveBroker(
            name=header.broker_name,
            cluster=header.cluster_name,
            address=header.broker_addr,
            ha_address=header.ha_server_addr,
            data_version=topics.data_version,
            channel=channel,
            timeout_ms=self._timeout_ms(header),
            last_heard_ms=now_ms,
        )
        return self._master_of(header)

    def _timeout_ms(self, header: RegisterBrokerHeader) -> int:
        wanted_ms = header.heartbeat_timeout_millis
        return wanted_ms if wanted_ms and wanted_ms > 0 else self._broker_timeout_ms

    def check_conflict(self, header: RegisterBrokerHeader, channel: Channel) -> None:
        """Raise RequestError if another live connection holds the broker's id or its address.

        A restarted broker keeps its address and need not wait for its old connection to end.
        """
        broker = f"broker {header.broker_name} with id {header.broker_id}"
        address = header.broker_addr
        for held in (self.holder(header.broker_name, header.broker_id), address):
            live = self._live.get(held or address)
            if live and (live.address != address or not _same_host(live.channel, channel)):
                raise _conflict(
                    f"{broker} cannot register {address} from {channel.address}: broker "
                    f"{live.name} registered {live.address} from {live.channel.address} and "
                    "holds it until that connection ends; if both brokers run, change the "
                    "brokerName, brokerId or brokerIP1 of one"
                )
        self._check_cluster(header)

    def _check_cluster(self, header: RegisterBrokerHeader) -> None:
        broker = self._brokers.get(header.broker_name)
        if broker is None or broker.data.cluster == header.cluster_name:
            return
        for address in _without(broker.data.broker_addrs, header.broker_addr).values():
            raise _conflict(
                f"{header.broker_addr} cannot register broker {header.broker_name} of cluster "
                f"{header.cluster_name}: {address} has registered it in {broker.data.cluster}"
            )

    def _check_first(self, header: RegisterBrokerHeader, topics: BrokerTopics) -> None:
        if len(topics.queues) == 1 and self.holder(header.broker_name, header.broker_id) is None:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR,
                f"broker {header.broker_name} ({header.broker_addr}) is not registered yet: its "
                "first registration must name all its topics, not one",
            )

    def _check_room(
        self, header: RegisterBrokerHeader, topics: BrokerTopics, channel: Channel
    ) -> None:
        name, limits = header.broker_name, self.limits
        known = self._brokers.get(name)
        size = (known or self._returning(name)).size_with(topics, limits.size)
        added = size - (known.size if known else 0)
        host = [live for live in self._live.values() if _same_host(live.channel, channel)]
        for kind, brokers, brokers_max, topics_max in (
            ("this host", host, limits.brokers_of_host, limits.size_of_host),
            ("all hosts", self._live.values(), limits.brokers, limits.size_of_all),
        ):
            if header.broker_addr not in self._live and len(brokers) >= brokers_max:
                raise OutOfBounds(
                    f"{kind}: {len(brokers)} brokers are registered, which is the maximum"
                )
            if added > 0 and added + self._size_of(brokers) > topics_max:
                raise OutOfBounds(
                    f"broker {name} adds {added} topics, but the brokers of {kind} may have at "
                    f"most {topics_max}"
                )

    def _size_of(self, live: Iterable[LiveBroker]) -> int:
        return sum(self._brokers[name].size for name in {each.name for each in live})

    def _remove_previous_name(self, header: RegisterBrokerHeader, now_ms: int) -> None:
        live = self._live.get(header.broker_addr)
        if live and live.name != header.broker_name:
            self._remove(live, Departure.RENAMED, now_ms)

    def holder(self, name: str, broker_id: int) -> str | None:
        """The address registered under a broker's name and id; None if there is none."""
        broker = self._brokers.get(name)
        return broker.data.broker_addrs.get(broker_id) if broker else None

    def _put_address(self, header: RegisterBrokerHeader) -> bool:
        """Store a broker's address; returns whether its id is new."""
        name, address = header.broker_name, header.broker_addr
        broker = self._brokers.setdefault(name, self._returning(name)).data
        broker.cluster = header.cluster_name
        broker.enable_acting_master = bool(header.enable_acting_master)
        broker.zone_name = header.zone_name
        is_new = header.broker_id not in broker.broker_addrs
        if is_new:
            # A slave that replaces a lost master gives up its old id.
            broker.broker_addrs = _without(broker.broker_addrs, address)
            broker.broker_addrs[header.broker_id] = address
        return is_new

    def _returning(self, name: str) -> Broker:
        """A broker without an address, with the mappings that it had when it went away."""
        departed = self.departed.get(name)
        mappings = dict(departed.mappings) if departed else {}
        return Broker(BrokerData(broker_name=name), mappings=mappings)

    def _sets_topics(self, header: RegisterBrokerHeader) -> bool:
        return header.broker_id == MASTER_ID or self._is_prime_slave(header)

    def _is_prime_slave(self, header: RegisterBrokerHeader) -> bool:
        return (
            header.enable_acting_master is not None
            and header.broker_id != MASTER_ID
            and header.broker_id == min(self._brokers[header.broker_name].data.broker_addrs)
        )

    def _put_topics(
        self, header: RegisterBrokerHeader, topics: BrokerTopics, *, is_first: bool
    ) -> None:
        broker = self._brokers[header.broker_name]
        live = self._live.get(header.broker_addr)
        if self._is_prime_slave(header) and bool(header.enable_acting_master):
            # An acting master accepts no messages: the master may return with its own.
            _change_perm(topics.queues, lambda perm: perm & ~PERM_WRITE)
        self._topic_changes += 1
        if not broker.fits(topics, self.limits.size):
            broker.queues, broker.mappings = topics.queues, topics.mappings
            broker.compacted = topics.compacted
        elif is_first or live is None or live.data_version != topics.data_version:
            deleted = broker.deleted_static_topics(topics)
            kept = {t: queues for t, queues in broker.queues.items() if t not in deleted}
            broker.queues = kept | topics.queues
            broker.mappings = broker.mappings_after(topics)
            broker.compacted = broker.compacted - topics.queues.keys() | topics.compacted
        elif added := topics.queues.keys() - broker.queues.keys():
            broker.queues |= {topic: topics.queues[topic] for topic in added}
            broker.compacted |= topics.compacted & added
        else:
            self._topic_changes -= 1

    def _master_of(self, header: RegisterBrokerHeader) -> LiveBroker | None:
        if header.broker_id == MASTER_ID:
            return None
        address = self.holder(header.broker_name, MASTER_ID)
        return self._live[address] if address else None

    def heartbeat(self, address: str, now_ms: int) -> None:
        """Record that a broker is alive. Does nothing if it is not registered."""
        live = self._live.get(address)
        if live:
            live.last_heard_ms = now_ms

    def data_version(self, address: str) -> DataVersion | None:
        """The data version of a broker's last registration; None if it is not registered."""
        live = self._live.get(address)
        return live.data_version if live else None

    # -- removal -----------------------------------------------------------------------------------

    def unregister(self, name: str, address: str, channel: Channel, now_ms: int) -> bool:
        """Remove a broker at its own request; returns whether it was registered.

        Raises RequestError for a client on another host.
        """
        live = self._live.get(address)
        if live is None or live.name != name:
            return False
        if not _same_host(live.channel, channel):
            raise _conflict(
                f"broker {name} registered {address} from {live.channel.address}: "
                f"{channel.address} cannot unregister it"
            )
        self._remove(live, Departure.UNREGISTERED, now_ms)
        return True

    def close_channel(self, channel: Channel, now_ms: int) -> list[LiveBroker]:
        """Remove the brokers registered through a closed connection; returns them."""
        closed = [live for live in self._live.values() if live.channel is channel]
        for live in closed:
            self._remove(live, Departure.DISCONNECTED, now_ms)
        return closed

    def expire(self, now_ms: int) -> list[LiveBroker]:
        """Remove the brokers that were silent for too long; returns them.

        Departed brokers are forgotten in their time.
        """
        self.departed.expire(now_ms)
        expired = [live for live in self._live.values() if live.expires_ms <= now_ms]
        for live in expired:
            self._remove(live, Departure.SILENT, live.last_heard_ms)
        return expired

    def next_expiry_ms(self) -> int | None:
        """The time of the next expiry if no broker is heard until then; None if none is live."""
        return min((live.expires_ms for live in self._live.values()), default=None)

    def _remove(self, live: LiveBroker, how: Departure, since_ms: int) -> None:
        del self._live[live.address]
        self.lost_count += 1
        broker = self._brokers[live.name]
        addresses = broker.data.broker_addrs = _without(broker.data.broker_addrs, live.address)
        if not addresses:
            del self._brokers[live.name]
            if broker.queues:
                self.departed.add(_departed(live, broker, how, since_ms))
        elif broker.data.enable_acting_master and MASTER_ID not in addresses:
            _change_perm(broker.queues, lambda perm: perm & ~PERM_WRITE)

    def forget(self, name: str) -> bool:
        """Forget a departed broker; returns whether it was remembered.

        Raises RequestError for a broker that is registered.
        """
        if name in self._brokers:
            raise _conflict(f"broker {name} is registered: stop it first")
        return self.departed.forget(name)

    @property
    def change_count(self) -> int:
        """Grows with each change of what ``known`` returns."""
        return self.departed.change_count + self._topic_changes

    def known(self) -> Known:
        """A copy of all departed and live brokers with their topics, to be saved."""
        live = [
            _departed(self._live[address], broker, Departure.NOT_BACK, 0)
            for broker in self._brokers.values()
            for address in [*broker.data.broker_addrs.values()][:1]
        ]
        return Known([_copy(each) for each in self.departed], [_copy(each) for each in live])

    # -- permissions and topics --------------------------------------------------------------------

    def wipe_write_perm(self, name: str) -> int:
        """Stop clients from sending to a broker; returns the number of its topics."""
        return self._change_perm_of(name, lambda perm: perm & ~PERM_WRITE)

    def add_write_perm(self, name: str) -> int:
        """Permit clients to read from and send to a broker; returns the number of its topics."""
        return self._change_perm_of(name, lambda _: PERM_READ | PERM_WRITE)

    def _change_perm_of(self, name: str, change: Callable[[int], int]) -> int:
        broker = self._brokers.get(name)
        if broker is None:
            return 0
        _change_perm(broker.queues, change)
        return len(broker.queues)

    def register_topic(self, topic: str, queue_datas: Iterable[QueueData]) -> None:
        """Add a topic to registered brokers. Raises RequestError if one is not registered."""
        by_broker = {queue_data.broker_name: queue_data for queue_data in queue_datas}
        missing = by_broker.keys() - self._brokers.keys()
        if missing:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR,
                f"topic {topic}: broker {min(missing)} is not registered here",
            )
        for name in by_broker:
            known = self._brokers[name].queues
            if topic not in known and len(known) >= self.limits.size:
                raise OutOfBounds(
                    f"topic {topic}: broker {name} has {len(known)} topics, which is the maximum"
                )
        for name, queue_data in by_broker.items():
            self._brokers[name].queues[topic] = queue_data
        self._topic_changes += 1

    def delete_topic(self, topic: str, cluster: str | None = None) -> None:
        """Remove a topic, everywhere or in one cluster."""
        for broker in self._brokers.values():
            if cluster in {None, broker.data.cluster}:
                broker.queues.pop(topic, None)
                broker.mappings.pop(topic, None)
                if topic in broker.compacted:
                    broker.compacted -= {topic}
        self._topic_changes += 1
        self.departed.delete_topic(topic, cluster)

    # -- queries -----------------------------------------------------------------------------------

    def route(self, topic: str) -> TopicRouteData | None:
        """A topic's route, or None. It shares the table's objects: encode it, do not keep it."""
        found = [broker for broker in self._brokers.values() if topic in broker.queues]
        if not found:
            return None
        may_act = self._support_acting_master and not topic.startswith(BROKER_MEMBER_PREFIX)
        return TopicRouteData(
            queue_datas=[broker.queues[topic] for broker in found],
            broker_datas=[
                _with_acting_master(broker.data, broker.queues[topic]) if may_act else broker.data
                for broker in found
            ],
            topic_queue_mapping_by_broker=self._mappings(topic, found) or None,
        )

    def _mappings(self, topic: str, found: list[Broker]) -> dict[str, MappingInfo]:
        """A topic's mappings by broker, including those of brokers that are away.

        Every broker of a cluster has one. If no live broker does, the topic is a plain one with
        the name of a deleted static topic.
        """
        live = {
            broker.data.broker_name: broker.mappings[topic]
            for broker in found
            if topic in broker.mappings
        }
        if not live:
            return {}
        away = {
            departed.name: departed.mappings[topic]
            for departed in self.departed
            if topic in departed.mappings
        }
        return away | live

    def route_age_ms(self, route: TopicRouteData, now_ms: int) -> int:
        """The longest time that a broker of the route has been silent."""
        addresses = (a for broker in route.broker_datas for a in broker.broker_addrs.values())
        return now_ms - min(self._live[address].last_heard_ms for address in addresses)

    def cluster_info(self) -> ClusterInfo:
        """All brokers. Shares the table's objects: encode the result, do not keep it."""
        clusters: dict[str, list[str]] = {}
        for name, broker in self._brokers.items():
            clusters.setdefault(broker.data.cluster, []).append(name)
        addresses = {name: broker.data for name, broker in self._brokers.items()}
        return ClusterInfo(broker_addr_table=addresses, cluster_addr_table=clusters)

    def member_group(self, cluster: str, name: str) -> BrokerMemberGroup:
        """The addresses of one broker; empty if it is not registered."""
        broker = self._brokers.get(name)
        addresses = broker.data.broker_addrs if broker else {}
        return BrokerMemberGroup(cluster=cluster, broker_name=name, broker_addrs=addresses)

    def topics(self, cluster: str | None = None) -> Iterator[str]:
        """All topics, or those of a cluster. The table may change during iteration."""
        return (topic for topic, _ in self._each_topic(cluster))

    def unit_topics(
        self, *, unit: bool | None = None, unit_sub: bool | None = None
    ) -> Iterator[str]:
        """Topics by unit-deployment flags; None matches either value. Otherwise as ``topics``."""
        return (
            topic
            for topic, queues in self._each_topic()
            if _has_flag(queues, _UNIT, unit) and _has_flag(queues, _UNIT_SUB, unit_sub)
        )

    def _each_topic(self, cluster: str | None = None) -> Iterator[tuple[str, QueueData]]:
        """Each topic once, with its queues on the first broker that has it."""
        seen: set[str] = set()
        for broker in list(self._brokers.values()):
            if cluster in {None, broker.data.cluster}:
                for topic, queues in list(broker.queues.items()):
                    if topic not in seen:
                        seen.add(topic)
                        yield topic, queues

    def system_topics(self) -> list[str]:
        """The topics named after each cluster and each broker."""
        info = self.cluster_info()
        return [*info.cluster_addr_table, *info.broker_addr_table]

    def live(self) -> list[LiveBroker]:
        """All registered addresses, ``Limits.brokers`` at most."""
        return list(self._live.values())

    @property
    def topic_count(self) -> int:
        """The number of topics, counted once for each broker that has them."""
        return sum(len(broker.queues) for broker in self._brokers.values())

    def any_address(self) -> str | None:
        """The address of any one broker; None if there are none."""
        return next(iter(self._live), None)


def _conflict(remark: str) -> RequestError:
    return RequestError(ResponseCode.SYSTEM_ERROR, remark)


def _same_host(one: Channel, other: Channel) -> bool:
    return host_of(one) == host_of(other)


def _departed(live: LiveBroker, broker: Broker, how: Departure, since_ms: int) -> Departed:
    return Departed(
        live.name,
        broker.data.cluster,
        live.address,
        host_of(live.channel),
        how,
        since_ms,
        broker.queues,
        broker.mappings,
        broker.compacted,
    )


def _copy(broker: Departed) -> Departed:
    """A copy that a thread may read."""
    return msgspec.structs.replace(
        broker, queues=dict(broker.queues), mappings=dict(broker.mappings)
    )


def _change_perm(queues: dict[str, QueueData], change: Callable[[int], int]) -> None:
    for queue_data in queues.values():
        queue_data.perm = change(queue_data.perm)


def _without(addresses: dict[int, str], address: str) -> dict[int, str]:
    return {broker_id: other for broker_id, other in addresses.items() if other != address}


def _with_acting_master(broker: BrokerData, queue_data: QueueData) -> BrokerData:
    """The broker, with its smallest slave as master if it has none and rejects writes."""
    addresses = broker.broker_addrs
    if MASTER_ID in addresses or not broker.enable_acting_master or queue_data.perm & PERM_WRITE:
        return broker
    smallest = min(addresses)
    acting = {MASTER_ID: addresses[smallest]}
    slaves = {broker_id: a for broker_id, a in addresses.items() if broker_id != smallest}
    return msgspec.structs.replace(broker, broker_addrs=acting | slaves)


def _has_flag(queues: QueueData, flag: int, wanted: bool | None) -> bool:
    return wanted is None or bool(queues.topic_sys_flag & flag) == wanted
