"""The nameserver's request handlers: one function from request to reply per code."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import structlog
from msgspec import structs

from headrace_daemon.host_log import HostLog
from headrace_nameserver import registrations
from headrace_nameserver.kv_config import ORDER_TOPIC_CONFIG
from headrace_nameserver.own_address import check_own_address
from headrace_protocol import fastjson
from headrace_protocol.bodies import (
    Body,
    DataVersion,
    GetBrokerMemberGroupResponseBody,
    KVTable,
    QueueData,
    TopicRouteData,
)
from headrace_protocol.bounds import NAME_CHARS_MAX, check_name, check_text
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.departed import ClusterInfoHeader, DepartedBroker, ForgetBrokerHeader
from headrace_protocol.errors import RequestError
from headrace_protocol.nameserver_headers import (
    REGISTRATION_PERIOD_MS,
    AddWritePermOfBrokerResponseHeader,
    BrokerHeartbeatHeader,
    GetBrokerMemberGroupHeader,
    GetKVConfigResponseHeader,
    GetRouteInfoHeader,
    GetRouteInfoResponseHeader,
    GetTopicsByClusterHeader,
    KVKeyHeader,
    KVNamespaceHeader,
    PutKVConfigHeader,
    QueryDataVersionHeader,
    QueryDataVersionResponseHeader,
    RegisterBrokerHeader,
    RegisterBrokerResponseHeader,
    TopicInNamesrvHeader,
    UnregisterBrokerHeader,
    WipeWritePermOfBrokerResponseHeader,
    WritePermOfBrokerHeader,
)
from headrace_protocol.rights.late import visible_topics
from headrace_protocol.serving import Reply, Request
from headrace_protocol.system_topics import RETRY_PREFIX, user_topics
from headrace_protocol.waiting import take_break

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from headrace_nameserver.broker_names import BrokerNames
    from headrace_nameserver.departed import Departed
    from headrace_nameserver.kv_config import KVConfig
    from headrace_nameserver.routes import RouteTable
    from headrace_protocol.channel import Channel
    from headrace_protocol.serving import LongFunction, Registry, RequestFunction

log = structlog.get_logger("headrace.nameserver")

# First client version that expects routes as strict JSON (4.9.4).
_STRICT_JSON_VERSION = 401

_NAMED_MAX = 3
# Topics and groups of a departed broker that an answer about all brokers names, and topics that are
# looked at for that: there may be 1,024 such brokers.
_TOPICS_NAMED_MAX = 32
_TOPICS_SEEN_MAX = 128
# Encoding a route with more brokers takes over 0.5 ms.
_BROKERS_AT_ONCE = 50


class Policy(NamedTuple):
    """Settings of a nameserver that its answers depend on; see ``NameServerConfig``."""

    order_message_enable: bool = False
    register_from_own_address: bool = False


class NameServerProcessor:
    """Serves requests from a route table and a key-value table.

    now_ms: a monotonic clock.
    broker_names: the users of names; None where nobody is known.
    wall_ms: ms since 1970, for texts that people read.
    log: for events caused by clients; the owner calls its ``report``.
    on_broker: called when a broker is "registered" or "unregistered", with the name and address.
    """

    def __init__(
        self,
        table: RouteTable,
        kv_config: KVConfig,
        now_ms: Callable[[], int],
        policy: Policy,
        *,
        broker_names: BrokerNames | None = None,
        wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._table = table
        self._kv_config = kv_config
        self._now_ms = now_ms
        self._started_ms = 0
        self._wall_ms = wall_ms
        self._clock_ms = 0
        self._policy = policy
        self._broker_names = broker_names
        self.log = HostLog(log)
        self.on_broker: Callable[[str, Channel, str, str], None] = lambda *_: None

    def begin(self) -> None:
        """Note that the nameserver starts to serve: brokers register within a period from now."""
        self._started_ms = self._now_ms()
        self._clock_ms = self._wall_ms() - self._started_ms

    def register(self, registry: Registry) -> None:
        """Register the handlers of all nameserver codes."""
        self._begin_long = registry.begin_long
        at_once: dict[RequestCode, RequestFunction] = {
            RequestCode.GET_KV_CONFIG: self.get_kv_config,
            RequestCode.UNREGISTER_BROKER: self.unregister_broker,
            RequestCode.BROKER_HEARTBEAT: self.broker_heartbeat,
            RequestCode.QUERY_DATA_VERSION: self.query_data_version,
            RequestCode.GET_ROUTEINFO_BY_TOPIC: self.get_route,
            RequestCode.WIPE_WRITE_PERM_OF_BROKER: self.wipe_write_perm,
            RequestCode.ADD_WRITE_PERM_OF_BROKER: self.add_write_perm,
            RequestCode.DELETE_TOPIC_IN_NAMESRV: self.delete_topic,
            RequestCode.REGISTER_TOPIC_IN_NAMESRV: self.register_topic,
        }
        in_slices: dict[RequestCode, LongFunction] = {
            RequestCode.PUT_KV_CONFIG: self.put_kv_config,
            RequestCode.DELETE_KV_CONFIG: self.delete_kv_config,
            RequestCode.GET_KVLIST_BY_NAMESPACE: self.get_kv_list,
            RequestCode.REGISTER_BROKER: self.register_broker,
            RequestCode.FORGET_BROKER: self.forget_broker,
            RequestCode.GET_BROKER_CLUSTER_INFO: self.get_cluster_info,
            RequestCode.GET_BROKER_MEMBER_GROUP: self.get_member_group,
            RequestCode.GET_TOPICS_BY_CLUSTER: self.get_topics_by_cluster,
            RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS: self.get_system_topics,
        }
        units = self._table.unit_topics
        topic_lists: dict[RequestCode, Callable[[], Iterable[str]]] = {
            RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: self._table.topics,
            RequestCode.GET_UNIT_TOPIC_LIST: partial(units, unit=True),
            RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST: partial(units, unit_sub=True),
            RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: partial(
                units, unit=False, unit_sub=True
            ),
        }
        for code, function in at_once.items():
            registry.route(code, function)
        for code, long_function in in_slices.items():
            registry.route_long(code, long_function)
        for code, topics in topic_lists.items():
            registry.route_long(code, partial(_all_topics, topics))

    # -- brokers -----------------------------------------------------------------------------------

    async def register_broker(self, request: Request) -> Reply | None:
        """REGISTER_BROKER (103)."""
        header = request.header(RegisterBrokerHeader)
        try:
            return await self._register(header, request)
        except RequestError as error:
            client = request.channel.address
            self.log.warning(client, "broker not registered", reason=error.remark)
            raise

    async def _register(self, header: RegisterBrokerHeader, request: Request) -> Reply | None:
        channel = request.channel
        registrations.check_header(header)
        if self._policy.register_from_own_address:
            check_own_address(header.broker_addr, channel.address)
        self._table.check_conflict(header, channel)
        topics = await registrations.read(header, request)
        if self._broker_names is not None:
            await self._broker_names.claim(header.broker_name, request)
        if not channel.is_open:  # already handled as closed, so nothing would remove this broker
            return None
        is_new = self._table.holder(header.broker_name, header.broker_id) is None
        master = self._table.register(header, topics, channel, self._now_ms())
        if is_new:
            self.log.info(
                channel.address,
                "broker registered",
                broker=header.broker_name,
                id=header.broker_id,
                address=header.broker_addr,
            )
            self.on_broker("registered", channel, header.broker_name, header.broker_addr)
        order_topics = self._kv_config.namespace(ORDER_TOPIC_CONFIG)
        return Reply(
            RegisterBrokerResponseHeader(
                ha_server_addr=master.ha_address if master else None,
                master_addr=master.address if master else None,
            ),
            (KVTable(table=order_topics).encode(),) if order_topics else (),
        )

    def unregister_broker(self, request: Request) -> Reply:
        """UNREGISTER_BROKER (104)."""
        header, channel = request.header(UnregisterBrokerHeader), request.channel
        name, address = header.broker_name, header.broker_addr
        try:
            if self._broker_names is not None:
                self._broker_names.check(name, request)
            was_registered = self._table.unregister(name, address, channel, self._now_ms())
        except RequestError as error:
            self.log.warning(channel.address, "broker not unregistered", reason=error.remark)
            raise
        if was_registered:
            self.log.info(channel.address, "broker unregistered", broker=name, address=address)
            self.on_broker("unregistered", channel, name, address)
        return Reply()

    def broker_heartbeat(self, request: Request) -> Reply:
        """BROKER_HEARTBEAT (904)."""
        self._table.heartbeat(request.header(BrokerHeartbeatHeader).broker_addr, self._now_ms())
        return Reply()

    def query_data_version(self, request: Request) -> Reply:
        """QUERY_DATA_VERSION (322): whether a broker must register; if not, counts as heartbeat."""
        address = request.header(QueryDataVersionHeader).broker_addr
        ours = self._table.data_version(address)
        changed = ours != DataVersion.decode(request.body)
        if not changed:
            self._table.heartbeat(address, self._now_ms())
        return Reply(
            QueryDataVersionResponseHeader(changed=changed), (ours.encode(),) if ours else ()
        )

    async def get_cluster_info(self, request: Request) -> Reply | None:
        """GET_BROKER_CLUSTER_INFO (106)."""
        header = request.header(ClusterInfoHeader)
        await take_break()
        departed: list[DepartedBroker] = []
        for each in list(self._table.departed) if header.departed else ():
            broker = self._departed(each)
            names = list(await visible_topics(request, broker.topics or [], str))
            departed.append(structs.replace(broker, topics=names))
            await take_break()
        info = self._table.cluster_info()
        info.departed_brokers = departed if header.departed else None
        return _body(info)

    async def get_member_group(self, request: Request) -> Reply | None:
        """GET_BROKER_MEMBER_GROUP (901)."""
        header = request.header(GetBrokerMemberGroupHeader)
        await take_break()
        group = self._table.member_group(header.cluster_name, header.broker_name)
        return _body(GetBrokerMemberGroupResponseBody(broker_member_group=group))

    async def forget_broker(self, request: Request) -> Reply | None:
        """FORGET_BROKER (7680030): a departed broker won't come back, and its name is free."""
        name = request.header(ForgetBrokerHeader).broker_name
        check_name("brokerName", name)
        is_known = self._table.forget(name)
        if self._broker_names is not None:
            is_known |= await self._broker_names.free(name)
        if not is_known:
            raise RequestError(
                ResponseCode.BROKER_NOT_EXIST, f"no departed broker {name} is remembered here"
            )
        self.log.info(request.channel.address, "departed broker forgotten", broker=name)
        return Reply()

    def wipe_write_perm(self, request: Request) -> Reply:
        """WIPE_WRITE_PERM_OF_BROKER (205)."""
        name = _broker_name(request)
        count = self._table.wipe_write_perm(name)
        client = request.channel.address
        self.log.info(client, "write permission wiped", broker=name, topics=count)
        return Reply(WipeWritePermOfBrokerResponseHeader(wipe_topic_count=count))

    def add_write_perm(self, request: Request) -> Reply:
        """ADD_WRITE_PERM_OF_BROKER (327)."""
        name = _broker_name(request)
        count = self._table.add_write_perm(name)
        client = request.channel.address
        self.log.info(client, "write permission added", broker=name, topics=count)
        return Reply(AddWritePermOfBrokerResponseHeader(add_topic_count=count))

    # -- topics ------------------------------------------------------------------------------------

    def get_route(self, request: Request) -> Reply | None:
        """GET_ROUTEINFO_BY_TOPIC (105)."""
        header = request.header(GetRouteInfoHeader)
        route = self._table.route(header.topic)
        if route and len(route.queue_datas) + len(self._table.departed) > _BROKERS_AT_ONCE:
            self._begin_long(partial(self._route_later, header), request)
            return None
        return self._route_reply(header, request, route)

    async def _route_later(self, header: GetRouteInfoHeader, request: Request) -> Reply | None:
        await take_break()
        return self._route_reply(header, request, self._table.route(header.topic))

    def _route_reply(
        self, header: GetRouteInfoHeader, request: Request, route: TopicRouteData | None
    ) -> Reply:
        if route is None:
            return self._no_route_reply(header.topic)
        if self._policy.order_message_enable:
            route.order_topic_conf = self._kv_config.get(ORDER_TOPIC_CONFIG, header.topic)
        if header.departed:
            departed = self._table.departed.with_topic(header.topic)
            route.departed_brokers = [self._departed(each, header.topic) for each in departed]
        strict = (
            request.command.version >= _STRICT_JSON_VERSION
            or header.accept_standard_json_only is True
        )
        age_ms = self._table.route_age_ms(route, self._now_ms())
        return Reply(
            GetRouteInfoResponseHeader(route_age_millis=age_ms), (route.encode(strict=strict),)
        )

    def _no_route_reply(self, topic: str) -> Reply:
        age_ms = self._now_ms() - self._started_ms
        departed = self._table.departed.with_topic(topic)
        awaits_broker = bool(departed) or age_ms < REGISTRATION_PERIOD_MS
        if departed:
            reason = self._describe_all(departed)
        elif awaits_broker:
            reason = (
                f"no broker has registered it in the {age_ms // 1000} s since this nameserver "
                f"started; brokers register every {REGISTRATION_PERIOD_MS // 1000} s"
            )
        else:
            reason = "no broker has registered it"
        return Reply(
            GetRouteInfoResponseHeader(awaits_broker=awaits_broker),
            code=ResponseCode.TOPIC_NOT_EXIST,
            remark=f"no route for topic {topic}: {reason}",
        )

    def _describe_all(self, departed: list[Departed]) -> str:
        named = [self._describe(broker) for broker in departed[:_NAMED_MAX]]
        if len(departed) > _NAMED_MAX:
            named.append(f"and {len(departed) - _NAMED_MAX} more")
        return "; ".join(named)

    def _describe(self, broker: Departed) -> str:
        since = datetime.fromtimestamp(self._wall(broker.since_ms) / 1000, UTC)
        return (
            f"broker {broker.name} ({broker.address}) {broker.how.value} "
            f"{(self._now_ms() - broker.since_ms) // 1000} s ago "
            f"(since {since:%Y-%m-%dT%H:%M:%SZ})"
        )

    def _departed(self, broker: Departed, topic: str | None = None) -> DepartedBroker:
        """A departed broker as answers name it. topic: with its queues of a topic."""
        queues = broker.queues[topic] if topic is not None else QueueData()
        return DepartedBroker(
            broker_name=broker.name,
            broker_addr=broker.address,
            cluster=broker.cluster,
            how=broker.how.name,
            since=self._wall(broker.since_ms),
            read_queue_nums=queues.read_queue_nums,
            write_queue_nums=queues.write_queue_nums,
            perm=queues.perm,
            compacted=topic in broker.compacted or None,
            topics=_named_topics(broker) if topic is None else None,
            topic_count=len(broker.queues) if topic is None else None,
        )

    def _wall(self, at_ms: int) -> int:
        """A time of the table's clock in ms since 1970; always the same, so that routes are."""
        return self._clock_ms + at_ms

    def delete_topic(self, request: Request) -> Reply:
        """DELETE_TOPIC_IN_NAMESRV (216)."""
        header = request.header(TopicInNamesrvHeader)
        topic, cluster = header.topic, header.cluster_name or None
        check_name("topic", topic)
        check_text("clusterName", cluster or "", NAME_CHARS_MAX)
        self._table.delete_topic(topic, cluster)
        client = request.channel.address
        self.log.info(client, "topic deleted", topic=topic, cluster=cluster or "all")
        return Reply()

    def register_topic(self, request: Request) -> Reply:
        """REGISTER_TOPIC_IN_NAMESRV (217)."""
        header = request.header(TopicInNamesrvHeader)
        route = TopicRouteData.decode(request.body)
        for queue_data in route.queue_datas:
            registrations.check_queues(header.topic, queue_data)
        self._table.register_topic(header.topic, route.queue_datas)
        brokers = [queue_data.broker_name for queue_data in route.queue_datas]
        self.log.info(request.channel.address, "topic added", topic=header.topic, brokers=brokers)
        return Reply()

    async def get_topics_by_cluster(self, request: Request) -> Reply | None:
        """GET_TOPICS_BY_CLUSTER (224)."""
        cluster = request.header(GetTopicsByClusterHeader).cluster
        return await _topic_list(request, self._table.topics(cluster))

    async def get_system_topics(self, request: Request) -> Reply | None:
        """GET_SYSTEM_TOPIC_LIST_FROM_NS (304)."""
        return await _topic_list(request, self._table.system_topics(), self._table.any_address())

    # -- key-value table ---------------------------------------------------------------------------

    async def put_kv_config(self, request: Request) -> Reply | None:
        """PUT_KV_CONFIG (100): answered once the change is on disk."""
        header = request.header(PutKVConfigHeader)
        await self._kv_config.put(header.namespace, header.key, header.value)
        client = request.channel.address
        self.log.info(client, "key-value set", namespace=header.namespace, key=header.key)
        return Reply()

    def get_kv_config(self, request: Request) -> Reply:
        """GET_KV_CONFIG (101)."""
        header = request.header(KVKeyHeader)
        value = self._kv_config.get(header.namespace, header.key)
        if value is None:
            raise RequestError(
                ResponseCode.QUERY_NOT_FOUND,
                f"no value for key {header.key} in namespace {header.namespace}",
            )
        return Reply(GetKVConfigResponseHeader(value=value))

    async def delete_kv_config(self, request: Request) -> Reply | None:
        """DELETE_KV_CONFIG (102): answered once the change is on disk."""
        header = request.header(KVKeyHeader)
        await self._kv_config.delete(header.namespace, header.key)
        client = request.channel.address
        self.log.info(client, "key-value deleted", namespace=header.namespace, key=header.key)
        return Reply()

    async def get_kv_list(self, request: Request) -> Reply | None:
        """GET_KVLIST_BY_NAMESPACE (219)."""
        namespace = request.header(KVNamespaceHeader).namespace
        await take_break()
        table = self._kv_config.namespace(namespace)
        if table is None:
            raise RequestError(ResponseCode.QUERY_NOT_FOUND, f"namespace {namespace} is empty")
        return _body(KVTable(table=table))


def _broker_name(request: Request) -> str:
    name = request.header(WritePermOfBrokerHeader).broker_name
    check_name("brokerName", name)
    return name


def _body(body: Body) -> Reply:
    return Reply(body=(body.encode(),))


async def _all_topics(topics: Callable[[], Iterable[str]], request: Request) -> Reply | None:
    return await _topic_list(request, topics())


async def _topic_list(
    request: Request, topics: Iterable[str], broker_addr: str | None = None
) -> Reply | None:
    """A TopicList reply with the topics that the client may see, encoded in slices."""
    names = await fastjson.dumps_list_sliced(await visible_topics(request, topics, str))
    return Reply(body=fastjson.dumps_parts({"brokerAddr": broker_addr, "topicList": names}))


def _named_topics(broker: Departed) -> list[str]:
    """Some topics of users and retry topics of groups, of which the broker had queues.

    Each broker has each static topic, also those whose queues are all on others.
    """
    seen = [
        name
        for name, queues in islice(broker.queues.items(), _TOPICS_SEEN_MAX)
        if queues.read_queue_nums > 0
    ]
    users = user_topics(seen, (broker.name, broker.cluster))
    named = (name for name in seen if name in users or name.startswith(RETRY_PREFIX))
    return list(islice(named, _TOPICS_NAMED_MAX))
