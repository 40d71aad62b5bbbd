"""Requests that wait for a reply: messages whose sender gets an answer from their consumer."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import anyio
import msgspec

from headrace.errors import HeadraceError, InvalidMessage, NoReply
from headrace.messages import PROPERTIES_BYTES_MAX, encoded
from headrace.names import check_topic
from headrace.received import ReceivedMessage
from headrace.tasks import gather
from headrace.telemetry import ended
from headrace.values import now_ms
from headrace_protocol import message as record
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import PushReplyHeader
from headrace_protocol.message_ids import encode_host
from headrace_protocol.system_topics import reply_topic

if TYPE_CHECKING:
    from headrace.instance import ClientInstance
    from headrace.messages import Message
    from headrace.producer.sender import Sender
    from headrace_protocol.connection import RequestReceived
    from headrace_protocol.drivers.aio import AsyncConnection

_log = logging.getLogger("headrace.client")

# Interval at which a waiting requester checks its connections to all brokers.
_LOOK_S: Final = 1.0
_PORTS: Final = 1 << 16
_SHOWN_CHARS: Final = 60


class _Waiting:
    """A request whose reply has not come."""

    __slots__ = ("arrived", "reply")

    def __init__(self) -> None:
        self.arrived = anyio.Event()
        self.reply: ReceivedMessage | None = None


class Requests:
    """The requests of a producer that wait for their replies, by correlation id.

    late_count: number of replies that came when nobody waited any more.
    """

    def __init__(self, instance: ClientInstance, sender: Sender) -> None:
        self.late_count = 0
        self._instance = instance
        self._sender = sender
        self._waiting: dict[str, _Waiting] = {}
        # The connections whose brokers know this client.
        self._known: dict[str, AsyncConnection] = {}
        self._looked_at: dict[str, float] = {}
        instance.handlers[RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT] = self._on_reply

    async def request(self, message: Message, timeout_s: float) -> ReceivedMessage:
        """See ``Producer.request``."""
        whole = encoded(message)
        correlation_id = os.urandom(16).hex()
        marks = record.encode_properties(
            {
                record.CORRELATION_ID: correlation_id,
                record.REPLY_TO_CLIENT: self._instance.client_id,
                record.TTL: str(round(timeout_s * 1000)),
            }
        )
        room = PROPERTIES_BYTES_MAX - len(marks)
        if len(whole.properties) > room:
            raise InvalidMessage(
                f"properties of {len(whole.properties)} bytes for {whole.topic}: at most {room} "
                "fit in a request; put large values into the body"
            )
        whole = msgspec.structs.replace(whole, properties=whole.properties + marks)
        waiting = self._waiting[correlation_id] = _Waiting()
        is_sent = False
        try:
            with anyio.move_on_after(timeout_s):
                await self._connect(whole.topic)
                outgoing, span = self._sender.encode(whole)
                send = self._sender.send(whole.topic, self._sender.by_key(whole.key), outgoing)
                await ended(span, send)
                is_sent = True
                return await self._reply(waiting, whole.topic)
        finally:
            del self._waiting[correlation_id]
        raise NoReply(whole.topic, timeout_s, is_sent=is_sent)

    async def _reply(self, waiting: _Waiting, topic: str) -> ReceivedMessage:
        while waiting.reply is None:
            with anyio.move_on_after(_LOOK_S):
                await waiting.arrived.wait()
            if waiting.reply is None:
                await self._connect(topic)
        return waiting.reply

    # -- connections -------------------------------------------------------------------------------

    async def _connect(self, topic: str) -> None:
        """Have every broker through which a reply may come know this client.

        A broker that is away is left out. Raises the errors of ``Sender.publication``.
        """
        now = anyio.current_time()
        if now < self._looked_at.get(topic, -_LOOK_S) + _LOOK_S:
            return
        self._looked_at[topic] = now
        route = (await self._sender.lasting_publication(topic)).route
        addresses = set(route.masters())
        for cluster in {each.cluster for each in route.data.broker_datas if each.cluster}:
            with suppress(HeadraceError):
                addresses.update((await self._instance.route(reply_topic(cluster))).masters())
        unknown = [each for each in addresses if not self._is_known(each)]
        await gather(self._introduce, unknown)

    def _is_known(self, address: str) -> bool:
        connection = self._instance.open_connection(address)
        return connection is not None and self._known.get(address) is connection

    async def _introduce(self, address: str) -> None:
        await self._instance.heartbeat([address])
        connection = self._instance.open_connection(address)
        if connection is not None:
            self._known[address] = connection

    # -- replies -----------------------------------------------------------------------------------

    def _on_reply(self, connection: AsyncConnection, request: RequestReceived) -> None:
        """Take a reply. Raises ValueError for a malformed one."""
        message = _message(request)
        correlation_id = message.stored.properties.get(record.CORRELATION_ID, "")
        waiting = self._waiting.get(correlation_id)
        if waiting is None or waiting.reply is not None:
            self.late_count += 1
            _log.info("dropped a reply that nobody waits for: %r", message)
        else:
            waiting.reply = message
            waiting.arrived.set()
        connection.respond(request, ResponseCode.SUCCESS)


def _message(request: RequestReceived) -> ReceivedMessage:
    header = request.command.header(PushReplyHeader)
    check_topic(header.topic)
    properties = f"{header.properties or ''}{record.ARRIVE_TIME}\x01{now_ms()}\x02"
    raw = record.encode_record(
        topic=header.topic,
        queue_id=header.queue_id,
        body=bytes(request.body),
        properties=properties.encode(),
        flag=header.flag,
        sys_flag=header.sys_flag,
        born_timestamp=header.born_timestamp,
        born_host=_host(header.born_host),
        store_timestamp=header.store_timestamp,
        store_host=_host(header.store_host),
        reconsume_times=header.reconsume_times or 0,
    )
    return ReceivedMessage.from_stored(record.decode_record(raw), "")


def _host(text: str) -> bytes:
    """The host in a push, which may have its name before a slash. Raises ValueError."""
    ip, _, digits = text.rpartition(":")
    port = record.decimal(digits.encode(), -1)
    if not 0 <= port < _PORTS:
        raise ValueError(f"host {text[:_SHOWN_CHARS]!r} has no port")
    return encode_host(ip.rpartition("/")[2].strip("[]"), port)
