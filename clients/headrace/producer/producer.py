"""Producer: messages to brokers, one by one, in batches, or in a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self

from headrace.config import check_limits
from headrace.errors import HeadraceError
from headrace.instance import ClientInstance
from headrace.messages import Message, SendResult, check_group
from headrace.producer.pipeline import Pipeline
from headrace.producer.sender import Sender
from headrace.producer.sources import Source, Texts, chunks
from headrace.producer.window import Window
from headrace_protocol.drivers.aio import Connect, connect_tcp

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
        check_limits(timeout_ms=timeout_ms)
        check_limits(0, retries=retries, compress_from_bytes=compress_from_bytes)
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

    async def send_many(
        self,
        messages: Source,
        *,
        topic: str | None = None,
        keys: Texts = None,
        tags: Texts = None,
        queue: MessageQueue | None = None,
    ) -> list[SendResult]:
        """Store messages in as few requests as possible; one result per request.

        messages: Message objects; or bodies as bytes, with ``topic`` and, one for each, ``keys``
            and ``tags``; or an Arrow table (or what pyarrow makes one of: polars, DuckDB, ...)
            with the column value, key, tag and topic (or ``topic``). All are read as they are
            sent, so they may be more than fit in memory.
        queue: put all there.

        Messages with keys go to their keys' queues, others about half a MiB at a time to the
        queues in turn. The order within a queue is that of ``messages``. When a request fails for
        good its error is raised; later ones may be stored in other queues, and are not in its own.
        Raises what ``send`` does, and InvalidMessage for delayed messages (send them singly).
        """
        self._instance.check_open("Producer")
        with Window(self._sender) as window:
            for chunk in chunks(messages, topic, keys, tags):
                await window.send(chunk, queue)
            await window.finish()
            return window.results

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
        max_in_flight: int = 10_000,
        max_bytes: int = 16 * 1024 * 1024,
        on_result: OnResult | None = None,
    ) -> Pipeline:
        """Send many messages without waiting for each; see ``Pipeline``."""
        self._instance.check_open("Producer")
        check_limits(max_in_flight=max_in_flight, max_bytes=max_bytes)
        return Pipeline(self._sender, max_in_flight, max_bytes, on_result)

    async def queues(self, topic: str) -> Sequence[MessageQueue]:
        """The queues of ``topic`` that can be written now. Raises RouteNotFound."""
        self._instance.check_open("Producer")
        return (await self._instance.route(topic)).write_queues
