"""A client's connection for trio and asyncio, through anyio.

One reader and one writer task per connection. Requests queue up bytes without waiting; the writer
joins all that are there into one send, so a burst of requests costs one system call.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

import anyio

from headrace_protocol.connection import Connection, Event, RequestReceived
from headrace_protocol.drivers.address import split_address
from headrace_protocol.drivers.errors import (
    ConnectFailed,
    ConnectionLost,
    HeadraceError,
    RequestTimeout,
)
from headrace_protocol.drivers.response import Response
from headrace_protocol.drivers.socket_stream import SocketStream
from headrace_protocol.errors import RemoteProtocolError
from headrace_protocol.frame import Buffer
from headrace_protocol.header_codecs import SerializeType

if TYPE_CHECKING:
    import msgspec
    from anyio.abc import ByteStream

    from headrace_protocol.command import Command

# Called in the reader task with command and body, or with None, None and what went wrong.
Callback = Callable[["Command | None", "memoryview | None", "HeadraceError | None"], None]
# Given the opaque, the buffers of a whole request frame.
Encode = Callable[[int], list[Buffer]]
RequestHandler = Callable[["AsyncConnection", RequestReceived], None]
Connect = Callable[[str], Awaitable["ByteStream"]]

RECEIVE_BYTES = 64 * 1024
# What is larger is sent by itself: another system call costs less than the copy.
_JOIN_BYTES_MAX = 64 * 1024
# Unsent answers; a peer that keeps asking without reading gets no more.
_ANSWERS_BYTES_MAX = 1024 * 1024
_CONNECT_TIMEOUT_S = 5.0
_STREAM_ERRORS = (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError)


async def connect_tcp(address: str) -> ByteStream:
    """A TCP connection to ``host:port``, without Nagle's algorithm."""
    return await SocketStream.connect(*split_address(address))


async def open_stream(connect: Connect, address: str) -> ByteStream:
    """``connect(address)`` within a time limit. Raises ConnectFailed."""
    try:
        with anyio.fail_after(_CONNECT_TIMEOUT_S):
            return await connect(address)
    except TimeoutError:
        raise ConnectFailed(address, f"no answer within {_CONNECT_TIMEOUT_S:g} s") from None
    except (OSError, ValueError, anyio.BrokenResourceError) as error:
        raise ConnectFailed(address, _cause(error)) from error


class AsyncConnection:
    """Requests and their answers over one stream, once ``run`` is running.

    address: name of the other end in errors.
    on_request: called in the reader task for each request that the other side makes.
    """

    def __init__(
        self,
        stream: ByteStream,
        address: str,
        on_request: RequestHandler | None = None,
        serialize_type: SerializeType = SerializeType.JSON,
    ) -> None:
        self.address = address
        self._stream = stream
        self._on_request = on_request
        self._connection: Connection[Callback] = Connection(serialize_type)
        self._outgoing: list[Buffer] = []
        self._answers_bytes = 0
        self._fills: list[Callable[[], None]] = []
        self._something_to_send: anyio.Event | None = None
        self._greeted = anyio.Event()
        self._end: object = None

    @property
    def is_open(self) -> bool:
        """Whether requests can still be made."""
        return self._end is None

    @property
    def peer_is_headrace(self) -> bool:
        """Whether the other side has shown that it is ours; see ``greeted``."""
        return self._connection.peer_is_headrace

    @property
    def is_greeted(self) -> bool:
        """Whether it is known of what kind the other side is."""
        return self._greeted.is_set()

    async def greeted(self, timeout_ms: float) -> None:
        """Wait for the first answer, which tells of what kind the other side is.

        Returns without one when the connection ends or ``timeout_ms`` have passed.
        """
        with anyio.move_on_after(timeout_ms / 1000):
            await self._greeted.wait()

    async def run(self) -> None:
        """Move bytes until the connection ends; then every request that waits fails."""
        end: object = "this client closed it"
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._write, tasks.cancel_scope)
                end = await self._read()
                tasks.cancel_scope.cancel()
        finally:
            self._fail(end)
            # Not graceful: a half-sent frame cannot be taken back.
            await anyio.aclose_forcefully(self._stream)

    async def request(
        self,
        code: int,
        header: msgspec.Struct | None = None,
        body: Buffer = b"",
        *,
        timeout_ms: float,
    ) -> Response:
        """Ask and wait for the answer, whatever its code.

        Raises RequestTimeout, ConnectionLost, LocalProtocolError (too large for a frame).
        """
        answer = Answer(self, code)
        answer.opaque = self.submit(code, header, body, answer)
        return await answer.response(timeout_ms)

    def begin_encoded(self, code: int, encode: Encode) -> Answer:
        """Queue a request that the caller encodes, and return what its answer will come to.

        Raises ConnectionLost.
        """
        answer = Answer(self, code)
        answer.opaque = self.submit_encoded(encode, answer)
        return answer

    def submit(
        self, code: int, header: msgspec.Struct | None, body: Buffer, callback: Callback
    ) -> int:
        """Queue a request and return at once; ``callback`` gets its answer, exactly once.

        Returns the number to ``forget`` it by. Raises ConnectionLost, LocalProtocolError.
        """
        self._check_open()
        opaque, buffers = self._connection.request(code, header, body, waiter=callback)
        self.send_soon(*buffers)
        return opaque

    def submit_encoded(self, encode: Encode, callback: Callback) -> int:
        """Like ``submit`` for a caller that encodes its frame itself; it must not raise."""
        self._check_open()
        opaque = self._connection.expect(callback)
        self.send_soon(*encode(opaque))
        return opaque

    def send_soon(self, *buffers: Buffer) -> None:
        """Queue whole frames for the writer, which joins all that wait into one send."""
        self._outgoing += buffers
        self._wake_writer()

    def before_write(self, fill: Callable[[], None]) -> None:
        """Call ``fill`` once, when the writer is free: what it submits goes into that write.

        So what comes together while the writer is busy leaves in one request. When the connection
        ends before that, ``fill`` is called all the same and finds it closed.
        """
        self._fills.append(fill)
        self._wake_writer()

    def _wake_writer(self) -> None:
        if self._something_to_send:
            self._something_to_send.set()
            self._something_to_send = None

    def forget(self, opaque: int) -> None:
        """Stop waiting: the callback will not be called."""
        self._connection.forget(opaque)

    def oneway(self, code: int, header: msgspec.Struct | None = None, body: Buffer = b"") -> None:
        """Queue a request that gets no answer. Raises ConnectionLost, LocalProtocolError."""
        self._check_open()
        self.send_soon(*self._connection.oneway(code, header, body))

    def respond(
        self,
        request: RequestReceived,
        code: int,
        header: msgspec.Struct | None = None,
        body: Buffer = b"",
        remark: str | None = None,
    ) -> None:
        """Answer a request of the peer, unless too many answers are still unsent."""
        if self._answers_bytes < _ANSWERS_BYTES_MAX:
            buffers = self._connection.respond(request, code, header, body, remark)
            self._answers_bytes += sum(map(len, buffers))
            self.send_soon(*buffers)

    def _check_open(self) -> None:
        if not self.is_open:
            raise ConnectionLost(self.address, self._end)

    async def _write(self, scope: anyio.CancelScope) -> None:
        try:
            while True:
                if not (self._outgoing or self._fills):
                    self._something_to_send = anyio.Event()
                    await self._something_to_send.wait()
                self._fill()
                buffers, self._outgoing = self._outgoing, []
                self._answers_bytes = 0
                for piece in _joined(buffers):
                    await self._stream.send(piece)
        except _STREAM_ERRORS as error:
            self._end = _cause(error)
            scope.cancel()

    def _fill(self) -> None:
        fills, self._fills = self._fills, []
        for fill in fills:
            fill()

    async def _read(self) -> object:
        """Handle what arrives; returns why it ended."""
        while True:
            try:
                events = await self._receive()
            except anyio.EndOfStream:
                return "the other side closed it"
            except _STREAM_ERRORS as error:
                return _cause(error)
            except RemoteProtocolError as error:
                return error
            for event in events:
                if isinstance(event, RequestReceived):
                    if self._on_request:
                        self._on_request(self, event)
                else:
                    self._greeted.set()
                    event.waiter(event.command, event.body, None)

    async def _receive(self) -> list[Event[Callback]]:
        stream = self._stream
        if isinstance(stream, SocketStream) and (room := self._connection.room()) is not None:
            return self._connection.received(await stream.receive_into(room))
        return self._connection.receive_data(await stream.receive(RECEIVE_BYTES))

    def _fail(self, end: object) -> None:
        self._end = self._end or end
        for callback in self._connection.abandon():
            callback(None, None, ConnectionLost(self.address, self._end))
        self._fill()
        self._greeted.set()


def _joined(buffers: list[Buffer]) -> Iterator[Any]:
    """The same bytes in few pieces; streams take any buffer, whatever anyio's types say."""
    small: list[Buffer] = []
    for buffer in buffers:
        if len(buffer) > _JOIN_BYTES_MAX:
            if small:
                yield b"".join(small)
                small = []
            yield buffer
        else:
            small.append(buffer)
    if small:
        yield b"".join(small)


def _cause(error: Exception) -> object:
    """The reason that people know, from inside anyio's wrapping."""
    return error.__cause__ or error


class Answer:
    """What a request under way comes to."""

    __slots__ = ("_arrived", "_body", "_code", "_command", "_connection", "_error", "opaque")

    def __init__(self, connection: AsyncConnection, code: int) -> None:
        self._connection = connection
        self._code = code
        self._arrived = anyio.Event()
        self._command: Command | None = None
        self._body: memoryview | None = None
        self._error: HeadraceError | None = None
        self.opaque = 0

    def __call__(self, command: Any, body: Any, error: Any) -> None:  # noqa: D102 - a Callback
        self._command, self._body, self._error = command, body, error
        self._arrived.set()

    async def response(self, timeout_ms: float) -> Response:
        """Wait for it, whatever its code. Raises RequestTimeout, ConnectionLost."""
        with anyio.move_on_after(timeout_ms / 1000):
            try:
                await self._arrived.wait()
            finally:
                self.forget()
        if self._error:
            raise self._error
        address = self._connection.address
        if self._command is None or self._body is None:
            raise RequestTimeout(address, self._code, timeout_ms)
        return Response(address, self._code, self._command, self._body)

    def forget(self) -> None:
        """Stop waiting; an answer that comes after that is dropped."""
        self._connection.forget(self.opaque)
