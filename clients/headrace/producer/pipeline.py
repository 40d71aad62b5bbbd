"""A pipeline: many messages in flight without a task, an event or a request for each."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Self

import anyio
import anyio.lowlevel

from headrace.errors import (
    BrokerError,
    ClientClosed,
    ConnectFailed,
    ConnectionLost,
    HeadraceError,
    InvalidMessage,
    NoQueue,
    OutcomeUnknown,
    PipelineError,
)
from headrace.lifecycle import Startable
from headrace.messages import BODY_BYTES_MAX, no_message
from headrace.names import takes_batches
from headrace.producer.backlogs import Backlog, Outlet, TopicBacklogs
from headrace.producer.block import Block
from headrace.producer.pipeline_request import Request
from headrace.producer.retries import is_retryable
from headrace.producer.selector import queue_index
from headrace.tasks import Background
from headrace_protocol.codes import ResponseCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from anyio.abc import TaskGroup

    from headrace.messages import EncodedMessage, Message, SendResult
    from headrace.producer.encoding import Target
    from headrace.producer.publication import Publication
    from headrace.producer.retries import Retries
    from headrace.producer.sender import Sender
    from headrace.telemetry import SendSpan, Tracing
    from headrace_protocol.bodies import MessageQueue
    from headrace_protocol.drivers.aio import AsyncConnection
    from headrace_protocol.drivers.response import Response

_log = logging.getLogger("headrace.producer")

_TICKS_PER_TIMEOUT = 4
# ``send`` yields to the event loop after so many bytes, so that sending starts before the pipeline
# is full.
_YIELD_BYTES = 128 * 1024
_YIELDS_PER_FULL = 4


class Pipeline(Startable):
    """Sends without waiting for each response.

    Use it in ``async with``, or ``start`` and ``stop`` it.

    ``await send(message)`` accepts a message, and waits only while ``max_in_flight`` messages or
    ``max_bytes`` of bodies are in flight. Once a broker can take a request, all messages waiting
    for a queue are sent to it in one request; no message waits for others to arrive. Each queue
    has one request in flight, so the messages of a key stay in order, even in retries, which
    follow the rules of ``Producer.send``; the delivery timeout of messages that are sent together
    runs from the newest one. Messages without a key collect for one queue until they are sent, then
    for the next. Leaving the block waits for all responses; leaving it with an exception does not,
    and discards messages that were not sent yet.

    on_result(message, result or error) is called once with the outcome of each message given to
    ``send``, which then raises no error of a message; if the block is left with an exception, the
    remaining messages get OutcomeUnknown. What ``on_result`` itself raises is raised by the next
    ``send`` or at the end of the block, and costs no other message: those that were accepted are
    still sent and reported. Without it, the first message that finally fails ends the pipeline:
    ``send`` raises its error, or PipelineError, as does leaving the block.
    """

    def __init__(
        self,
        sender: Sender,
        max_in_flight: int,
        max_bytes: int,
        on_result: Callable[[Message, SendResult | HeadraceError], None] | None,
    ) -> None:
        self._sender = sender
        self._max_in_flight = max_in_flight
        self._max_bytes = max_bytes
        self._on_result = on_result
        self._topics: dict[str, TopicBacklogs] = {}
        self._backlogs: dict[MessageQueue, Backlog] = {}
        self._outlets: dict[str, Outlet] = {}
        # In the order of sending, which is the order of their deadlines.
        self._in_flight: dict[Request, None] = {}
        self._retrying: dict[Request, None] = {}
        self._tick = 0
        self._tick_s = sender.timeout_ms / 1000 / _TICKS_PER_TIMEOUT
        # Totals of messages accepted and done; ``send`` pauses once the first reach the third.
        self._put_count = self._put_bytes = 0
        self._done_count = self._done_bytes = 0
        self._pause_count = self._pause_bytes = 0
        self._failures: list[tuple[Message, HeadraceError]] = []
        # The first error of ``on_result`` that no call has raised yet; the last that one raised.
        self._callback_error: Exception | None = None
        self._more_callback_errors = 0
        self._raised: Exception | None = None
        self._progress: anyio.Event | None = None
        self._tracing: Tracing | None = None
        self._background = Background()
        self._tasks: TaskGroup | None = None

    async def __aenter__(self) -> Self:
        tracing = self._sender.instance.tracing
        self._tracing = tracing.of_block() if tracing else None
        self._tasks = await self._background.start()
        self._tasks.start_soon(self._watch_deadlines)
        return self

    async def __aexit__(
        self,
        error_type: type[BaseException] | None = None,
        *details: object,
    ) -> None:
        try:
            if error_type is None:
                await self.flush()
            elif self._raised in details:
                await self._drain()
        finally:
            self._tasks = None
            unsent = self._forget_all()
            await self._background.stop()
            self._report_unknown(unsent)
            if self._callback_error:
                _log.error("on_result failed", exc_info=self._taken_callback_error())

    async def send(self, message: Message) -> None:
        """Accept a message for sending; if this call is cancelled, the message is not sent.

        The message is copied, so the program may change it afterwards.

        Without ``on_result``, raises InvalidMessage, RouteNotFound, ..., and PipelineError if an
        earlier message has failed. With it, raises what it raised for an earlier message.
        """
        try:
            whole = message.encoded()
        except InvalidMessage as error:
            self._refuse(message, error)
            return
        except AttributeError as error:
            self._refuse(message, no_message(message, error))
            return
        if self._put_count >= self._pause_count or self._put_bytes >= self._pause_bytes:
            await self._pause()
        topic = self._topics.get(whole.topic)
        if topic and topic.publication.route.is_current:
            backlog = topic.backlog_of(whole)
            if backlog.messages or backlog.outlet.is_open or backlog.is_busy:
                self._put_count += 1
                self._put_bytes += len(whole.body)
                backlog.put(whole)
                return
        await self._put_first(whole)

    async def send_all(self, messages: Iterable[Message]) -> None:
        """Call ``send`` for each message."""
        for message in messages:
            await self.send(message)

    async def flush(self) -> None:
        """Wait until no message is in flight. Raises PipelineError if one has failed.

        Raises what ``on_result`` raised, if no ``send`` has.
        """
        await self._drain()
        self._raise_errors()

    async def _drain(self) -> None:
        while self._done_count < self._put_count:
            await self._wait_for_progress()

    def _raise_errors(self) -> None:
        if self._callback_error:
            self._raised = self._taken_callback_error()
            raise self._raised
        if self._failures:
            raise PipelineError(self._failures)

    # -- waiting -----------------------------------------------------------------------------------

    async def _pause(self) -> None:
        """Let other tasks run, and wait while the pipeline is full.

        Raises ClientClosed outside the block, PipelineError, or what ``on_result`` raised.
        """
        if self._tasks is None:
            raise ClientClosed("producer.pipeline")
        self._sender.instance.check_open("producer.pipeline")
        if not self._is_full():
            await anyio.lowlevel.checkpoint()
        while self._is_full():
            await self._wait_for_progress()
        self._raise_errors()
        yield_count = max(1, self._max_in_flight // _YIELDS_PER_FULL)
        self._pause_count = min(
            self._put_count + yield_count, self._done_count + self._max_in_flight
        )
        self._pause_bytes = min(self._put_bytes + _YIELD_BYTES, self._done_bytes + self._max_bytes)

    def _is_full(self) -> bool:
        return (
            self._put_count - self._done_count >= self._max_in_flight
            or self._put_bytes - self._done_bytes >= self._max_bytes
        )

    async def _wait_for_progress(self) -> None:
        self._progress = self._progress or anyio.Event()
        await self._progress.wait()

    # -- sending -----------------------------------------------------------------------------------

    async def _put_first(self, message: EncodedMessage) -> None:
        """Accept a message whose topic has no route or whose queue has no connection yet."""
        try:
            await self._find_backlog(message)
        except HeadraceError as error:
            self._refuse(message.message, error)

    def _refuse(self, message: Message, error: HeadraceError) -> None:
        """Report a message that was not accepted. Raises its error if there is no ``on_result``."""
        if not self._on_result:
            raise error
        self._tell([(message, error)])

    async def _find_backlog(self, message: EncodedMessage) -> None:
        sender = self._sender
        while True:
            publication = await sender.lasting_publication(message.topic)
            if not publication.route.is_current:
                await self._send_first(message)
                return
            topic = self._topic_backlogs(publication)
            backlog = topic.backlog_of(message)
            try:
                backlog.outlet.connection = await sender.connection(backlog.target)
            except (ConnectFailed, NoQueue) as error:
                sender.note_failure(backlog.target, error)
                avoid = sender.faults.current()
                if not message.key and publication.has_broker_besides(avoid):
                    topic.advance(avoid)
                    continue
            self._put_count += 1
            self._put_bytes += len(message.body)
            backlog.put(message)  # without a connection, its request is retried
            return

    def _topic_backlogs(self, publication: Publication) -> TopicBacklogs:
        name = publication.route.topic
        topic = self._topics.get(name)
        if topic is None or topic.publication is not publication:
            topic = self._topics[name] = TopicBacklogs(publication, self._backlog_of)
            topic.advance(self._sender.faults.current())
        return topic

    def _backlog_of(self, target: Target) -> Backlog:
        """The backlog of a target's queue; a backlog survives changes of the route."""
        outlet = self._outlets.get(target.address)
        if outlet is None:
            outlet = self._outlets[target.address] = Outlet(self._send_next)
        backlog = self._backlogs.get(target.queue)
        if backlog is None:
            backlog = self._backlogs[target.queue] = Backlog(target, outlet)
        backlog.target, backlog.outlet = target, outlet
        return backlog

    async def _send_first(self, message: EncodedMessage) -> None:
        """Send the message that creates its topic: the others need the new topic's queues."""
        self._put_count += 1
        self._put_bytes += len(message.body)
        try:
            block = self._block([message])
            span = self._start_span(block)
            outcome = await self._outcome(message.key, block)
            if span:
                span.end(outcome)
        finally:
            self._make_room([message])
        self._report([message], outcome)

    def _send_next(self, outlet: Outlet, backlog: Backlog) -> None:
        """Send the next request of a backlog."""
        sender = self._sender
        topic = self._topics[backlog.target.queue.topic]
        if topic.current is backlog:
            topic.advance(sender.faults.current())
        address = backlog.target.address
        connection = sender.instance.open_connection(address)
        backlog.note_tick(self._tick)
        messages = backlog.take(self._single_from_bytes(backlog.target, connection))
        block = self._block(messages)
        span = self._start_span(block)
        request = Request(outlet, backlog, messages, block, self._tick, span)
        self._in_flight[request] = None
        if connection is None:
            lost = ConnectionLost(address, "it closed before the message was sent")
            self._failed(request, backlog.target.error or lost)
            return
        outlet.connection = connection
        outgoing = sender.encode_block(request.block, connection)
        request.submit(connection, outgoing, self._answered)

    def _single_from_bytes(self, target: Target, connection: AsyncConnection | None) -> int:
        """Body size from which a message needs a request of its own, not a batch."""
        if not takes_batches(target.queue.topic):
            return 0
        compression = self._sender.compression
        if compression is None or (connection and self._sender.takes_blocks(connection)):
            return BODY_BYTES_MAX + 1
        return compression.from_bytes

    def _block(self, messages: Sequence[EncodedMessage], span: SendSpan | None = None) -> Block:
        """A block of messages, which carry the span's context."""
        block = Block.of(messages, self._sender.compression)
        if span:
            span.add_to(block)
        return block

    def _start_span(self, block: Block) -> SendSpan | None:
        """The span of a request, as a child of the span around the pipeline."""
        return self._tracing.send(block) if self._tracing else None

    # -- responses ---------------------------------------------------------------------------------

    def _answered(self, request: Request, response: Response | HeadraceError) -> None:
        """Handle the outcome of a request; called in the connection's reader task."""
        if isinstance(response, HeadraceError):
            self._failed(request, response)
            return
        try:
            result = request.outgoing.result(request.backlog.target, response)
        except HeadraceError as error:
            self._failed(request, error)
            return
        target = request.backlog.target
        self._sender.instance.outages.answered(target.queue.topic, target.address)
        self._remove(request)
        request.backlog.request_done()
        request.end_span(result)
        self._finish(request.messages, result)

    def _failed(self, request: Request, error: HeadraceError) -> None:
        self._remove(request)
        assert self._tasks is not None
        if is_retryable(error):
            self._retrying[request] = None
            self._tasks.start_soon(self._retry, request, error)
        elif _may_concern_one_message(error) and len(request.messages) > 1:
            self._retrying[request] = None
            self._tasks.start_soon(self._retry_singly, request)
        else:
            request.backlog.request_done()
            request.end_span(error)
            self._finish(request.messages, error)

    def _remove(self, request: Request) -> None:
        del self._in_flight[request]
        request.outlet.request_done()

    async def _retry(self, request: Request, error: HeadraceError) -> None:
        """Retry a request ahead of the messages waiting in its backlog."""
        self._sender.note_failure(request.backlog.target, error)
        retries = self._sender.retries(
            request.backlog.target.queue.topic, age_s=self._age_s(request)
        )
        try:
            await retries.pause_after(error)
            parts = await retries.run(partial(self._by_queue, request.messages))
            request.messages = [message for part in parts for message in part]
        except HeadraceError as last_error:
            self._finish_part(request, request.messages, last_error)
            parts = []
        for messages in parts:
            block = request.block if len(parts) == 1 else self._block(messages, request.span)
            outcome = await self._outcome(messages[0].key, block, retries)
            self._finish_part(request, messages, outcome)
        self._end_retry(request)

    def _age_s(self, request: Request) -> float:
        return (self._tick - request.newest_tick) * self._tick_s

    async def _by_queue(self, messages: list[EncodedMessage]) -> list[list[EncodedMessage]]:
        """Group messages by queue under the current route; those without a key stay together."""
        publication = await self._sender.publication(messages[0].topic)
        queue_count = len(publication.targets)
        parts: dict[int, list[EncodedMessage]] = {}
        for message in messages:
            queue = queue_index(message.key, queue_count) if message.key else -1
            parts.setdefault(queue, []).append(message)
        return list(parts.values())

    async def _retry_singly(self, request: Request) -> None:
        """Send the messages one by one, to find the one that the broker refuses."""
        for message in request.messages:
            outcome = await self._outcome(message.key, self._block([message], request.span))
            self._finish_part(request, [message], outcome)
        self._end_retry(request)

    def _finish_part(
        self,
        request: Request,
        messages: Sequence[EncodedMessage],
        outcome: SendResult | HeadraceError,
    ) -> None:
        request.done_count += len(messages)
        if request.span and not isinstance(request.outcome, HeadraceError):
            request.outcome = outcome
        self._finish(messages, outcome)

    def _end_retry(self, request: Request) -> None:
        del self._retrying[request]
        request.backlog.request_done()
        request.end_span(request.outcome)

    async def _outcome(
        self, key: bytes, block: Block, retries: Retries | None = None
    ) -> SendResult | HeadraceError:
        sender = self._sender
        send = partial(sender.attempt, block.topic, sender.by_key(key), block)
        try:
            return await (retries or sender.retries(block.topic)).run(send)
        except HeadraceError as error:
            return error

    def _finish(
        self, messages: Sequence[EncodedMessage], outcome: SendResult | HeadraceError
    ) -> None:
        self._make_room(messages)
        self._report(messages, outcome)

    def _make_room(self, messages: Sequence[EncodedMessage]) -> None:
        self._done_count += len(messages)
        self._done_bytes += sum(map(len, [message.body for message in messages]))
        if self._progress:
            self._progress.set()
            self._progress = None

    def _report(
        self, messages: Sequence[EncodedMessage], outcome: SendResult | HeadraceError
    ) -> None:
        if isinstance(outcome, HeadraceError):
            self._report_failure(messages, outcome)
        elif self._on_result:
            own = [message.message for message in messages]
            self._tell(zip(own, outcome.of_each(), strict=True))

    def _report_failure(self, messages: Sequence[EncodedMessage], error: HeadraceError) -> None:
        self._pause_count = 0
        failures = [(message.as_sent(), error) for message in messages]
        if self._on_result:
            self._tell(failures)
        else:
            self._failures += failures

    def _tell(self, outcomes: Iterable[tuple[Message, SendResult | HeadraceError]]) -> None:
        """Call ``on_result`` for each outcome."""
        assert self._on_result is not None
        for message, outcome in outcomes:
            try:
                self._on_result(message, outcome)
            except Exception as error:  # noqa: BLE001 - of the user's function
                self._note_callback_error(error)

    def _note_callback_error(self, error: Exception) -> None:
        self._pause_count = 0
        if self._callback_error is None:
            self._callback_error = error
        else:
            self._more_callback_errors += 1

    def _taken_callback_error(self) -> Exception:
        error, count = self._callback_error, self._more_callback_errors
        assert error is not None
        self._callback_error, self._more_callback_errors = None, 0
        if count:
            error.add_note(f"on_result raised for {count} more messages")
        return error

    # -- deadlines ---------------------------------------------------------------------------------

    async def _watch_deadlines(self) -> None:
        """Fail overdue requests; checks once per tick instead of keeping a timer per request."""
        timeout_ms = self._sender.timeout_ms
        while True:
            await anyio.sleep(self._tick_s)
            self._tick += 1
            for backlog in self._backlogs.values():
                backlog.note_tick(self._tick)
            for request in self._overdue():
                request.forget()
                self._failed(request, request.timeout(timeout_ms))

    def _overdue(self) -> list[Request]:
        overdue = []
        for request in self._in_flight:
            if self._tick - request.tick <= _TICKS_PER_TIMEOUT:
                break
            overdue.append(request)
        return overdue

    def _forget_all(self) -> list[EncodedMessage]:
        """Abandon all requests and messages; return the messages, except those being retried."""
        messages: list[EncodedMessage] = []
        for request in self._in_flight:
            request.forget()
            request.end_span(OutcomeUnknown())
            messages += request.messages
        self._in_flight.clear()
        for backlog in self._backlogs.values():
            messages += backlog.messages
            backlog.messages = []
        # Makes a ``send`` after the block pause first, which raises ClientClosed.
        self._pause_count = 0
        return messages

    def _report_unknown(self, messages: list[EncodedMessage]) -> None:
        """Report messages without an outcome, also those of the retries that have just ended."""
        for request in self._retrying:
            request.end_span(OutcomeUnknown())
            messages += request.messages[request.done_count :]
        self._retrying.clear()
        if messages and self._on_result:
            self._report_failure(messages, OutcomeUnknown())


def _may_concern_one_message(error: HeadraceError) -> bool:
    """True if the broker may have refused the request because of a single message."""
    return isinstance(error, BrokerError) and error.code == ResponseCode.MESSAGE_ILLEGAL
