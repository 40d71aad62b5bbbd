"""The driver's queries to nameservers and brokers: topics, queues, offsets, times, positions."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from headrace.consumer.pulls import Wanted
from headrace.consumer.subscription import Subscription
from headrace.errors import (
    ConnectFailed,
    ConnectionLost,
    NameserverUnavailable,
    RequestTimeout,
    WrongServer,
)
from headrace.route import TopicRoute
from headrace.spark.chains import Chains, Item, Items, Queues, is_static, require_up
from headrace.spark.connections import PLAIN, Connections, Dial, Request
from headrace.spark.errors import OptionError, TopicNotFound
from headrace.spark.tier.plans import ask_range
from headrace.whole import require_whole
from headrace_protocol.admin_headers import (
    GetTopicConfigHeader,
    QueryConsumeQueueHeader,
    TopicConfigResponseHeader,
)
from headrace_protocol.bodies import (
    MASTER_ID,
    CheckClientRequestBody,
    ClusterInfo,
    ConsumerData,
    HeartbeatData,
    MessageQueue,
    QueryConsumeQueueResponseBody,
    SubscriptionData,
    TopicConfig,
    TopicList,
)
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import (
    GetMaxOffsetHeader,
    GetMinOffsetHeader,
    OffsetResponseHeader,
    SearchOffsetHeader,
    UnregisterClientHeader,
    UpdateConsumerOffsetHeader,
)
from headrace_protocol.nameserver_headers import GetRouteInfoHeader
from headrace_protocol.system_topics import READER_GROUP, user_topics

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import msgspec

    from headrace.missing import MissingPart
    from headrace.spark.tier.locations import TierAccess
    from headrace.spark.tier.spans import TierRange
    from headrace_protocol.bodies import ConsumeQueueData
    from headrace_protocol.drivers.response import Response

# A topic on one broker.
BrokerTopic = tuple[str, str]
# The id that tells a recreated topic from its predecessor; None from brokers without such ids.
Incarnations = dict[BrokerTopic, str | None]
# Offsets of a queue: from the first up to, but not including, the second.
Span = tuple[int, int]

_log = logging.getLogger("headrace.spark")


class Topics(NamedTuple):
    """A choice of topics: names, and patterns with ``*``, ``?`` or ``[...]``."""

    names: tuple[str, ...]
    patterns: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ",".join((*self.names, *self.patterns))

    def match(self, topic: str) -> bool:
        """True if ``topic`` is named or matches a pattern."""
        return topic in self.names or any(fnmatchcase(topic, each) for each in self.patterns)


class Cluster(Connections):
    """Nameservers and the brokers registered with them. Not thread-safe."""

    def __init__(
        self,
        nameservers: Sequence[str],
        dial: Dial = PLAIN,
        *,
        allow_partial: bool = False,
    ) -> None:
        """allow_partial: log which messages are on brokers that are away, instead of raising."""
        super().__init__(dial)
        self.nameservers = tuple(nameservers)
        self._allow_partial = allow_partial
        self._last_answers: dict[tuple[int, str], Response] = {}
        self._chains = Chains(self, self.masters)
        self._missing: dict[str, tuple[MissingPart, ...]] = {}
        # The brokers that routes of a topic have named so far.
        self._hosts: dict[str, set[str]] = {}

    def ask_nameserver(self, code: int, header: msgspec.Struct | None = None) -> Response:
        """The first nameserver's response; if none answers, the last response to the same request.

        Raises NameserverUnavailable.
        """
        question = code, str(header)
        failures: dict[str, Exception] = {}
        for address in self.nameservers:
            try:
                self._last_answers[question] = self.ask(address, [(code, header, b"")])[0]
                break
            except (ConnectFailed, ConnectionLost, RequestTimeout, WrongServer) as error:
                failures[address] = error
        # Brokers keep serving without nameservers, so a known route remains usable.
        if question not in self._last_answers:
            raise NameserverUnavailable(failures)
        return self._last_answers[question]

    # -- topics and queues -------------------------------------------------------------------------

    def queues(self, topics: Topics) -> Queues:
        """All readable queues, in order of topic, broker and queue id.

        Raises NameserverUnavailable, and TopicNotFound if a named topic does not exist or if only
        patterns are given and none matches.
        """
        found: Queues = {}
        for topic in self._names(topics):
            found |= self._queues_of(topic)
        return dict(sorted(found.items()))

    def require_whole(self) -> None:
        """Raise PartialAnswer if ``queues`` returned only a part of its topics."""
        for topic, missing in sorted(self._missing.items()):
            require_whole(topic, missing, allow_partial=self._allow_partial, warn=_log.warning)

    def _names(self, topics: Topics) -> set[str]:
        names = set(topics.names)
        if topics.patterns:
            names |= {topic for topic in self._user_topics() if topics.match(topic)}
        if not names:
            raise TopicNotFound(
                f"no topic matches {topics} at {';'.join(self.nameservers)}: see "
                "`headrace topic list`"
            )
        return names

    def _user_topics(self) -> set[str]:
        return user_topics(
            self._topic_list(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER),
            # Includes the names of clusters and brokers.
            self._topic_list(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS),
        )

    def _topic_list(self, code: int) -> set[str]:
        return set(self.ask_nameserver(code).expect().decode(TopicList).topic_list)

    def _queues_of(self, topic: str) -> Queues:
        route = self.route(topic)
        self._missing[topic] = route.missing
        self._hosts.setdefault(topic, set()).update(route.brokers)
        addresses = {queue: route.address_of(queue) for queue in route.read_queues}
        return {queue: address for queue, address in addresses.items() if address}

    def route(self, topic: str) -> TopicRoute:
        """The current route of a topic. Raises TopicNotFound, NameserverUnavailable."""
        header = GetRouteInfoHeader(topic=topic, accept_standard_json_only=True, departed=True)
        response = self.ask_nameserver(RequestCode.GET_ROUTEINFO_BY_TOPIC, header)
        if response.command.code == ResponseCode.TOPIC_NOT_EXIST:
            raise TopicNotFound(
                f"topic {topic} is on no broker that {response.address} knows "
                f"({response.command.remark}): check its spelling, or create it with "
                f"`headrace topic create {topic}`"
            )
        route = TopicRoute.of(topic, response, fetched_at=0.0)
        self.dial.learn(route.data.broker_datas)
        return route

    def masters(self) -> dict[str, str]:
        """Address of the master of each broker, by name. Raises NameserverUnavailable."""
        response = self.ask_nameserver(RequestCode.GET_BROKER_CLUSTER_INFO)
        brokers = response.expect().decode(ClusterInfo).broker_addr_table
        self.dial.learn(brokers.values())
        return {
            name: broker.broker_addrs[MASTER_ID]
            for name, broker in brokers.items()
            if MASTER_ID in broker.broker_addrs
        }

    # -- vanished queues ---------------------------------------------------------------------------

    def vanished_queues(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, int]:
        """The ``queues`` that no longer exist, according to their own brokers.

        Returns by queue the topic's number of read queues at the broker, 0 if it was deleted.
        """
        try:
            masters = self.masters()
        except NameserverUnavailable:
            return {}  # no way to tell which brokers exist
        queues = list(queues)
        static = [queue for queue in queues if is_static(queue)]
        deleted = self._deleted_everywhere({queue.topic for queue in static}, masters)
        gone = {queue: 0 for queue in static if queue.topic in deleted}
        queues = [queue for queue in queues if queue.broker_name in masters]
        counts: dict[BrokerTopic, int] = {}
        for name in {queue.broker_name for queue in queues}:
            its_topics = {(queue.topic, name) for queue in queues if queue.broker_name == name}
            # A broker that does not answer counts as away even if the nameserver still lists it.
            with suppress(ConnectFailed, ConnectionLost, RequestTimeout):
                counts |= self._read_queue_counts(dict.fromkeys(its_topics, masters[name]))
        found = {queue: counts.get((queue.topic, queue.broker_name)) for queue in queues}
        return gone | {
            queue: count
            for queue, count in found.items()
            if count is not None and count <= queue.queue_id
        }

    def _deleted_everywhere(self, topics: set[str], masters: Mapping[str, str]) -> set[str]:
        """The static topics that no broker has, according to all of them.

        A nameserver that has just started knows no broker or only some, which decides nothing.
        """
        topics = {topic for topic in topics if masters.keys() >= self._hosts.get(topic, set())}
        if not masters:
            return set()
        addresses = {
            (topic, name): address for topic in topics for name, address in masters.items()
        }
        try:
            counts = self._read_queue_counts(addresses)
        except (ConnectFailed, ConnectionLost, RequestTimeout):
            return set()
        return {topic for topic in topics if not any(counts[topic, name] for name in masters)}

    def _read_queue_counts(self, addresses: Mapping[BrokerTopic, str]) -> dict[BrokerTopic, int]:
        return {
            where: 0
            if answer.command.code == ResponseCode.TOPIC_NOT_EXIST
            else answer.expect().decode(TopicConfig).read_queue_nums
            for where, answer in self._topic_configs(addresses).items()
        }

    def _topic_configs(self, addresses: Mapping[BrokerTopic, str]) -> dict[BrokerTopic, Response]:
        requests: dict[BrokerTopic, Request] = {
            where: (RequestCode.GET_TOPIC_CONFIG, GetTopicConfigHeader(topic=where[0]), b"")
            for where in addresses
        }
        return self.ask_each(requests, addresses)

    def leftover_max_offsets(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, int]:
        """Max offsets of queues removed from their topics, as far as brokers still store them."""
        masters = self.masters()
        addresses = {queue: masters[queue.broker_name] for queue in queues}
        requests: dict[MessageQueue, Request] = {
            queue: (
                RequestCode.GET_MAX_OFFSET,
                GetMaxOffsetHeader(topic=queue.topic, queue_id=queue.queue_id),
                b"",
            )
            for queue in addresses
        }
        return {
            queue: answer.expect().header(OffsetResponseHeader).offset
            for queue, answer in self.ask_each(requests, addresses).items()
            if answer.command.code == ResponseCode.SUCCESS
        }

    def check_sql(self, sql: str | None, queues: Queues) -> None:
        """Raise OptionError unless the brokers accept this SQL92 filter; None means no filter."""
        if sql is None:
            return
        topic = next((queue.topic for queue in queues), "")
        subscription = SubscriptionData(topic=topic, sub_string=sql, expression_type="SQL92")
        body = CheckClientRequestBody(
            client_id=_client_id(), group=READER_GROUP, subscription_data=subscription
        ).encode()
        for address in sorted(set(queues.values())):
            answer = self.ask(address, [(RequestCode.CHECK_CLIENT_CONFIG, None, body)])[0]
            if answer.command.code != ResponseCode.SUCCESS:
                raise OptionError(
                    "filter",
                    sql,
                    f"is not a tag expression (a || b), and the broker at {address} rejects it "
                    f"as SQL92: {answer.command.remark}",
                )

    def incarnations(self, queues: Queues) -> Incarnations:
        """The incarnation id of each topic on each broker; None if unknown.

        Leaves out topics that a broker does not have: nameservers may list those for long.
        """
        return {
            where: answer.expect().header(TopicConfigResponseHeader).incarnation
            for where, answer in self._topic_configs(_by_topic(queues)).items()
            if answer.command.code != ResponseCode.TOPIC_NOT_EXIST
        }

    def attributes(self, queues: Queues) -> dict[BrokerTopic, dict[str, str]]:
        """The attributes of the queues' topics on each broker."""
        return {
            where: answer.expect().decode(TopicConfig).attributes
            for where, answer in self._topic_configs(_by_topic(queues)).items()
        }

    # -- offsets -----------------------------------------------------------------------------------

    def min_offsets(self, queues: Queues) -> dict[MessageQueue, int]:
        """The offset of each queue's oldest message."""
        return {queue: items[0].start for queue, items in self._items(queues).items()} | (
            self.offsets(_plain(queues), RequestCode.GET_MIN_OFFSET, GetMinOffsetHeader)
        )

    def max_offsets(self, queues: Queues) -> dict[MessageQueue, int]:
        """The offset that each queue's next message will get."""
        return {queue: items[-1].end for queue, items in self._items(queues).items()} | (
            self.offsets(_plain(queues), RequestCode.GET_MAX_OFFSET, GetMaxOffsetHeader)
        )

    def parts(self, ranges: Mapping[MessageQueue, Span], queues: Queues) -> Items:
        """The messages in ``ranges``, by the physical queues that hold them; at least one each.

        While a broker that holds some of a static topic's messages is away, raises NoQueue, or
        leaves these out, perhaps all of a queue.
        """
        items = self._items({queue: queues[queue] for queue in ranges})
        parts = {
            queue: _parts(items[queue], *each)
            if queue in items
            else [Item(queue, queues[queue], 0, *each)]
            for queue, each in ranges.items()
        }
        return require_up(parts, allow_partial=self._allow_partial)

    def tier_range(self, part: Item, access: TierAccess) -> TierRange:
        """The spans of a part's messages in its broker's tier. Raises OptionError."""
        start, end = part.start - part.delta, part.end - part.delta
        return ask_range(self, part.address, part.physical, (start, end), access)

    def _items(self, queues: Queues) -> Items:
        """All messages of each queue of a static topic."""
        static = {queue: at for queue, at in queues.items() if is_static(queue)}
        return self._chains.items(static) if static else {}

    def offsets_at(self, queues: Queues, timestamp_ms: int) -> dict[MessageQueue, int]:
        """The offset of each queue's first message stored at ``timestamp_ms`` (1970) or later."""
        static = {queue: at for queue, at in queues.items() if is_static(queue)}
        found = {}
        if static:
            found = self._chains.offsets_at(static, timestamp_ms, allow_partial=self._allow_partial)
        header = partial(SearchOffsetHeader, timestamp=timestamp_ms)
        code = RequestCode.SEARCH_OFFSET_BY_TIMESTAMP
        return found | self.offsets(_plain(queues), code, header)

    def store_times(
        self, offsets: Mapping[MessageQueue, int], queues: Queues
    ) -> dict[MessageQueue, int]:
        """Store times of the messages at ``offsets``, in ms since 1970; missing ones left out."""
        wanted = {queue: _one_message(queue, offset) for queue, offset in offsets.items()}
        requests: dict[MessageQueue, Request] = {
            queue: (*each.request(peer_is_headrace=False), b"") for queue, each in wanted.items()
        }
        answers = self.ask_each(requests, queues)
        batches = {queue: wanted[queue].result(answer).batch for queue, answer in answers.items()}
        return {
            queue: int(batch.columns.store_timestamp[0])
            for queue, batch in batches.items()
            if batch
        }

    def units(
        self, starts: Iterable[tuple[MessageQueue, int]], count: int, queues: Queues
    ) -> dict[tuple[MessageQueue, int], list[ConsumeQueueData]]:
        """Up to ``count`` ConsumeQueue units from each offset of a physical queue on."""
        requests: dict[tuple[MessageQueue, int], Request] = {
            (queue, offset): (RequestCode.QUERY_CONSUME_QUEUE, header, b"")
            for queue, offset in starts
            for header in [_units_header(queue, offset, count)]
        }
        answers = self.ask_each(requests, {start: queues[start[0]] for start in requests})
        return {start: _units(answer, count) for start, answer in answers.items()}

    # -- positions ---------------------------------------------------------------------------------

    def position_addresses(self, queues: Queues) -> set[str]:
        """Addresses of the brokers that may keep a group's positions in ``queues``.

        Those in a static topic are kept by the broker that has the message, which is any of them.
        """
        routes = [self.route(topic) for topic in {queue.topic for queue in queues}]
        masters = (
            route.master(name) for route in routes if route.is_static for name in route.brokers
        )
        return {*queues.values(), *filter(None, masters)}

    def register_group(self, group: str, queues: Queues, addresses: Iterable[str]) -> None:
        """Register ``group`` with brokers so that it can have positions there, without a member."""
        topics = sorted({queue.topic for queue in queues})
        client_id = _client_id()
        consumer = ConsumerData(
            group_name=group,
            consume_type="CONSUME_ACTIVELY",
            subscription_data_set=[
                SubscriptionData(topic=topic, sub_string="*") for topic in topics
            ],
        )
        heartbeat = HeartbeatData(client_id=client_id, consumer_data_set=[consumer]).encode()
        # Otherwise rebalancing would assign some of the group's queues to this client.
        leave = UnregisterClientHeader(client_id=client_id, consumer_group=group)
        requests: list[Request] = [
            (RequestCode.HEART_BEAT, None, heartbeat),
            (RequestCode.UNREGISTER_CLIENT, leave, b""),
        ]
        for address in addresses:
            for answer in self.ask(address, requests):
                answer.expect()

    def commit(self, group: str, offsets: Mapping[MessageQueue, int], queues: Queues) -> None:
        """Commit the positions of ``group``, from which lag is computed. Raises BrokerError."""
        requests: dict[MessageQueue, Request] = {
            queue: (RequestCode.UPDATE_CONSUMER_OFFSET, _commit_header(group, queue, offset), b"")
            for queue, offset in offsets.items()
        }
        for answer in self.ask_each(requests, queues).values():
            answer.expect()


def _plain(queues: Queues) -> Queues:
    return {queue: at for queue, at in queues.items() if not is_static(queue)}


def _parts(items: list[Item], start: int, end: int) -> list[Item]:
    # The task that reads the last item finds out if its newest messages were lost.
    last = items[-1]._replace(end=max(end, items[-1].end))
    parts = [item.part(start, end) for item in (*items[:-1], last)]
    return [part for part in parts if part.message_count] or [last.part(end, end)]


def _client_id() -> str:
    return f"headrace-spark@{os.getpid()}"


def _by_topic(queues: Queues) -> dict[BrokerTopic, str]:
    return {(queue.topic, queue.broker_name): address for queue, address in queues.items()}


def _units(answer: Response, count: int) -> list[ConsumeQueueData]:
    """The units in a response. Raises BrokerError, MalformedAnswer."""
    units = answer.expect().decode(QueryConsumeQueueResponseBody).queue_data[:count]
    if any(unit.physic_offset < 0 or unit.physic_size < 0 for unit in units):
        raise answer.malformed("a ConsumeQueue unit with a negative offset or size")
    return units


def _units_header(queue: MessageQueue, offset: int, count: int) -> QueryConsumeQueueHeader:
    return QueryConsumeQueueHeader(
        topic=queue.topic, queue_id=queue.queue_id, index=offset, count=count, logical=False
    )


def _commit_header(group: str, queue: MessageQueue, offset: int) -> UpdateConsumerOffsetHeader:
    return UpdateConsumerOffsetHeader(
        consumer_group=group, topic=queue.topic, queue_id=queue.queue_id, commit_offset=offset
    )


def _one_message(queue: MessageQueue, offset: int) -> Wanted:
    return Wanted(READER_GROUP, queue, offset, Subscription(queue.topic))
