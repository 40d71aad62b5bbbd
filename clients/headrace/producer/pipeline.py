"""Many messages under way at once, without a task, an event or a request for each."""

from __future__ import annotations

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
    PipelineError,
    RequestTimeout,
)
from headrace.messages import BODY_BYTES_MAX, takes_batches
from headrace.producer.block import Block
from headrace.producer.lanes import Lane, Outlet, TopicLanes
from headrace.producer.selector import queue_index
from headrace.producer.sender import is_retryable
from headrace.tasks import Background
from headrace_protocol.codes import ResponseCode
from headrace_protocol.drivers.response import Response

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from anyio.abc import TaskGroup

    from headrace.messages import Message, SendResult
    from headrace.producer.encoding import Target
    from headrace.producer.publication import Publication
    from headrace.producer.sender import AnyOutgoing, Sender
    from headrace_protocol.bodies import MessageQueue
    from headrace_protocol.command import Command
    from headrace_protocol.drivers.aio import AsyncConnection

_TICKS_PER_TIMEOUT = 4
# After so much ``send`` lets the event loop run, so that it leaves while more is put.
_TURN_BYTES = 128 * 1024
_TURNS_PER_FULL = 4


class Pipeline:
    """Sends without waiting for each answer; use it in an ``async with`` block.

    ``await send(message)`` puts it under way, and waits only while ``max_in_flight`` messages or
    ``max_bytes`` of bodies are. What is there when its broker can take it leaves as one request
    per queue; nothing waits for more to come. One request per queue is under way, so that the
    messages of a key stay in order, also when they are tried again, as ``Producer.send`` would.
    Messages without a key go to one queue until they leave, then to the next. Leaving the block
    waits for all answers; leaving it by an exception does not, and drops what has not left.

    on_result(message, result or error) is told how each message ended. Without it the first
    message that fails for good ends the pipeline: ``send`` and leaving raise PipelineError.
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
        self._topics: dict[str, TopicLanes] = {}
        self._lanes: dict[MessageQueue, Lane] = {}
        self._outlets: dict[str, Outlet] = {}
        # In the order of sending, which is the order of their deadlines.
        self._in_flight: dict[_Flight, None] = {}
        self._tick = 0
        # Of all messages ever put, and of those that are done; ``send`` pauses at the third.
        self._put_count = self._put_bytes = 0
        self._done_count = self._done_bytes = 0
        self._pause_count = self._pause_bytes = 0
        self._failures: list[tuple[Message, HeadraceError]] = []
        self._progress: anyio.Event | None = None
        self._background = Background()
        self._tasks: TaskGroup | None = None

    async def __aenter__(self) -> Self:
        self._tasks = await self._background.start()
        self._tasks.start_soon(self._watch_deadlines)
        return self

    async def __aexit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        try:
            if error_type is None:
                await self.flush()
        finally:
            self._forget_all()
            self._tasks = None
            await self._background.stop()

    async def send(self, message: Message) -> None:
        """Put a message under way; it is not if this is cancelled.

        Raises InvalidMessage, RouteNotFound, ConnectFailed, ..., and PipelineError if a message
        before this one has failed.
        """
        message.check()
        if self._put_count >= self._pause_count or self._put_bytes >= self._pause_bytes:
            await self._pause()
        topic = self._topics.get(message.topic)
        if topic and topic.publication.route.is_current:
            lane = topic.of(message)
            if lane.messages or lane.outlet.is_open:
                self._put(lane, message)
                return
        await self._put_first(message)

    async def send_all(self, messages: Iterable[Message]) -> None:
        """``send`` each of them."""
        for message in messages:
            await self.send(message)

    async def flush(self) -> None:
        """Wait until no message is under way. Raises PipelineError if one has failed."""
        while self._done_count < self._put_count:
            await self._wait_for_progress()
        if self._failures:
            raise PipelineError(self._failures)

    # -- waiting -----------------------------------------------------------------------------------

    async def _pause(self) -> None:
        """Let others run, and wait while the pipeline is full.

        Raises PipelineError, and ClientClosed outside the block.
        """
        if self._tasks is None:
            raise ClientClosed("producer.pipeline")
        if not self._is_full():
            await anyio.lowlevel.checkpoint()
        while self._is_full():
            await self._wait_for_progress()
        if self._failures:
            raise PipelineError(self._failures)
        turn_count = max(1, self._max_in_flight // _TURNS_PER_FULL)
        self._pause_count = min(
            self._put_count + turn_count, self._done_count + self._max_in_flight
        )
        self._pause_bytes = min(self._put_bytes + _TURN_BYTES, self._done_bytes + self._max_bytes)

    def _is_full(self) -> bool:
        return (
            self._put_count - self._done_count >= self._max_in_flight
            or self._put_bytes - self._done_bytes >= self._max_bytes
        )

    async def _wait_for_progress(self) -> None:
        self._progress = self._progress or anyio.Event()
        await self._progress.wait()

    # -- on the way to a queue ---------------------------------------------------------------------

    def _put(self, lane: Lane, message: Message) -> None:
        self._put_count += 1
        self._put_bytes += len(message.body)
        lane.put(message)

    async def _put_first(self, message: Message) -> None:
        """Put a message whose route or connection is still to be found."""
        sender = self._sender
        while True:
            publication = await sender.publication(message.topic)
            if not publication.route.is_current:
                await self._send_first(message)
                return
            topic = self._topic_lanes(publication)
            lane = topic.of(message)
            try:
                lane.outlet.connection = await sender.connection(lane.target)
            except ConnectFailed as error:
                sender.note_failure(lane.target, error)
                avoid = sender.faults.current()
                if message.key or not publication.has_broker_besides(avoid):
                    raise
                topic.turn(avoid)
            else:
                self._put(lane, message)
                return

    def _topic_lanes(self, publication: Publication) -> TopicLanes:
        name = publication.route.topic
        topic = self._topics.get(name)
        if topic is None or topic.publication is not publication:
            topic = self._topics[name] = TopicLanes(publication, self._lane)
            topic.turn(self._sender.faults.current())
        return topic

    def _lane(self, target: Target) -> Lane:
        """The lane of a queue; it lives on when the route has changed."""
        outlet = self._outlets.get(target.address)
        if outlet is None:
            outlet = self._outlets[target.address] = Outlet(self._leave)
        lane = self._lanes.get(target.queue)
        if lane is None:
            lane = self._lanes[target.queue] = Lane(target, outlet)
        lane.target, lane.outlet = target, outlet
        return lane

    async def _send_first(self, message: Message) -> None:
        """Wait for the message that makes its topic: the others need to know its queues."""
        self._put_count += 1
        self._put_bytes += len(message.body)
        try:
            block = self._block([message])
            outcome = await self._outcome(message.key, block, self._sender.retries + 1)
        finally:
            self._make_room([message])
        self._report([message], outcome)

    def _leave(self, outlet: Outlet, lane: Lane) -> None:
        """Send the next request of a lane."""
        sender = self._sender
        topic = self._topics[lane.target.queue.topic]
        if topic.current is lane:
            topic.turn(sender.faults.current())
        address = lane.target.address
        connection = sender.instance.open_connection(address)
        messages = lane.take(self._alone_from_bytes(lane.target, connection))
        flight = _Flight(self, outlet, lane, messages, self._block(messages), self._tick)
        self._in_flight[flight] = None
        if connection is None:
            self._failed(flight, ConnectionLost(address, "it ended before the message could leave"))
            return
        outlet.connection = connection
        flight.submit(connection, sender.encode_block(flight.block, connection))

    def _alone_from_bytes(self, target: Target, connection: AsyncConnection | None) -> int:
        """Which bodies get requests of their own: what a batch cannot hold or compress."""
        if not takes_batches(target.queue.topic):
            return 0
        compress_from_bytes = self._sender.compress_from_bytes
        if compress_from_bytes is None or (connection and self._sender.takes_blocks(connection)):
            return BODY_BYTES_MAX + 1
        return compress_from_bytes

    def _block(self, messages: Sequence[Message]) -> Block:
        return Block.of(messages, self._sender.compress_from_bytes)

    # -- answers -----------------------------------------------------------------------------------

    def answered(self, flight: _Flight, response: Response | HeadraceError) -> None:
        """What the connection says of each request, in its reader task."""
        if isinstance(response, HeadraceError):
            self._failed(flight, response)
            return
        try:
            result = flight.outgoing.result(flight.lane.target, response)
        except HeadraceError as error:
            self._failed(flight, error)
            return
        self._land(flight)
        flight.lane.done()
        self._finish(flight.messages, result)

    def _failed(self, flight: _Flight, error: HeadraceError) -> None:
        self._land(flight)
        assert self._tasks is not None
        if is_retryable(error) and self._sender.retries:
            self._tasks.start_soon(self._retry, flight, error)
        elif _may_be_of_one(error) and len(flight.messages) > 1:
            self._tasks.start_soon(self._retry_singly, flight)
        else:
            flight.lane.done()
            self._finish(flight.messages, error)

    def _land(self, flight: _Flight) -> None:
        del self._in_flight[flight]
        flight.outlet.landed()

    async def _retry(self, flight: _Flight, error: HeadraceError) -> None:
        """Try the request again, before what waits in its lane."""
        self._sender.note_failure(flight.lane.target, error)
        parts = await self._by_queue(flight.messages)
        for messages in parts:
            block = flight.block if len(parts) == 1 else self._block(messages)
            outcome = await self._outcome(messages[0].key, block, self._sender.retries)
            self._finish(messages, outcome)
        flight.lane.done()

    async def _by_queue(self, messages: list[Message]) -> list[list[Message]]:
        """Messages that go to one queue as the route is now; those without a key stay together."""
        try:
            publication = await self._sender.publication(messages[0].topic)
        except HeadraceError:
            return [messages]  # whoever sends them will get the error
        queue_count = len(publication.targets)
        parts: dict[int, list[Message]] = {}
        for message in messages:
            queue = queue_index(message.key, queue_count) if message.key else -1
            parts.setdefault(queue, []).append(message)
        return list(parts.values())

    async def _retry_singly(self, flight: _Flight) -> None:
        """One message of the request is refused: find out which."""
        for message in flight.messages:
            attempts = self._sender.retries + 1
            outcome = await self._outcome(message.key, self._block([message]), attempts)
            self._finish([message], outcome)
        flight.lane.done()

    async def _outcome(self, key: str, block: Block, attempts: int) -> SendResult | HeadraceError:
        sender = self._sender
        try:
            return await sender.send(block.topic, sender.by_key(key), block, attempts=attempts)
        except HeadraceError as error:
            return error

    def _finish(self, messages: Sequence[Message], outcome: SendResult | HeadraceError) -> None:
        self._make_room(messages)
        self._report(messages, outcome)

    def _make_room(self, messages: Sequence[Message]) -> None:
        self._done_count += len(messages)
        self._done_bytes += sum([len(message.body) for message in messages])
        if self._progress:
            self._progress.set()
            self._progress = None

    def _report(self, messages: Sequence[Message], outcome: SendResult | HeadraceError) -> None:
        if isinstance(outcome, HeadraceError):
            self._report_failure(messages, outcome)
        elif self._on_result:
            for message, result in zip(messages, outcome.of_each(), strict=True):
                self._on_result(message, result)

    def _report_failure(self, messages: Sequence[Message], error: HeadraceError) -> None:
        self._pause_count = 0
        for message in messages:
            if self._on_result:
                self._on_result(message, error)
            else:
                self._failures.append((message, error))

    # -- deadlines ---------------------------------------------------------------------------------

    async def _watch_deadlines(self) -> None:
        """Fail what got no answer in time; one look per tick instead of a timer per request."""
        timeout_ms = self._sender.timeout_ms
        while True:
            await anyio.sleep(timeout_ms / 1000 / _TICKS_PER_TIMEOUT)
            self._tick += 1
            for flight in self._overdue():
                flight.forget()
                self._failed(flight, flight.timeout(timeout_ms))

    def _overdue(self) -> list[_Flight]:
        overdue = []
        for flight in self._in_flight:
            if self._tick - flight.tick <= _TICKS_PER_TIMEOUT:
                break
            overdue.append(flight)
        return overdue

    def _forget_all(self) -> None:
        for flight in self._in_flight:
            flight.forget()
        self._in_flight.clear()
        for lane in self._lanes.values():
            lane.messages.clear()
        # Whoever sends after the block pauses first, and is told there.
        self._pause_count = 0


class _Flight:
    """A request under way; the connection calls it with the answer."""

    __slots__ = (
        "_connection",
        "_opaque",
        "_pipeline",
        "block",
        "lane",
        "messages",
        "outgoing",
        "outlet",
        "tick",
    )

    def __init__(
        self,
        pipeline: Pipeline,
        outlet: Outlet,
        lane: Lane,
        messages: list[Message],
        block: Block,
        tick: int,
    ) -> None:
        self._pipeline = pipeline
        self._connection: AsyncConnection
        self._opaque = 0
        self.outlet = outlet
        self.lane = lane
        self.messages = messages
        self.block = block
        self.tick = tick
        self.outgoing: AnyOutgoing

    @property
    def _code(self) -> int:
        return self.outgoing.code(self.lane.target)

    def submit(self, connection: AsyncConnection, outgoing: AnyOutgoing) -> None:
        """Put the request on the connection, which is open."""
        self._connection, self.outgoing = connection, outgoing
        encode = partial(outgoing.frame, self.lane.target)
        self._opaque = self._connection.submit_encoded(encode, self)

    def __call__(
        self, command: Command | None, body: memoryview | None, error: HeadraceError | None
    ) -> None:
        if command is None or body is None:
            assert error is not None
            self._pipeline.answered(self, error)
            return
        address = self._connection.address
        self._pipeline.answered(self, Response(address, self._code, command, body))

    def forget(self) -> None:
        """Do not call the pipeline any more."""
        self._connection.forget(self._opaque)

    def timeout(self, timeout_ms: float) -> RequestTimeout:
        """The error of having no answer."""
        return RequestTimeout(self._connection.address, self._code, timeout_ms)


def _may_be_of_one(error: HeadraceError) -> bool:
    """Whether a request may have been refused for one of its messages."""
    return isinstance(error, BrokerError) and error.code == ResponseCode.MESSAGE_ILLEGAL
