"""Sends a message to a queue: encode, choose a queue, try, retry until the delivery timeout."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from headrace.errors import (
    BrokerError,
    HeadraceError,
    InvalidMessage,
    NoQueue,
    RouteNotFound,
)
from headrace.messages import PROPERTIES_BYTES_MAX, EncodedMessage, SendResult
from headrace.names import check_queue, check_topic
from headrace.producer.block import Block
from headrace.producer.encoding import DEFAULT_TOPIC_QUEUES, BulkOutgoing, Outgoing, Target
from headrace.producer.faults import BrokerFaults
from headrace.producer.publication import Publication
from headrace.producer.retries import Retries, refuses_blocks
from headrace.route import TopicRoute
from headrace.telemetry import ended
from headrace.values import now_ms
from headrace_protocol.codes import ResponseCode
from headrace_protocol.drivers.address import local_ip
from headrace_protocol.message import TRANSACTION_PREPARED
from headrace_protocol.message_ids import UniqKeyGenerator, encode_host
from headrace_protocol.system_topics import DEFAULT_TOPIC

if TYPE_CHECKING:
    from headrace.instance import ClientInstance
    from headrace.producer.block import Compression
    from headrace.telemetry import SendSpan
    from headrace_protocol.bodies import MessageQueue
    from headrace_protocol.drivers.aio import AsyncConnection

Choose = Callable[[Publication], Target]
AnyOutgoing = Outgoing | BulkOutgoing


class Sender:
    """The common part of ``send``, ``send_many`` and pipelines; its settings are Producer's."""

    def __init__(
        self,
        instance: ClientInstance,
        group: str,
        *,
        timeout_ms: float,
        delivery_timeout_ms: float,
        compression: Compression | None,
        is_traced: bool = True,
    ) -> None:
        self.instance = instance
        self.timeout_ms = timeout_ms
        self._delivery_timeout_s = delivery_timeout_ms / 1000
        self._is_traced = is_traced
        self.faults = BrokerFaults()
        self._group = group
        self.compression = compression
        self._publications: dict[str, Publication] = {}
        self._without_blocks: set[str] = set()
        ip = local_ip()
        self._born_host = encode_host(ip, 0)
        generator = UniqKeyGenerator(now_ms, os.getpid(), socket.inet_aton(ip), time.time_ns())
        self._new_message_id = generator.next

    def start_span(self, block: Block) -> SendSpan | None:
        """The span of a request, whose context its messages then carry; None without tracing."""
        tracing = self.instance.tracing
        return tracing.send(block) if tracing and self._is_traced else None

    def encode(self, message: EncodedMessage) -> tuple[Outgoing, SendSpan | None]:
        """Encode a message for any broker; the span to end with the outcome."""
        block = Block.of([message], self.compression)
        span = self.start_span(block)
        return block.for_any_broker(now_ms(), self._new_message_id), span

    async def send_half(self, whole: EncodedMessage, group: str) -> SendResult:
        """Store a message that waits for its transaction. Raises as ``Producer.send``."""
        marks = f"TRAN_MSG\x01true\x02PGROUP\x01{group}\x02".encode()
        room = PROPERTIES_BYTES_MAX - len(marks)
        if len(whole.properties) > room:
            raise InvalidMessage(
                f"properties of {len(whole.properties)} bytes for {whole.topic}: at most {room} "
                "fit in a transaction; put large values into the body"
            )
        half, span = self.encode(
            msgspec.structs.replace(whole, properties=whole.properties + marks)
        )
        half.sys_flag |= TRANSACTION_PREPARED
        return await ended(span, self.send(whole.topic, self.by_key(whole.key), half))

    def encode_block(self, block: Block, connection: AsyncConnection) -> AnyOutgoing:
        """Encode a block for the broker at the other end of the connection."""
        if len(block) > 1 and self.takes_blocks(connection):
            return block.for_headrace(now_ms(), self._born_host)
        return block.for_any_broker(now_ms(), self._new_message_id)

    def takes_blocks(self, connection: AsyncConnection) -> bool:
        """True if the broker at the other end accepts complete records."""
        return connection.peer_is_headrace and connection.address not in self._without_blocks

    async def connection(self, target: Target) -> AsyncConnection:
        """The connection to a queue's broker, whose kind (headrace or other) is then known."""
        connection = await self._open(target)
        if not connection.is_greeted:
            await connection.greeted(self.timeout_ms)
        return connection

    async def _open(self, target: Target) -> AsyncConnection:
        if target.error:
            raise target.error
        return await self.instance.connection(target.address)

    def by_key(self, key: bytes) -> Choose:
        """Choose the queue of a key in UTF-8, or the next queue if the key is empty."""
        return lambda publication: publication.target(key, self.faults.current())

    def to_queue(self, queue: MessageQueue) -> Choose:
        """Choose ``queue``. Raises ConfigurationError if it is none."""
        chosen = check_queue(queue)
        return lambda publication: publication.target_of(chosen)

    async def publication(self, topic: str) -> Publication:
        """The topic's publication. Raises InvalidMessage, RouteNotFound, NoQueue, ..."""
        known = self._publications.get(topic)
        if known and known.route.is_current:
            return known
        check_topic(topic)
        route = await self._route(topic)
        known = self._publications.get(topic)
        if known is None or known.route is not route:
            known = self._publications[topic] = Publication(self._group, route)
        return known

    async def _route(self, topic: str) -> TopicRoute:
        try:
            return await self.instance.route(topic)
        except RouteNotFound as not_found:
            try:
                default = await self.instance.fetch_route(DEFAULT_TOPIC)
            except RouteNotFound:
                raise not_found from None
            # A broker that came back between the two requests has both topics. Treating the topic
            # as new would assume other queues, and the message would overtake waiting ones.
            with suppress(RouteNotFound):
                return await self.instance.route(topic)
            return _route_of_new_topic(topic, default)

    async def send(self, topic: str, choose: Choose, what: Outgoing | Block) -> SendResult:
        """Try until the broker has stored it. Raises the error of the last attempt."""
        try:
            return await self.attempt(topic, choose, what)
        except HeadraceError as failure:
            error = failure
        return await self.retry(topic, choose, what, error)

    async def retry(
        self, topic: str, choose: Choose, what: Outgoing | Block, error: HeadraceError
    ) -> SendResult:
        """Make the attempts after the first one, which failed with ``error``."""
        retries = self.retries(topic)
        await retries.pause_after(error)
        return await retries.run(partial(self.attempt, topic, choose, what))

    def retries(self, topic: str, *, age_s: float = 0.0) -> Retries:
        """The retries of a request whose newest message was accepted ``age_s`` ago."""
        return Retries(self.instance, topic, self._delivery_timeout_s - age_s)

    async def lasting_publication(self, topic: str) -> Publication:
        """The topic's publication, with retries. Raises the errors of ``publication``."""
        return await self.retries(topic).run(partial(self.publication, topic))

    async def target(self, topic: str, choose: Choose) -> Target:
        """The target to send to, with retries. Raises the errors of ``publication``."""

        async def find() -> Target:
            return choose(await self.publication(topic))

        return await self.retries(topic).run(find)

    async def attempt(self, topic: str, choose: Choose, what: Outgoing | Block) -> SendResult:
        """Try once. Raises HeadraceError."""
        publication = await self.publication(topic)
        creates_topic = not publication.route.is_current
        target = choose(publication)
        try:
            result = await self._send_to(target, what)
        except HeadraceError as error:
            self.note_failure(target, error)
            raise
        self.instance.outages.answered(topic, target.address)
        if creates_topic:
            await self.instance.wait_for_route(topic)
        return result

    async def _send_to(self, target: Target, what: Outgoing | Block) -> SendResult:
        connection, outgoing = await self.prepare(target, what)
        answer = connection.begin_encoded(outgoing.code(target), partial(outgoing.frame, target))
        return outgoing.result(target, await answer.response(self.timeout_ms))

    async def prepare(
        self, target: Target, what: Outgoing | Block
    ) -> tuple[AsyncConnection, AnyOutgoing]:
        """The connection to use, and the encoded request. Raises ConnectFailed, ..."""
        if isinstance(what, Outgoing):
            return await self._open(target), what
        connection = await self.connection(target)
        return connection, self.encode_block(what, connection)

    def note_failure(self, target: Target, error: HeadraceError) -> None:
        """React to an error: avoid the broker, invalidate the route or stop sending it blocks."""
        if refuses_blocks(error):
            self._without_blocks.add(target.address)
        if error.retryable and not _is_of_queue(error):
            self.faults.failed(target.broker_name)
        if error.refresh_route:
            self.instance.invalidate_route(target.queue.topic)


def _is_of_queue(error: HeadraceError) -> bool:
    """True if only the queue is unavailable, not all queues of the broker."""
    if isinstance(error, BrokerError):
        return error.code == ResponseCode.NOT_LEADER_FOR_QUEUE
    return isinstance(error, NoQueue)


def _route_of_new_topic(topic: str, default: TopicRoute) -> TopicRoute:
    """The queues that a broker will create for ``topic``; the next use fetches the real route."""
    parts = [
        msgspec.structs.replace(
            part, write_queue_nums=min(part.write_queue_nums, DEFAULT_TOPIC_QUEUES)
        )
        for part in default.data.queue_datas
    ]
    data = msgspec.structs.replace(default.data, queue_datas=parts)
    route = TopicRoute(topic, data, default.fetched_at)
    route.is_current = False
    return route
