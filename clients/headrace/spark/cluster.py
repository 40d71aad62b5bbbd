"""What the driver asks nameservers and brokers: topics, queues, offsets, times, progress.

Over blocking sockets, opened when they are needed; many requests to a broker are under way at once.
"""

from __future__ import annotations

import os
from collections import defaultdict
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

from headrace.consumer.pulls import READER_GROUP, Wanted
from headrace.consumer.subscription import Subscription
from headrace.errors import (
    ConnectFailed,
    ConnectionLost,
    NameserverUnavailable,
    RequestTimeout,
)
from headrace.route import TopicRoute
from headrace.spark.errors import OptionError, TopicNotFound
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
from headrace_protocol.drivers.blocking import BlockingConnection
from headrace_protocol.headers import (
    GetMaxOffsetHeader,
    GetMinOffsetHeader,
    GetRouteInfoHeader,
    GetTopicConfigHeader,
    OffsetResponseHeader,
    QueryConsumeQueueHeader,
    SearchOffsetHeader,
    TopicConfigResponseHeader,
    UnregisterClientHeader,
    UpdateConsumerOffsetHeader,
)
from headrace_protocol.system_topics import user_topics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import msgspec

    from headrace_protocol.bodies import ConsumeQueueData
    from headrace_protocol.drivers.response import Response
    from headrace_protocol.frame import Buffer

# Where a queue is -> the broker's address.
Queues = dict[MessageQueue, str]
# A topic on one broker.
Place = tuple[str, str]
# What tells a topic from another one of the same name; None from brokers that don't say.
Incarnations = dict[Place, str | None]
Request = tuple[int, "msgspec.Struct | None", "Buffer"]
Key = TypeVar("Key")

_TIMEOUT_MS = 10_000
# A broker stops reading from a client whose answers pile up.
_UNDER_WAY_MAX = 256


class Topics(NamedTuple):
    """Which topics: names, and patterns with ``*``, ``?`` or ``[...]``."""

    names: tuple[str, ...]
    patterns: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ",".join((*self.names, *self.patterns))

    def have(self, topic: str) -> bool:
        """Whether ``topic`` is one of them."""
        return topic in self.names or any(fnmatchcase(topic, each) for each in self.patterns)


class Cluster:
    """Nameservers and the brokers they know; used by one thread."""

    def __init__(self, nameservers: Sequence[str]) -> None:
        self.nameservers = tuple(nameservers)
        self._connections: dict[str, BlockingConnection] = {}
        self._last_answers: dict[tuple[int, str], Response] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections; the next question opens them again."""
        while self._connections:
            self._connections.popitem()[1].close()

    # -- requests ----------------------------------------------------------------------------------

    def ask(self, address: str, requests: Sequence[Request]) -> list[Response]:
        """The answers, in the order of the requests, which must bear being sent twice.

        Raises ConnectFailed, ConnectionLost, RequestTimeout.
        """
        if address in self._connections:
            try:
                return self._answers(address, requests)
            except ConnectionLost:
                pass  # perhaps the other side only closed it for its silence
        self._connections[address] = BlockingConnection.connect(address)
        return self._answers(address, requests)

    def _answers(self, address: str, requests: Sequence[Request]) -> list[Response]:
        connection = self._connections[address]
        answers: list[Response | None] = [None] * len(requests)
        try:
            for index, (code, header, body) in enumerate(requests):
                connection.submit(code, header, body, _setter(answers, index))
                connection.drain(_UNDER_WAY_MAX, timeout_ms=_TIMEOUT_MS)
            connection.drain(timeout_ms=_TIMEOUT_MS)
        except BaseException:
            self._connections.pop(address).close()
            raise
        return [answer for answer in answers if answer]

    def ask_each(
        self, requests: Mapping[Key, Request], addresses: Mapping[Key, str]
    ) -> dict[Key, Response]:
        """One request for each key, sent to the key's address."""
        by_address: dict[str, list[Key]] = defaultdict(list)
        for key in requests:
            by_address[addresses[key]].append(key)
        answers: dict[Key, Response] = {}
        for address, keys in by_address.items():
            found = self.ask(address, [requests[key] for key in keys])
            answers.update(zip(keys, found, strict=True))
        return answers

    def ask_nameserver(self, code: int, header: msgspec.Struct | None = None) -> Response:
        """Ask one after the other until one answers; if none does, what they said before counts.

        Raises NameserverUnavailable.
        """
        question = code, str(header)
        failures: dict[str, Exception] = {}
        for address in self.nameservers:
            try:
                self._last_answers[question] = self.ask(address, [(code, header, b"")])[0]
                break
            except (ConnectFailed, ConnectionLost, RequestTimeout) as error:
                failures[address] = error
        # Brokers go on without their nameservers, and so can we.
        if question not in self._last_answers:
            raise NameserverUnavailable(failures)
        return self._last_answers[question]

    # -- topics and queues -------------------------------------------------------------------------

    def queues(self, topics: Topics) -> Queues:
        """All queues that can be read now, in order of topic, broker and queue id.

        Raises TopicNotFound for a name that is nowhere or if a pattern is all there is and fits
        nothing, NameserverUnavailable.
        """
        found: Queues = {}
        for topic in self._names(topics):
            found |= self._queues_of(topic)
        return dict(sorted(found.items()))

    def _names(self, topics: Topics) -> set[str]:
        names = set(topics.names)
        if topics.patterns:
            names |= {topic for topic in self._user_topics() if topics.have(topic)}
        if not names:
            raise TopicNotFound(
                f"no topic fits {topics} at {';'.join(self.nameservers)}: see `headrace topic list`"
            )
        return names

    def _user_topics(self) -> set[str]:
        return user_topics(
            self._topic_list(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER),
            # Beside them: the names of clusters and brokers.
            self._topic_list(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS),
        )

    def _topic_list(self, code: int) -> set[str]:
        return set(self.ask_nameserver(code).expect().decode(TopicList).topic_list)

    def _queues_of(self, topic: str) -> Queues:
        route = self.route(topic)
        addresses = {queue: route.address(queue.broker_name) for queue in route.read_queues}
        return {queue: address for queue, address in addresses.items() if address}

    def route(self, topic: str) -> TopicRoute:
        """Where a topic is now. Raises TopicNotFound, NameserverUnavailable."""
        header = GetRouteInfoHeader(topic=topic, accept_standard_json_only=True)
        response = self.ask_nameserver(RequestCode.GET_ROUTEINFO_BY_TOPIC, header)
        if response.command.code == ResponseCode.TOPIC_NOT_EXIST:
            raise TopicNotFound(
                f"topic {topic} is on no broker that {response.address} knows "
                f"({response.command.remark}): create it with `headrace topic create {topic}`, "
                "or is the name misspelt?"
            )
        return TopicRoute.of(topic, response, fetched_at=0.0)

    def masters(self) -> dict[str, str]:
        """Address of the master of each broker, by name. Raises NameserverUnavailable."""
        response = self.ask_nameserver(RequestCode.GET_BROKER_CLUSTER_INFO)
        brokers = response.expect().decode(ClusterInfo).broker_addr_table
        return {
            name: broker.broker_addrs[MASTER_ID]
            for name, broker in brokers.items()
            if MASTER_ID in broker.broker_addrs
        }

    # -- what there is no more ---------------------------------------------------------------------

    def gone(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, int]:
        """Those of ``queues`` that nobody can read any more, by what their brokers say themselves.

        Returns how many queues to read the topic has at the broker: none where it was deleted.
        """
        try:
            masters = self.masters()
        except NameserverUnavailable:
            return {}  # who is there can't be told
        queues = [queue for queue in queues if queue.broker_name in masters]
        counts: dict[Place, int] = {}
        for name in {queue.broker_name for queue in queues}:
            places = {(queue.topic, name) for queue in queues if queue.broker_name == name}
            # One that does not answer is away, whatever the nameserver still says.
            with suppress(ConnectFailed, ConnectionLost, RequestTimeout):
                counts |= self._read_queue_counts(dict.fromkeys(places, masters[name]))
        found = {queue: counts.get((queue.topic, queue.broker_name)) for queue in queues}
        return {
            queue: count
            for queue, count in found.items()
            if count is not None and count <= queue.queue_id
        }

    def _read_queue_counts(self, places: Mapping[Place, str]) -> dict[Place, int]:
        answers = self.ask_each({where: _config_request(where[0]) for where in places}, places)
        return {
            where: 0
            if answer.command.code == ResponseCode.TOPIC_NOT_EXIST
            else answer.expect().decode(TopicConfig).read_queue_nums
            for where, answer in answers.items()
        }

    def left_offsets(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, int]:
        """The max offsets of queues that topics have no more, of those that are still stored."""
        masters = self.masters()
        places = {queue: masters[queue.broker_name] for queue in queues}
        requests: dict[MessageQueue, Request] = {
            queue: (RequestCode.GET_MAX_OFFSET, _max_header(queue), b"") for queue in places
        }
        return {
            queue: answer.expect().header(OffsetResponseHeader).offset
            for queue, answer in self.ask_each(requests, places).items()
            if answer.command.code == ResponseCode.SUCCESS
        }

    def check_sql(self, sql: str | None, queues: Queues) -> None:
        """Raise OptionError unless the brokers can carry out this SQL92 filter; None is none."""
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
                    f"is no tag expression (a || b), and the broker at {address} does not take it "
                    f"as SQL92: {answer.command.remark}",
                )

    def incarnations(self, queues: Queues) -> Incarnations:
        """What tells each topic of each broker from others of the same name; None if unknown.

        Without those that a broker does not have: nameservers may list them for long.
        """
        places = {(queue.topic, queue.broker_name): at for queue, at in queues.items()}
        answers = self.ask_each({where: _config_request(where[0]) for where in places}, places)
        return {
            where: answer.expect().header(TopicConfigResponseHeader).incarnation
            for where, answer in answers.items()
            if answer.command.code != ResponseCode.TOPIC_NOT_EXIST
        }

    # -- offsets -----------------------------------------------------------------------------------

    def min_offsets(self, queues: Queues) -> dict[MessageQueue, int]:
        """Of each queue the offset of the oldest message."""
        return self._offsets(queues, RequestCode.GET_MIN_OFFSET, _min_header)

    def max_offsets(self, queues: Queues) -> dict[MessageQueue, int]:
        """Of each queue the offset that its next message will get."""
        return self._offsets(queues, RequestCode.GET_MAX_OFFSET, _max_header)

    def offsets_at(self, queues: Queues, timestamp_ms: int) -> dict[MessageQueue, int]:
        """Of each queue the offset of the first message stored at a time (since 1970) or later."""

        def header(queue: MessageQueue) -> SearchOffsetHeader:
            return SearchOffsetHeader(
                topic=queue.topic, queue_id=queue.queue_id, timestamp=timestamp_ms
            )

        return self._offsets(queues, RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, header)

    def _offsets(
        self, queues: Queues, code: int, header: Callable[[MessageQueue], Any]
    ) -> dict[MessageQueue, int]:
        requests: dict[MessageQueue, Request] = {
            queue: (code, header(queue), b"") for queue in queues
        }
        answers = self.ask_each(requests, queues)
        # Apache's brokers say -1 of a queue that nothing was ever written to.
        return {
            queue: max(0, answer.expect().header(OffsetResponseHeader).offset)
            for queue, answer in answers.items()
        }

    def store_times(
        self, offsets: Mapping[MessageQueue, int], queues: Queues
    ) -> dict[MessageQueue, int]:
        """When the messages at ``offsets`` were stored, in ms since 1970; only of those there."""
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
        self, places: Iterable[tuple[MessageQueue, int]], count: int, queues: Queues
    ) -> dict[tuple[MessageQueue, int], list[ConsumeQueueData]]:
        """Up to ``count`` units of the ConsumeQueue from each place (queue, queue offset) on."""
        requests: dict[tuple[MessageQueue, int], Request] = {
            (queue, offset): (RequestCode.QUERY_CONSUME_QUEUE, header, b"")
            for queue, offset in places
            for header in [_units_header(queue, offset, count)]
        }
        answers = self.ask_each(requests, {place: queues[place[0]] for place in requests})
        return {place: _units(answer, count) for place, answer in answers.items()}

    # -- progress ----------------------------------------------------------------------------------

    def make_group(self, group: str, queues: Queues) -> None:
        """Let brokers know ``group``, so that it can have progress; nobody becomes its member."""
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
        # A member would be left some of the queues by others of the same group.
        leave = UnregisterClientHeader(client_id=client_id, consumer_group=group)
        requests: list[Request] = [
            (RequestCode.HEART_BEAT, None, heartbeat),
            (RequestCode.UNREGISTER_CLIENT, leave, b""),
        ]
        for address in set(queues.values()):
            for answer in self.ask(address, requests):
                answer.expect()

    def commit(self, group: str, offsets: Mapping[MessageQueue, int], queues: Queues) -> None:
        """Store the progress of ``group`` where lag is computed from. Raises BrokerError."""
        requests: dict[MessageQueue, Request] = {
            queue: (RequestCode.UPDATE_CONSUMER_OFFSET, _commit_header(group, queue, offset), b"")
            for queue, offset in offsets.items()
        }
        for answer in self.ask_each(requests, queues).values():
            answer.expect()


def _client_id() -> str:
    return f"headrace-spark@{os.getpid()}"


def _setter(answers: list[Response | None], index: int) -> Callable[[Response], None]:
    def set_answer(response: Response) -> None:
        answers[index] = response

    return set_answer


def _config_request(topic: str) -> Request:
    return RequestCode.GET_TOPIC_CONFIG, GetTopicConfigHeader(topic=topic), b""


def _min_header(queue: MessageQueue) -> GetMinOffsetHeader:
    return GetMinOffsetHeader(topic=queue.topic, queue_id=queue.queue_id)


def _max_header(queue: MessageQueue) -> GetMaxOffsetHeader:
    return GetMaxOffsetHeader(topic=queue.topic, queue_id=queue.queue_id)


def _units(answer: Response, count: int) -> list[ConsumeQueueData]:
    """Raises BrokerError, MalformedAnswer."""
    units = answer.expect().decode(QueryConsumeQueueResponseBody).queue_data[:count]
    if any(unit.physic_offset < 0 or unit.physic_size < 0 for unit in units):
        raise answer.malformed("a unit of a ConsumeQueue with a negative offset or size")
    return units


def _units_header(queue: MessageQueue, offset: int, count: int) -> QueryConsumeQueueHeader:
    return QueryConsumeQueueHeader(
        topic=queue.topic, queue_id=queue.queue_id, index=offset, count=count
    )


def _commit_header(group: str, queue: MessageQueue, offset: int) -> UpdateConsumerOffsetHeader:
    return UpdateConsumerOffsetHeader(
        consumer_group=group, topic=queue.topic, queue_id=queue.queue_id, commit_offset=offset
    )


def _one_message(queue: MessageQueue, offset: int) -> Wanted:
    return Wanted(
        READER_GROUP,
        queue,
        offset,
        Subscription(queue.topic),
        messages_max=1,
        record_bytes_max=1,
        suspend_timeout_ms=0,
    )
