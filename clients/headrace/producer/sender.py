"""How a message gets onto a queue: encode, choose a queue, try, try elsewhere."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import anyio
import msgspec

from headrace.errors import HeadraceError, RouteNotFound
from headrace.instance import ClientInstance, local_ip
from headrace.messages import Message, SendResult, check_topic
from headrace.producer.encoding import DEFAULT_TOPIC, DEFAULT_TOPIC_QUEUES, Outgoing
from headrace.producer.faults import BrokerFaults
from headrace.producer.publication import Publication, Target
from headrace.route import TopicRoute
from headrace_protocol.codes import ResponseCode
from headrace_protocol.headers import SendMessageResponseHeader
from headrace_protocol.message import UniqKeyGenerator, compress

if TYPE_CHECKING:
    from headrace_protocol.bodies import MessageQueue
    from headrace_protocol.drivers.response import Response

# The message is stored in each of these cases; the last three say what it still lacks.
STORED = frozenset(
    {
        ResponseCode.SUCCESS,
        ResponseCode.FLUSH_DISK_TIMEOUT,
        ResponseCode.FLUSH_SLAVE_TIMEOUT,
        ResponseCode.SLAVE_NOT_AVAILABLE,
    }
)
_RETRY_PAUSE_S = 0.05

Choose = Callable[[Publication], Target]


class Sender:
    """What ``send``, ``send_many`` and pipelines share. Its settings are Producer's."""

    def __init__(
        self,
        instance: ClientInstance,
        group: str,
        *,
        timeout_ms: float,
        retries: int,
        compress_from_bytes: int | None,
    ) -> None:
        self.instance = instance
        self.timeout_ms = timeout_ms
        self.retries = retries
        self.faults = BrokerFaults()
        self._group = group
        self._compress_from_bytes = compress_from_bytes
        self._publications: dict[str, Publication] = {}
        ip = socket.inet_aton(local_ip())
        self.new_message_id = UniqKeyGenerator(now_ms, os.getpid(), ip, time.time_ns()).next

    def encode(self, message: Message) -> Outgoing:
        """A message in the form that goes over the wire. Raises InvalidMessage."""
        message.check()
        body, sys_flag = message.body, 0
        if self._compress_from_bytes is not None and len(body) >= self._compress_from_bytes:
            body, sys_flag = compress(body)
        message_id = self.new_message_id()
        return Outgoing(body, sys_flag, now_ms(), message.properties_text(message_id), message_id)

    def by_key(self, key: str) -> Choose:
        """The choice of a key's queue, or of the next queue without a key."""
        return lambda publication: publication.target(key, self.faults)

    def to_queue(self, queue: MessageQueue) -> Choose:
        """The choice of ``queue``."""
        return lambda publication: publication.target_of(queue)

    def publication_now(self, topic: str) -> Publication | None:
        """The topic's publication if it is known and nobody doubts it."""
        publication = self._publications.get(topic)
        return publication if publication and publication.route.is_current else None

    async def publication(self, topic: str) -> Publication:
        """The topic's publication. Raises InvalidMessage, RouteNotFound, NoQueue, ..."""
        current = self.publication_now(topic)
        if current:
            return current
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
            return _route_of_new_topic(topic, default)

    async def send(
        self,
        topic: str,
        choose: Choose,
        outgoing: Outgoing,
        *,
        attempts: int | None = None,
    ) -> SendResult:
        """Try until it is stored. Raises the error of the last attempt."""
        attempts = self.retries + 1 if attempts is None else attempts
        for attempt in range(1, attempts + 1):
            try:
                return await self._attempt(topic, choose, outgoing)
            except HeadraceError as error:
                if attempt == attempts or not error.retryable:
                    raise
                if error.refresh_route:
                    self.instance.doubt_route(topic)
            await anyio.sleep(_RETRY_PAUSE_S * attempt)
        raise AssertionError("there is at least one attempt")

    async def _attempt(self, topic: str, choose: Choose, outgoing: Outgoing) -> SendResult:
        publication = await self.publication(topic)
        target = choose(publication)
        try:
            result = await self._send_to(target, outgoing)
        except HeadraceError as error:
            self.note_failure(target, error)
            raise
        await self.wait_for_topic(publication)
        return result

    async def wait_for_topic(self, publication: Publication) -> None:
        """After a send: if it made its topic, wait until the nameservers know the topic."""
        if not publication.route.is_current:
            await self.instance.wait_for_route(publication.route.topic)

    async def _send_to(self, target: Target, outgoing: Outgoing) -> SendResult:
        template = target.batch if outgoing.is_batch else target.single
        connection = await self.instance.connection(target.address)
        response = await connection.request_encoded(
            template.code, partial(template.frame, outgoing), timeout_ms=self.timeout_ms
        )
        return send_result(target, outgoing, response)

    def note_failure(self, target: Target, error: HeadraceError) -> None:
        """Avoid the broker that failed, and doubt the route if the error says so."""
        if error.retryable:
            self.faults.failed(target.queue.broker_name)
        if error.refresh_route:
            self.instance.doubt_route(target.queue.topic)


def now_ms() -> int:
    """The wall clock, in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def send_result(target: Target, outgoing: Outgoing, response: Response) -> SendResult:
    """The result in a broker's response. Raises BrokerError unless the message is stored."""
    header = response.expect(*STORED).header(SendMessageResponseHeader)
    return SendResult(
        queue=target.queue,
        queue_offset=header.queue_offset,
        message_id=outgoing.message_id,
        offset_message_id=header.msg_id,
        status=ResponseCode(response.command.code),
        message_count=outgoing.message_count,
    )


def _route_of_new_topic(topic: str, default: TopicRoute) -> TopicRoute:
    """The queues that a broker will make for ``topic``; the real route is asked for next time."""
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
