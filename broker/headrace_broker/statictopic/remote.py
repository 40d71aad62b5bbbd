"""Requests to other brokers: one connection to each, in the order in which they are made.

Nothing here blocks the loop: a request returns at once, and its answer comes to a function.
Source: docs/static-topics.md "Items on other brokers"; tests/broker/test_static_remote.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import structlog
import trio

from headrace_protocol.drivers.aio import AsyncConnection, open_stream
from headrace_protocol.drivers.errors import ConnectFailed, HeadraceError, RequestTimeout
from headrace_protocol.header_codecs import SerializeType, encode_frame
from headrace_protocol.outages import Outages

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace_daemon.network import Network
    from headrace_protocol.columns import Buffer
    from headrace_protocol.command import Command

log = structlog.get_logger("headrace.broker")

# Room for all answers that are under way, since each is kept until its client has it.
RELAYED_BYTES_MAX: Final = 32 * 1024 * 1024


class Answer(NamedTuple):
    """The answer of a broker, this one or another."""

    code: int
    remark: str | None = None
    fields: Mapping[str, object] = {}
    body: tuple[Buffer, ...] = ()

    def number(self, name: str) -> int:
        """A field that is an integer. Raises MalformedField."""
        value = self.fields.get(name)
        try:
            return int(str(value))
        except ValueError:
            raise MalformedField(f"{name}={value} in the answer of a broker") from None


class MalformedField(Exception):
    """The answer of another broker lacks a field, or has a value of another type."""


# Gets the answer, or the reason why there is none.
Then = Callable[[Answer | HeadraceError], None]
# Finds the address of a broker. Raises HeadraceError.
FindAddress = Callable[[str], Awaitable[str]]


class _Call:
    """A request under way.

    then: called exactly once. is_started: whether its answer has room. forget: ends the wait for
    the answer, once the request was sent.
    """

    __slots__ = (
        "_then",
        "answer_bytes",
        "body",
        "broker",
        "code",
        "deadline",
        "fields",
        "forget",
        "is_started",
    )

    def __init__(
        self,
        broker: str,
        code: int,
        fields: Mapping[str, str],
        body: Buffer,
        answer_bytes: int,
        then: Then,
    ) -> None:
        self.broker = broker
        self.code = code
        self.fields = fields
        self.body = body
        self.answer_bytes = answer_bytes
        self.deadline = 0.0
        self.is_started = False
        self.forget: Callable[[], None] | None = None
        self._then: Then | None = then

    @property
    def is_done(self) -> bool:
        """Whether ``then`` was called."""
        return self._then is None

    def finish(self, outcome: Answer | HeadraceError) -> bool:
        """Pass on the outcome, unless there was one already."""
        then, self._then = self._then, None
        if then is None:
            return False
        then(outcome)
        return True

    def encode(self, opaque: int) -> list[Buffer]:
        """The frame."""
        frame = encode_frame(
            SerializeType.JSON, self.code, opaque, fields=self.fields, body_bytes=len(self.body)
        )
        return [frame, self.body] if self.body else [frame]


class _Broker:
    """Another broker: its connection, and the calls that wait for one."""

    __slots__ = ("address", "connection", "is_running", "waiting")

    def __init__(self) -> None:
        self.address = ""
        self.connection: AsyncConnection | None = None
        self.is_running = False
        self.waiting: deque[_Call] = deque()


class OtherBrokers:
    """Connections to other brokers, opened as needed; the other end closes an idle one.

    asked_count, answered_bytes: totals for the runtime info. on_waiting: called with True when the
    first request waits for its answer, and with False when none does any more.
    """

    def __init__(
        self, network: Network, find_address: FindAddress, timeout_ms: Callable[[], int]
    ) -> None:
        """timeout_ms: longest time for an answer, including the connecting."""
        self.asked_count = self.answered_bytes = 0
        self.on_waiting: Callable[[bool], None] = lambda _is_waiting: None
        self._waiting_count = 0
        self._network = network
        self._find_address = find_address
        self._timeout_ms = timeout_ms
        self._outages = Outages(log.warning, trio.current_time)
        self._brokers: dict[str, _Broker] = {}
        self._to_connect: list[str] = []
        self._has_news = trio.Event()
        # All calls under way, the one with the earliest deadline first.
        self._calls: deque[_Call] = deque()
        self._free_bytes = RELAYED_BYTES_MAX
        self._without_room: deque[_Call] = deque()

    def ask(
        self,
        broker: str,
        code: int,
        fields: Mapping[str, str],
        then: Then,
        body: Buffer = b"",
        answer_bytes: int = 0,
    ) -> None:
        """Send a request. answer_bytes: room to keep for its answer; it waits until there is."""
        room = min(answer_bytes, RELAYED_BYTES_MAX)
        call = _Call(broker, code, fields, body, room, then)
        call.deadline = trio.current_time() + self._timeout_ms() / 1000
        self._calls.append(call)
        self._has_news.set()
        self.asked_count += 1
        self._waiting_count += 1
        if self._waiting_count == 1:
            self.on_waiting(True)
        if self._without_room or call.answer_bytes > self._free_bytes:
            self._without_room.append(call)
        else:
            self._start(call)

    async def request(
        self, broker: str, code: int, fields: Mapping[str, str], body: Buffer = b""
    ) -> Answer | HeadraceError:
        """Send a request and wait for its outcome."""
        answered = trio.Event()
        outcomes: list[Answer | HeadraceError] = []

        def then(outcome: Answer | HeadraceError) -> None:
            outcomes.append(outcome)
            answered.set()

        self.ask(broker, code, fields, then, body)
        await answered.wait()
        return outcomes[0]

    def known_address(self, broker: str) -> str:
        """The address of a broker, "" if it was not looked up yet."""
        known = self._brokers.get(broker)
        return known.address if known else ""

    def _start(self, call: _Call) -> None:
        name = call.broker
        call.is_started = True
        self._free_bytes -= call.answer_bytes
        broker = self._brokers.get(name) or self._brokers.setdefault(name, _Broker())
        if broker.connection is not None:
            self._submit(broker, broker.connection, call)
            return
        broker.waiting.append(call)
        if not broker.is_running:
            broker.is_running = True
            self._to_connect.append(name)
            self._has_news.set()

    def _submit(self, broker: _Broker, connection: AsyncConnection, call: _Call) -> None:
        def answered(
            command: Command | None, body: memoryview | None, error: HeadraceError | None
        ) -> None:
            if command is None or body is None:
                self._finish(call, error or ConnectFailed(broker.address, "it ended"))
            else:
                self.answered_bytes += len(body)
                self._finish(call, _answer(command, body))

        try:
            opaque = connection.submit_encoded(call.encode, answered)
        except HeadraceError as error:
            self._finish(call, error)
        else:
            call.forget = partial(connection.forget, opaque)

    def _finish(self, call: _Call, outcome: Answer | HeadraceError) -> None:
        if not call.finish(outcome):
            return
        self._waiting_count -= 1
        if not self._waiting_count:
            self.on_waiting(False)
        if call.is_started:
            self._free_bytes += call.answer_bytes
        while self._without_room and self._without_room[0].answer_bytes <= self._free_bytes:
            waiting = self._without_room.popleft()
            if not waiting.is_done:
                self._start(waiting)

    # -- tasks -------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Connect and keep time until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                self._has_news = trio.Event()
                names, self._to_connect = self._to_connect, []
                for name in names:
                    nursery.start_soon(self._serve, name)
                with trio.move_on_at(self._expire()):
                    await self._has_news.wait()

    def _expire(self) -> float:
        """End the calls that got no answer in time; returns when the next one ends."""
        calls, now = self._calls, trio.current_time()
        while calls and (calls[0].is_done or calls[0].deadline <= now):
            call = calls.popleft()
            if not call.is_done:
                if call.forget is not None:
                    call.forget()
                self._finish(call, RequestTimeout(call.broker, call.code, self._timeout_ms()))
        return calls[0].deadline if calls else float("inf")

    async def _serve(self, name: str) -> None:
        """Connect to a broker, and move bytes until the connection ends."""
        broker = self._brokers[name]
        problem: HeadraceError = ConnectFailed(name, "the connection ended")
        try:
            await self._connect(name, broker)
        except HeadraceError as error:
            problem = error
            self._outages.failed(f"broker {name}", error)
        finally:
            broker.connection, broker.is_running, broker.address = None, False, ""
            waiting, broker.waiting = broker.waiting, deque()
            for call in waiting:
                self._finish(call, problem)

    async def _connect(self, name: str, broker: _Broker) -> None:
        broker.address = await self._find_address(name)
        stream = await open_stream(self._network.connect, broker.address)
        connection = AsyncConnection(stream, broker.address)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.run)
            broker.connection = connection
            self._outages.worked(f"broker {name}")
            while broker.waiting:
                self._submit(broker, connection, broker.waiting.popleft())


def _answer(command: Command, body: memoryview) -> Answer:
    try:
        fields = command.ext()
    except msgspec.ValidationError:
        fields = {}
    return Answer(command.code, command.remark, fields, (body,) if len(body) else ())
