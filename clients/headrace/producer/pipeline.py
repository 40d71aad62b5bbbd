"""Many messages under way at once, without a task or an event for each."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Self

import anyio

from headrace.errors import BrokerError, HeadraceError, PipelineError, RequestTimeout
from headrace.producer.sender import STORED, Sender, send_result
from headrace.tasks import Background
from headrace_protocol.drivers.response import Response

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from anyio.abc import TaskGroup

    from headrace.messages import Message, SendResult
    from headrace.producer.encoding import Outgoing
    from headrace.producer.publication import Target
    from headrace_protocol.command import Command
    from headrace_protocol.drivers.aio import AsyncConnection

_TICKS_PER_TIMEOUT = 4


class Pipeline:
    """Sends without waiting for each answer; use it in an ``async with`` block.

    ``await send(message)`` returns once the message is under way, and waits only while
    ``max_in_flight`` messages or ``max_bytes`` of bodies are. Failed messages are tried again as
    ``Producer.send`` would, so a message that is tried again may end up behind later ones of its
    key. Leaving the block waits for all answers; leaving it by an exception does not.

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
        # In the order of sending, which is the order of their deadlines.
        self._in_flight: dict[_Sending, None] = {}
        self._retrying: set[_Sending] = set()
        self._bytes = 0
        self._tick = 0
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
            await self._background.stop()

    async def send(self, message: Message) -> None:
        """Put a message under way.

        Raises InvalidMessage, RouteNotFound, ConnectFailed, ..., and PipelineError if a message
        before this one has failed.
        """
        outgoing = self._sender.encode(message)
        while self._is_full():
            await self._wait_for_progress()
        if self._failures:
            raise PipelineError(self._failures)
        publication = self._sender.publication_now(message.topic)
        if publication is None:
            publication = await self._sender.publication(message.topic)
            if not publication.route.is_current:
                await self._send_first(message, outgoing)
                return
        target = publication.target(message.key, self._sender.faults)
        connection = self._sender.instance.open_connection(target.address)
        if connection is None:
            connection = await self._sender.instance.connection(target.address)
        self._start(_Sending(self, message, outgoing, target, connection, self._tick))

    async def send_all(self, messages: Iterable[Message]) -> None:
        """``send`` each of them."""
        for message in messages:
            await self.send(message)

    async def flush(self) -> None:
        """Wait until no message is under way. Raises PipelineError if one has failed."""
        while self._in_flight or self._retrying:
            await self._wait_for_progress()
        if self._failures:
            raise PipelineError(self._failures)

    def _is_full(self) -> bool:
        under_way = len(self._in_flight) + len(self._retrying)
        return under_way >= self._max_in_flight or (self._bytes >= self._max_bytes)

    async def _wait_for_progress(self) -> None:
        self._progress = self._progress or anyio.Event()
        await self._progress.wait()

    async def _send_first(self, message: Message, outgoing: Outgoing) -> None:
        """Wait for the message that makes its topic: the others need to know its queues."""
        self._report(message, await self._outcome(message, outgoing, self._sender.retries + 1))

    def _start(self, sending: _Sending) -> None:
        sending.opaque = sending.connection.submit_encoded(
            partial(sending.target.single.frame, sending.outgoing), sending
        )
        self._in_flight[sending] = None
        self._bytes += len(sending.outgoing.body)

    # -- answers -----------------------------------------------------------------------------------

    def answered(
        self,
        sending: _Sending,
        command: Command | None,
        body: memoryview | None,
        error: HeadraceError | None,
    ) -> None:
        """What the connection calls for each message, in its reader task."""
        if command is not None and body is not None and command.code in STORED:
            del self._in_flight[sending]
            result = None
            if self._on_result:
                template = sending.target.single
                response = Response(sending.connection.address, template.code, command, body)
                result = send_result(sending.target, sending.outgoing, response)
            self._finish(sending, result)
            return
        if command is not None:
            address, code = sending.connection.address, sending.target.single.code
            error = BrokerError(command.code, command.remark, address, code)
        assert error is not None
        self._failed(sending, error)

    def _failed(self, sending: _Sending, error: HeadraceError) -> None:
        del self._in_flight[sending]
        if error.retryable and self._sender.retries and self._tasks:
            self._retrying.add(sending)
            self._tasks.start_soon(self._retry, sending, error)
        else:
            self._finish(sending, error)

    async def _retry(self, sending: _Sending, error: HeadraceError) -> None:
        self._sender.note_failure(sending.target, error)
        retries = self._sender.retries
        outcome = await self._outcome(sending.message, sending.outgoing, retries)
        self._retrying.discard(sending)
        self._finish(sending, outcome)

    async def _outcome(
        self, message: Message, outgoing: Outgoing, attempts: int
    ) -> SendResult | HeadraceError:
        sender = self._sender
        choose = sender.by_key(message.key)
        try:
            return await sender.send(message.topic, choose, outgoing, attempts=attempts)
        except HeadraceError as error:
            return error

    def _finish(self, sending: _Sending, outcome: SendResult | HeadraceError | None) -> None:
        self._bytes -= len(sending.outgoing.body)
        if self._progress:
            self._progress.set()
            self._progress = None
        self._report(sending.message, outcome)

    def _report(self, message: Message, outcome: SendResult | HeadraceError | None) -> None:
        if self._on_result:
            assert outcome is not None
            self._on_result(message, outcome)
        elif isinstance(outcome, HeadraceError):
            self._failures.append((message, outcome))

    # -- deadlines ---------------------------------------------------------------------------------

    async def _watch_deadlines(self) -> None:
        """Fail what got no answer in time; one look per tick instead of a timer per message."""
        timeout_ms = self._sender.timeout_ms
        while True:
            await anyio.sleep(timeout_ms / 1000 / _TICKS_PER_TIMEOUT)
            self._tick += 1
            for sending in self._overdue():
                sending.connection.forget(sending.opaque)
                address, code = sending.connection.address, sending.target.single.code
                self._failed(sending, RequestTimeout(address, code, timeout_ms))

    def _overdue(self) -> list[_Sending]:
        overdue = []
        for sending in self._in_flight:
            if self._tick - sending.tick <= _TICKS_PER_TIMEOUT:
                break
            overdue.append(sending)
        return overdue

    def _forget_all(self) -> None:
        for sending in self._in_flight:
            sending.connection.forget(sending.opaque)
        self._in_flight.clear()


class _Sending:
    """A message under way; the connection calls it with the answer."""

    __slots__ = ("connection", "message", "opaque", "outgoing", "pipeline", "target", "tick")

    def __init__(
        self,
        pipeline: Pipeline,
        message: Message,
        outgoing: Outgoing,
        target: Target,
        connection: AsyncConnection,
        tick: int,
    ) -> None:
        self.pipeline = pipeline
        self.message = message
        self.outgoing = outgoing
        self.target = target
        self.connection = connection
        self.tick = tick
        self.opaque = 0

    def __call__(
        self, command: Command | None, body: memoryview | None, error: HeadraceError | None
    ) -> None:
        self.pipeline.answered(self, command, body, error)
