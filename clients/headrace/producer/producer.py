"""Producer: messages to brokers, one by one, in batches, or in a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Self

from headrace.errors import HeadraceError, InvalidMessage
from headrace.instance import ClientInstance
from headrace.messages import BODY_BYTES_MAX, Message, SendResult, check_group
from headrace.producer.encoding import Outgoing
from headrace.producer.pipeline import Pipeline
from headrace.producer.sender import Sender, now_ms
from headrace_protocol.drivers.aio import Connect, connect_tcp
from headrace_protocol.message import BATCH_ITEM_HEAD, encode_batch

if TYPE_CHECKING:
    from headrace_protocol.bodies import MessageQueue

OnResult = Callable[[Message, SendResult | HeadraceError], None]


class Producer:
    """Sends messages; use it in an ``async with`` block, under trio or asyncio.

    group: name under which brokers know producers of this kind.
    nameserver: see ``config.resolve_nameservers``.
    timeout_ms: how long one attempt may take.
    retries: attempts after the first one, where the error says that another may succeed. A retry
        after a timeout can store a message twice: brokers do not recognise doubles.
    compress_from_bytes: bodies of this size and more are compressed (zlib); None never does.

    Messages with a key stay on the key's queue, also in retries; others go to the queues in turn,
    leaving out brokers that failed a moment ago. A topic that does not exist is made by the
    broker if its settings allow that.
    """

    def __init__(
        self,
        group: str = "headrace_producer",
        *,
        nameserver: str | Sequence[str] | None = None,
        timeout_ms: float = 3000,
        retries: int = 2,
        compress_from_bytes: int | None = 4096,
        connect: Connect = connect_tcp,
    ) -> None:
        check_group(group)
        self.group = group
        self._instance = ClientInstance(nameserver, connect=connect, producer_group=group)
        self._sender = Sender(
            self._instance,
            group,
            timeout_ms=timeout_ms,
            retries=retries,
            compress_from_bytes=compress_from_bytes,
        )

    async def __aenter__(self) -> Self:
        await self._instance.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._instance.stop()

    async def send(self, message: Message, *, queue: MessageQueue | None = None) -> SendResult:
        """Store one message and say where it is.

        queue: put it there instead of where its key or the turn says.
        Raises InvalidMessage, RouteNotFound, or the error of the last attempt.
        """
        self._instance.check_open("Producer")
        sender = self._sender
        choose = sender.by_key(message.key) if queue is None else sender.to_queue(queue)
        return await sender.send(message.topic, choose, sender.encode(message))

    async def send_many(self, messages: Iterable[Message]) -> list[SendResult]:
        """Store messages in as few requests as possible; one result per request.

        Messages with keys go to their keys' queues, the others of a topic together to one queue;
        a request holds up to 4 MiB. The order within a queue is that of ``messages``.
        When a request fails for good its error is raised, and the later ones are not sent.
        Raises what ``send`` does, and InvalidMessage for delayed messages (send them singly).
        """
        self._instance.check_open("Producer")
        batches: dict[tuple[str, MessageQueue | None], list[Message]] = {}
        for message in messages:
            queue = await self._queue_of(message) if message.key else None
            batches.setdefault((message.topic, queue), []).append(message)
        results: list[SendResult] = []
        for (topic, queue), batch in batches.items():
            results += await self._send_batch(topic, queue, batch)
        return results

    async def send_oneway(self, message: Message) -> None:
        """Send without asking whether it was stored: fast, and it may be lost."""
        self._instance.check_open("Producer")
        outgoing = self._sender.encode(message)
        publication = await self._sender.publication(message.topic)
        target = self._sender.by_key(message.key)(publication)
        connection = await self._instance.connection(target.address)
        connection.send_soon(*target.single.oneway_frame(outgoing))
        await self._sender.wait_for_topic(publication)

    def pipeline(
        self,
        *,
        max_in_flight: int = 1000,
        max_bytes: int = 16 * 1024 * 1024,
        on_result: OnResult | None = None,
    ) -> Pipeline:
        """Send many messages without waiting for each; see ``Pipeline``."""
        self._instance.check_open("Producer")
        return Pipeline(self._sender, max_in_flight, max_bytes, on_result)

    async def queues(self, topic: str) -> Sequence[MessageQueue]:
        """The queues of ``topic`` that can be written now. Raises RouteNotFound."""
        self._instance.check_open("Producer")
        return (await self._instance.route(topic)).write_queues

    async def _queue_of(self, message: Message) -> MessageQueue:
        publication = await self._sender.publication(message.topic)
        return self._sender.by_key(message.key)(publication).queue

    async def _send_batch(
        self, topic: str, queue: MessageQueue | None, messages: list[Message]
    ) -> list[SendResult]:
        sender = self._sender
        batches = _pack(messages, sender.new_message_id)
        if queue is None and len(batches) > 1:
            # All parts to one queue, so that their order is the messages'.
            queue = sender.by_key("")(await sender.publication(topic)).queue
        choose = sender.by_key("") if queue is None else sender.to_queue(queue)
        return [await sender.send(topic, choose, batch) for batch in batches]


def _pack(messages: list[Message], new_message_id: Callable[[], str]) -> list[Outgoing]:
    """The messages in as few batches as the size limit allows. Raises InvalidMessage."""
    batches = [_Batch()]
    for message in messages:
        message.check()
        if message.delay_level:
            raise InvalidMessage(f"a delayed message for {message.topic}: send it singly")
        message_id = new_message_id()
        properties = message.properties_text(message_id).encode()
        if not batches[-1].has_room_for(message.body, properties):
            batches.append(_Batch())
        batches[-1].add(message.body, properties, message_id)
    return [batch.outgoing() for batch in batches if batch.items]


class _Batch:
    """Messages for one request."""

    def __init__(self) -> None:
        self.items: list[tuple[int, bytes, bytes]] = []
        self._ids: list[str] = []
        self._bytes = 0

    def has_room_for(self, body: bytes, properties: bytes) -> bool:
        return not self.items or self._bytes + _item_bytes(body, properties) <= BODY_BYTES_MAX

    def add(self, body: bytes, properties: bytes, message_id: str) -> None:
        self.items.append((0, body, properties))
        self._ids.append(message_id)
        self._bytes += _item_bytes(body, properties)

    def outgoing(self) -> Outgoing:
        body, ids = encode_batch(self.items), ",".join(self._ids)
        return Outgoing(body, 0, now_ms(), "", ids, len(self.items), is_batch=True)


def _item_bytes(body: bytes, properties: bytes) -> int:
    return BATCH_ITEM_HEAD.size + len(body) + 2 + len(properties)
