"""Producer: sends messages to brokers one by one, in batches or in a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, Self, Unpack

from headrace.config import check_callback, check_limits, check_plain_callback, check_time
from headrace.errors import ConfigurationError, HeadraceError, RecallRejected
from headrace.instance import ClientInstance
from headrace.lifecycle import Startable
from headrace.messages import Message, SendResult, encoded
from headrace.names import check_group, check_topic
from headrace.producer.block import Compression
from headrace.producer.pipeline import Pipeline
from headrace.producer.requests import Requests
from headrace.producer.sender import Sender
from headrace.producer.sources import Source, Texts, chunks
from headrace.producer.transaction import Checks, OnCheck, Transaction
from headrace.producer.window import Window
from headrace.recall import recall
from headrace.telemetry import ended
from headrace.trace_start import start_traces
from headrace.values import shown
from headrace_protocol.codes import RequestCode
from headrace_protocol.command import FLAG_ONEWAY
from headrace_protocol.compression import CodecMissing, codec
from headrace_protocol.recall_handle import decode_recall_handle

if TYPE_CHECKING:
    from headrace.config import ConnectOptions
    from headrace.received import ReceivedMessage
    from headrace_protocol.bodies import MessageQueue
    from headrace_protocol.drivers.aio import Connect

# As long as the restart of a broker with a large store may take.
DELIVERY_TIMEOUT_MS = 30_000

OnResult = Callable[[Message, SendResult | HeadraceError], None]


class Producer(Startable):
    """Sends messages; use it in an ``async with`` block, or ``start`` and ``stop`` it.

    group: name under which brokers know this kind of producer.
    nameserver: see ``config.resolve_nameservers``.
    timeout_ms: time limit of one attempt.
    delivery_timeout_ms: how long retryable errors are retried, with pauses that grow up to a
        second; 0 makes a single attempt. A retry after a timeout can store a message twice: brokers
        do not detect duplicates.
    compress_from_bytes: compress bodies of this size and more; None disables compression.
    compression: "zlib", which every consumer reads, "lz4" or "zstd", which need packages of the
        same name (lz4, zstandard) here and at our consumers.
    on_check: ``async def on_check(message: ReceivedMessage) -> bool | None``, asked by brokers
        about transactions of the group, also those of other processes, that nobody decided.
        Returns True to commit the message, False to roll it back, None to be asked again later.

    Messages with a key stay on the key's queue, even in retries; others go to the queues in turn,
    skipping brokers that failed recently. A broker creates a missing topic if its settings allow
    that.
    """

    def __init__(
        self,
        group: str = "headrace_producer",
        *,
        nameserver: str | Sequence[str] | None = None,
        timeout_ms: float = 3000,
        delivery_timeout_ms: float = DELIVERY_TIMEOUT_MS,
        compress_from_bytes: int | None = 4096,
        compression: Literal["zlib", "lz4", "zstd"] = "zlib",
        on_check: OnCheck | None = None,
        connect: Connect | None = None,
        **how: Unpack[ConnectOptions],
    ) -> None:
        group = check_group(group)
        check_callback("on_check", on_check)
        check_limits(timeout_ms=timeout_ms)
        check_limits(
            0, delivery_timeout_ms=delivery_timeout_ms, compress_from_bytes=compress_from_bytes
        )
        self.group = group
        self._instance = ClientInstance(nameserver, connect=connect, how=how, producer_group=group)
        self._sender = Sender(
            self._instance,
            group,
            timeout_ms=timeout_ms,
            delivery_timeout_ms=delivery_timeout_ms,
            compression=_compression(compress_from_bytes, compression),
        )

        self._requests = Requests(self._instance, self._sender)
        self._checks = Checks(group, on_check) if on_check else None
        if self._checks:
            handlers = self._instance.handlers
            handlers[RequestCode.CHECK_TRANSACTION_STATE] = self._checks.asked

    async def __aenter__(self) -> Self:
        tasks = await self._instance.start()
        start_traces(self._instance, tasks)
        if self._checks:
            self._checks.tasks = tasks
            self._checks.traces = self._instance.traces
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._instance.stop()

    async def send(self, message: Message, *, queue: MessageQueue | None = None) -> SendResult:
        """Store one message; return where it was stored.

        queue: the queue to use, instead of the key's or the next one.
        Raises InvalidMessage, RouteNotFound, or the error of the last attempt.
        """
        self._instance.check_open("Producer")
        sender = self._sender
        whole = encoded(message)
        choose = sender.by_key(whole.key) if queue is None else sender.to_queue(queue)
        outgoing, span = sender.encode(whole)
        return await ended(span, sender.send(whole.topic, choose, outgoing))

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

        messages: Message objects; or bodies as bytes, together with ``topic`` and optionally one
            key and tag per body in ``keys`` and ``tags``; or an Arrow table (or anything pyarrow
            can convert to one: polars, DuckDB, ...) with the column value and optionally key, tag
            and topic (unless ``topic`` is given). Messages are read while sending, so they need
            not fit in memory.
        queue: send all messages to this queue.

        Messages with keys go to their keys' queues; others go to the queues in turn, about one
        MiB at a time. Each queue keeps the order of ``messages``. When a request finally fails, its
        error is raised; later requests may be stored in other queues, but not in the same queue.
        Raises the errors of ``send``, and InvalidMessage for delayed messages (send them singly).
        """
        self._instance.check_open("Producer")
        source = chunks(messages, topic, keys, tags)
        with Window(self._sender) as window:
            while True:
                try:
                    chunk = next(source, None)
                except Exception:
                    # A bad message, or an error of the iterable, costs no message before it.
                    await window.finish()
                    raise
                if chunk is None:
                    break
                await window.send(chunk, queue)
            await window.finish()
            return window.results

    async def send_oneway(self, message: Message) -> None:
        """Send without waiting for confirmation: fast, but the message may be lost."""
        self._instance.check_open("Producer")
        whole = encoded(message)
        publication = await self._sender.lasting_publication(whole.topic)
        target = self._sender.by_key(whole.key)(publication)
        connection = await self._sender.connection(target)
        outgoing, span = self._sender.encode(whole)
        connection.send_soon(*target.single.frame(outgoing, 0, FLAG_ONEWAY))
        if span:
            span.end(None)
        if not publication.route.is_current:
            await self._instance.wait_for_route(whole.topic)

    async def request(self, message: Message, *, timeout: float = 3.0) -> ReceivedMessage:
        """Send a message, and wait for the reply of the consumer that handles it.

        timeout: seconds until the reply must be here, from the call on. ``message.reply`` of a
            consumer, or a replier written with RocketMQ's client, answers; the first reply counts.
        Raises NoReply, after which the message may still be handled, and the errors of ``send``.
        """
        self._instance.check_open("Producer")
        check_time(0.001, timeout=timeout)
        return await self._requests.request(message, timeout)

    @property
    def late_replies(self) -> int:
        """Number of replies that were dropped because no ``request`` waited for them any more."""
        return self._requests.late_count

    async def recall(self, sent: SendResult) -> None:
        """Recall a message with ``delay`` or ``deliver_at`` before it is delivered.

        Raises RecallRejected if it is too late, or if the broker recalls no messages, and
        ConfigurationError for a message without time of delivery.
        """
        self._instance.check_open("Producer")
        if sent.recall_handle is None:
            raise ConfigurationError(
                f"message {sent.message_id} cannot be recalled: it was sent without delay= and "
                "deliver_at=, or its broker gave no handle to recall it with"
            )
        queue = sent.queue
        # A static topic's queue may have another broker by now.
        handle = decode_recall_handle(sent.recall_handle)
        broker = handle.broker_name if handle else queue.broker_name
        address = await self._instance.broker_address(queue.topic, broker)
        try:
            await recall(self._instance, address, queue.topic, sent.recall_handle, self.group)
        except RecallRejected:
            self._trace_recall(sent, success=False)
            raise
        self._trace_recall(sent, success=True)

    def _trace_recall(self, sent: SendResult, *, success: bool) -> None:
        if self._instance.traces:
            self._instance.traces.recalled(sent.queue.topic, sent.message_id, success=success)

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
        check_plain_callback("on_result", on_result)
        return Pipeline(self._sender, max_in_flight, max_bytes, on_result)

    def transaction(self, topic: str) -> Transaction:
        """Messages to a topic that consumers get at the end of a block; see ``Transaction``."""
        self._instance.check_open("Producer")
        return Transaction(self._sender, self.group, check_topic(topic))

    async def queues(self, topic: str) -> Sequence[MessageQueue]:
        """The currently writable queues of ``topic``. Raises RouteNotFound."""
        self._instance.check_open("Producer")
        return (await self._instance.route(topic)).write_queues


def _compression(from_bytes: int | None, name: str) -> Compression | None:
    """Raises ConfigurationError for an unknown codec, or one without its package."""
    try:
        found = codec(name)
    except CodecMissing as error:
        raise ConfigurationError(str(error)) from error
    except (KeyError, TypeError):
        raise ConfigurationError(
            f"compression={shown(name)}: must be 'zlib', 'lz4' or 'zstd'"
        ) from None
    return None if from_bytes is None else Compression(from_bytes, found)
