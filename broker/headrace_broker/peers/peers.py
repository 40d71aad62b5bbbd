"""Requests to other daemons: one connection to each, limits for each caller.

A peer is a broker, by name, or a daemon to which a part of this broker holds a connection, by
address. ``begin`` returns at once and keeps the order of its calls; ``ask`` and ``ask_many`` wait.
Source: docs/architecture.md "Other daemons"; tests/broker/peers/test_peers.py.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog
import trio

from headrace_broker.peers.callers import TooManyRequests
from headrace_broker.peers.connect import connected
from headrace_protocol.drivers.errors import ConnectFailed, HeadraceError, RequestTimeout
from headrace_protocol.drivers.response import Response
from headrace_protocol.header_codecs import SerializeType, encode_frame
from headrace_protocol.outages import Outages

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

    import msgspec

    from headrace_broker.peers.callers import Caller
    from headrace_protocol.channel import Channel
    from headrace_protocol.columns import Buffer
    from headrace_protocol.command import Command
    from headrace_protocol.drivers.aio import AsyncConnection, Connect
    from headrace_protocol.rights.credentials import Credentials

log = structlog.get_logger("headrace.broker")

# Room for all answers that are under way, since each is kept until its client has it.
ANSWER_BYTES_MAX: Final = 32 * 1024 * 1024
# Between two attempts to connect to a broker; the pause doubles.
_PAUSE_S: Final = 0.02
_PAUSE_S_MAX: Final = 0.5


class Ask(NamedTuple):
    """A request. peer: the name of a broker, or the address of a held connection.

    fields: sent as they are, in JSON; without, the header is sent in the connection's codec.
    answer_bytes: room to keep for the answer; the request waits until there is.
    payer: the client that is charged with this room until the outcome.
    """

    peer: str
    code: int
    fields: Mapping[str, str] | None = None
    body: Buffer = b""
    answer_bytes: int = 0
    header: msgspec.Struct | None = None
    payer: Channel | None = None


# The answer, whatever its code, or the reason why there is none.
Outcome = Response | HeadraceError
Then = Callable[[Outcome], None]
# Finds the address of a broker. Raises HeadraceError.
FindAddress = Callable[[str], Awaitable[str]]


class Call:
    """A request under way.

    then: called exactly once, unless the call is dropped. room: bytes to keep for its answer.
    is_started: whether it has this room. forget: ends the wait for the answer of a sent request.
    """

    __slots__ = ("ask", "caller", "deadline", "forget", "is_started", "peer", "room", "then")

    def __init__(self, caller: Caller, ask: Ask, peer: _Peer, deadline: float, then: Then) -> None:
        self.caller = caller
        self.ask = ask
        self.peer = peer
        self.deadline = deadline
        self.room = 0
        self.is_started = False
        self.forget: Callable[[], None] | None = None
        self.then: Then | None = then

    @property
    def is_done(self) -> bool:
        """True once it has an outcome, or was dropped."""
        return self.then is None

    def discharge(self) -> None:
        """Take the charge of its client back."""
        if self.ask.payer is not None:
            self.ask.payer.charge(-self.ask.answer_bytes)

    def encode(self, opaque: int) -> list[Buffer]:
        """The frame of a request with fields."""
        code, body = self.ask.code, self.ask.body
        frame = encode_frame(
            SerializeType.JSON, code, opaque, fields=self.ask.fields, body_bytes=len(body)
        )
        return [frame, body] if body else [frame]


class _Peer:
    """Another daemon: its connection, and the calls that wait for one.

    under_way: number of calls by caller. problem: why the last attempt to connect failed, and the
    outcome of calls until ``retry_at``.
    """

    __slots__ = (
        "address",
        "connection",
        "is_running",
        "pause_s",
        "problem",
        "retry_at",
        "under_way",
        "waiting",
    )

    def __init__(self, address: str = "", connection: AsyncConnection | None = None) -> None:
        self.address = address
        self.connection = connection
        self.is_running = False
        self.pause_s = _PAUSE_S
        self.problem: HeadraceError | None = None
        self.retry_at = 0.0
        self.under_way: dict[str, int] = {}
        self.waiting: deque[Call] = deque()

    def pause(self, problem: HeadraceError) -> None:
        """Let calls fail for a while, because no connection could be opened."""
        self.problem = problem
        self.retry_at = trio.current_time() + self.pause_s
        self.pause_s = min(2 * self.pause_s, _PAUSE_S_MAX)


class Peers:
    """The other daemons that this broker asks; the other end closes an idle connection.

    find_address: must be set before brokers are asked. on_waiting: called with True when the first
    request waits for its answer, and with False when none does any more.
    """

    find_address: FindAddress

    def __init__(
        self,
        connect: Connect,
        timeout_ms: Callable[[], int],
        answer_bytes_max: int = ANSWER_BYTES_MAX,
        credentials: Credentials | None = None,
    ) -> None:
        """timeout_ms: the current ``forwardTimeout``. answer_bytes_max: of answers under way.

        credentials: with which each connection is logged in, if any.
        """
        self.on_waiting: Callable[[bool], None] = lambda _is_waiting: None
        self._connect, self._credentials = connect, credentials
        self._timeout_ms = timeout_ms
        self._outages = Outages(log.warning, trio.current_time)
        self._brokers: dict[str, _Peer] = {}
        self._held: dict[str, _Peer] = {}
        self._to_connect: list[str] = []
        self._has_news = trio.Event()
        # All calls under way, by caller, the one with the earliest deadline first.
        self._calls: defaultdict[str, deque[Call]] = defaultdict(deque)
        self._waiting_count = 0
        self._answer_bytes_max = self._free_bytes = answer_bytes_max
        self._without_room: deque[Call] = deque()
        self._is_starting = False

    # -- requests ----------------------------------------------------------------------------------

    def begin(self, caller: Caller, ask: Ask, then: Then) -> Call:
        """Send a request; ``then`` gets its outcome, now or later. Returns it for ``drop``."""
        peer = self._held.get(ask.peer) or self._brokers.get(ask.peer)
        if peer is None:
            peer = self._brokers[ask.peer] = _Peer()
        name, timeout_ms, at_once = caller
        deadline = trio.current_time() + (timeout_ms or self._timeout_ms()) / 1000
        call = Call(caller, ask, peer, deadline, then)
        if ask.payer is not None:
            ask.payer.charge(ask.answer_bytes)
        self._waiting_count += 1
        if self._waiting_count == 1:
            self.on_waiting(True)
        peer.under_way[name] = under_way = peer.under_way.get(name, 0) + 1
        if under_way > at_once:
            self._finish(call, TooManyRequests(caller, ask.peer))
            return call
        self._calls[name].append(call)
        self._has_news.set()
        call.room = min(ask.answer_bytes, self._answer_bytes_max)
        if self._without_room or call.room > self._free_bytes:
            self._without_room.append(call)
        else:
            self._start(call)
        return call

    def drop(self, call: Call) -> None:
        """Forget a request, whose outcome no longer matters."""
        if call.then is not None:
            if call.forget is not None:
                call.forget()
            call.then = None
            call.peer.under_way[call.caller.name] -= 1
            call.discharge()
            self._release(call)

    async def ask(self, caller: Caller, ask: Ask) -> Response:
        """The answer to a request, whatever its code. Raises HeadraceError."""
        outcome = await self._outcome(caller, ask)
        if isinstance(outcome, HeadraceError):
            raise outcome
        return outcome

    async def ask_many(self, caller: Caller, asks: Sequence[Ask]) -> list[Outcome]:
        """The outcomes of requests, in their order; ``at_once`` of them are under way at a time."""
        outcomes: dict[int, Outcome] = {}

        async def work(rest: Iterator[tuple[int, Ask]]) -> None:
            for index, ask in rest:
                outcomes[index] = await self._outcome(caller, ask)

        rest = iter(enumerate(asks))
        async with trio.open_nursery() as nursery:
            for _ in range(min(caller.at_once, len(asks))):
                nursery.start_soon(work, rest)
        return [outcomes[index] for index in range(len(asks))]

    async def _outcome(self, caller: Caller, ask: Ask) -> Outcome:
        """The outcome of a request."""
        answered = trio.Event()
        outcomes: list[Outcome] = []

        def then(outcome: Outcome) -> None:
            outcomes.append(outcome)
            answered.set()

        call = self.begin(caller, ask, then)
        try:
            await answered.wait()
        except trio.Cancelled:
            self.drop(call)
            raise
        return outcomes[0]

    # -- connections -------------------------------------------------------------------------------

    @asynccontextmanager
    async def hold(self, address: str) -> AsyncIterator[None]:
        """Keep a connection for the time of a block, for requests to its address.

        Raises HeadraceError; the block is cancelled when the connection ends.
        """
        async with connected(self._connect, address, self._credentials) as connection:
            if address in self._held:
                raise ConnectFailed(address, "another part of this broker has a connection to it")
            self._held[address] = _Peer(address, connection)
            try:
                yield
            finally:
                del self._held[address]

    async def is_alive(self, address: str) -> bool:
        """True if a server takes connections at an address."""
        try:
            async with connected(self._connect, address):
                return True
        except HeadraceError:
            return False

    def known_address(self, broker: str) -> str:
        """The address of a broker, "" if it was not looked up yet."""
        known = self._brokers.get(broker)
        return known.address if known else ""

    # -- calls -------------------------------------------------------------------------------------

    def _start(self, call: Call) -> None:
        peer = call.peer
        call.is_started = True
        self._free_bytes -= call.room
        if peer.connection is not None:
            self._submit(peer.connection, call)
        elif peer.is_running:
            peer.waiting.append(call)
        elif peer.problem is not None and trio.current_time() < peer.retry_at:
            self._finish(call, peer.problem)
        else:
            peer.waiting.append(call)
            peer.is_running = True
            self._to_connect.append(call.ask.peer)
            self._has_news.set()

    def _submit(self, connection: AsyncConnection, call: Call) -> None:
        ask = call.ask

        def answered(
            command: Command | None, body: memoryview | None, error: HeadraceError | None
        ) -> None:
            if command is None or body is None:
                self._finish(call, error or ConnectFailed(connection.address, "it ended"))
            else:
                self._finish(call, Response(connection.address, ask.code, command, body))

        try:
            if ask.fields is not None:
                opaque = connection.submit_encoded(call.encode, answered)
            else:
                opaque = connection.submit(ask.code, ask.header, ask.body, answered)
        except HeadraceError as error:
            self._finish(call, error)
        else:
            call.forget = partial(connection.forget, opaque)

    def _finish(self, call: Call, outcome: Outcome) -> None:
        """Pass on the outcome, unless there was one already."""
        then = call.then
        if then is not None:
            call.then = None
            call.peer.under_way[call.caller.name] -= 1
            call.discharge()
            then(outcome)
            self._release(call)

    def _release(self, call: Call) -> None:
        self._waiting_count -= 1
        if not self._waiting_count:
            self.on_waiting(False)
        if call.is_started:
            self._free_bytes += call.room
        # A call that fails at once releases its room here, inside the loop that started it.
        if self._without_room and not self._is_starting:
            self._is_starting = True
            try:
                self._start_waiting()
            finally:
                self._is_starting = False

    def _start_waiting(self) -> None:
        """Start the calls that have room now, in their order."""
        while self._without_room and self._without_room[0].room <= self._free_bytes:
            waiting = self._without_room.popleft()
            if not waiting.is_done:
                self._start(waiting)

    # -- tasks -------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Connect to brokers and keep time until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                self._has_news = trio.Event()
                names, self._to_connect = self._to_connect, []
                for name in names:
                    nursery.start_soon(self._serve, name)
                with trio.move_on_at(min(map(self._expire, [*self._calls]), default=math.inf)):
                    await self._has_news.wait()

    def _expire(self, caller: str) -> float:
        """End a caller's requests without an answer in time; returns when the next one ends."""
        calls, now = self._calls[caller], trio.current_time()
        while calls and (calls[0].is_done or calls[0].deadline <= now):
            call = calls.popleft()
            if not call.is_done:
                if call.forget is not None:
                    call.forget()
                timeout_ms = call.caller.timeout_ms or self._timeout_ms()
                self._finish(call, RequestTimeout(call.ask.peer, call.ask.code, timeout_ms))
        return calls[0].deadline if calls else math.inf

    async def _serve(self, name: str) -> None:
        """Connect to a broker, and move bytes until the connection ends."""
        peer = self._brokers[name]
        problem: HeadraceError = ConnectFailed(name, "this broker stops")
        try:
            await self._connect_to(name, peer)
        except HeadraceError as error:
            problem = error
            if peer.connection is None:
                self._outages.failed(f"broker {name}", error)
                peer.pause(error)
        finally:
            peer.connection, peer.is_running, peer.address = None, False, ""
            waiting, peer.waiting = peer.waiting, deque()
            for call in waiting:
                self._finish(call, problem)

    async def _connect_to(self, name: str, peer: _Peer) -> None:
        peer.address = await self.find_address(name)
        async with connected(self._connect, peer.address, self._credentials) as connection:
            peer.connection, peer.pause_s = connection, _PAUSE_S
            self._outages.worked(f"broker {name}")
            while peer.waiting:
                call = peer.waiting.popleft()
                if not call.is_done:
                    self._submit(connection, call)
            await trio.sleep_forever()
