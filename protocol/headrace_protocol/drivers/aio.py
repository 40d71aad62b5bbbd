"""A client's connection for trio and asyncio, through anyio.

Each connection has one reader task and one writer task. Requests queue bytes without waiting; the
writer joins all queued bytes into one send, so a burst of requests costs one system call.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

import anyio

from headrace_protocol.connection import Connection, Event, RequestReceived
from headrace_protocol.drivers.address import split_address
from headrace_protocol.drivers.errors import (
    ConnectFailed,
    HeadraceError,
    RequestTimeout,
    connection_ended,
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
    from headrace_protocol.rights.credentials import Credentials

# Called in the reader task with command and body, or with None, None and the error.
Callback = Callable[["Command | None", "memoryview | None", "HeadraceError | None"], None]
# Returns the buffers of a whole request frame with the given opaque.
Encode = Callable[[int], list[Buffer]]
RequestHandler = Callable[["AsyncConnection", RequestReceived], None]
Connect = Callable[[str], Awaitable["ByteStream"]]

RECEIVE_BYTES = 64 * 1024
# Larger buffers are sent on their own: a system call costs less than the copy.
_JOIN_BYTES_MAX = 64 * 1024
# Limit of unsent responses; a peer that sends requests without reading gets no more.
_UNSENT_RESPONSES_BYTES_MAX = 1024 * 1024
_CONNECT_TIMEOUT_S = 5.0
_STREAM_ERRORS = (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError)


async def connect_tcp(address: str) -> ByteStream:
    """A TCP connection to ``host:port``, without Nagle's algorithm."""
    return await SocketStream.connect(*split_address(address))


async def open_stream(connect: Connect, address: str) -> ByteStream:
    """Connect to ``address`` within a time limit. Raises ConnectFailed."""
    try:
        with anyio.fail_after(_CONNECT_TIMEOUT_S):
            return await connect(address)
    except TimeoutError:
        raise ConnectFailed(address, f"no answer within {_CONNECT_TIMEOUT_S:g} s") from None
    except (OSError, ValueError, anyio.BrokenResourceError) as error:
        raise ConnectFailed(address, _cause(error)) from error


class AsyncConnection:
    """Requests and responses over one stream, while ``run`` is running.

    address: the peer's name in errors.
    on_request: called in the reader task for each request of the peer.
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
        self._unsent_response_bytes = 0
        self._fills: list[Callable[[], None]] = []
        self._something_to_send: anyio.Event | None = None
        self._greeted = anyio.Event()
        self._end: object = None

    @property
    def is_open(self) -> bool:
        """True while requests can be sent."""
        return self._end is None

    @property
    def peer_is_headrace(self) -> bool:
        """True once the peer has announced that it is headrace; see ``greeted``."""
        return self._connection.peer_is_headrace

    @property
    def certificate(self) -> bytes | None:
        """The certificate that the peer has shown, DER; None without TLS."""
        from anyio.streams.tls import TLSAttribute

        shown: bytes | None = self._stream.extra(TLSAttribute.peer_certificate_binary, None)  # noqa: S610
        return shown

    def sign_as(self, credentials: Credentials) -> None:
        """Sign each request from now on."""
        self._connection.sign = credentials.signed

    @property
    def is_greeted(self) -> bool:
        """True once it is known if the peer is headrace."""
        return self._greeted.is_set()

    async def greeted(self, timeout_ms: float) -> None:
        """Wait for the first response, with which it is known if the peer is headrace.

        Returns without one if the connection ends or after ``timeout_ms``.
        """
        with anyio.move_on_after(timeout_ms / 1000):
            await self._greeted.wait()

    async def run(self) -> None:
        """Move bytes until the connection ends, then fail every pending request."""
        end: object = "this client closed it"
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._write, tasks.cancel_scope)
                end = await self._read()
                # Before the writer's error, which says less.
                self._end = self._end or end
                tasks.cancel_scope.cancel()
        finally:
            await self.close(end)

    async def close(self, reason: object = "this client closed it") -> None:
        """Fail every pending request and close the stream; ``run`` does so at its end."""
        self._fail(reason)
        # Forcefully: after a half-sent frame there is no graceful close.
        await anyio.aclose_forcefully(self._stream)

    async def request(
        self,
        code: int,
        header: msgspec.Struct | None = None,
        body: Buffer = b"",
        *,
        timeout_ms: float,
    ) -> Response:
        """Send a request and wait for its response, whatever its code.

        Raises RequestTimeout, ConnectionLost, LocalProtocolError (too large for a frame).
        """
        return await self.begin(code, header, body).response(timeout_ms)

    def begin(self, code: int, header: msgspec.Struct | None = None, body: Buffer = b"") -> Answer:
        """Queue a request; returns a handle for its response.

        Raises ConnectionLost, LocalProtocolError (too large for a frame).
        """
        answer = Answer(self, code)
        answer.opaque = self.submit(code, header, body, answer)
        return answer

    def begin_encoded(self, code: int, encode: Encode) -> Answer:
        """Queue a request that the caller encodes; returns a handle for its response.

        Raises ConnectionLost.
        """
        answer = Answer(self, code)
        answer.opaque = self.submit_encoded(encode, answer)
        return answer

    def submit(
        self, code: int, header: msgspec.Struct | None, body: Buffer, callback: Callback
    ) -> int:
        """Queue a request without waiting; ``callback`` gets its response, exactly once.

        Returns the opaque, for ``forget``. Raises ConnectionLost, LocalProtocolError.
        """
        self.check_open()
        opaque, buffers = self._connection.request(code, header, body, waiter=callback)
        self.send_soon(*buffers)
        return opaque

    def submit_encoded(self, encode: Encode, callback: Callback) -> int:
        """As ``submit``, with a frame encoded by the caller. ``encode`` must not raise."""
        self.check_open()
        opaque = self._connection.expect(callback)
        self.send_soon(*self._connection.signed(encode(opaque)))
        return opaque

    def send_soon(self, *buffers: Buffer) -> None:
        """Queue whole frames for the writer, which joins all queued frames into one send."""
        self._outgoing += buffers
        self._wake_writer()

    def before_write(self, fill: Callable[[], None]) -> None:
        """Call ``fill`` once the writer is free; the next write includes what it submits.

        Data that accumulates while the writer is busy can thus leave in one request. If the
        connection ends first, ``fill`` is called all the same and finds it closed.
        """
        self._fills.append(fill)
        self._wake_writer()

    def _wake_writer(self) -> None:
        if self._something_to_send:
            self._something_to_send.set()
            self._something_to_send = None

    def forget(self, opaque: int) -> None:
        """Stop waiting for a response: its callback will not be called."""
        self._connection.forget(opaque)

    def oneway(self, code: int, header: msgspec.Struct | None = None, body: Buffer = b"") -> None:
        """Queue a one-way request. Raises ConnectionLost, LocalProtocolError."""
        self.check_open()
        self.send_soon(*self._connection.oneway(code, header, body))

    def respond(
        self,
        request: RequestReceived,
        code: int,
        header: msgspec.Struct | None = None,
        body: Buffer = b"",
        remark: str | None = None,
    ) -> None:
        """Respond to a request of the peer, unless too many responses are still unsent."""
        if self._unsent_response_bytes < _UNSENT_RESPONSES_BYTES_MAX:
            buffers = self._connection.respond(request, code, header, body, remark)
            self._unsent_response_bytes += sum(map(len, buffers))
            self.send_soon(*buffers)

    def check_open(self) -> None:
        """Raise ConnectionLost or WrongServer if the connection has ended."""
        if not self.is_open:
            raise connection_ended(self.address, self._end)

    async def _write(self, scope: anyio.CancelScope) -> None:
        try:
            while True:
                if not (self._outgoing or self._fills):
                    self._something_to_send = anyio.Event()
                    await self._something_to_send.wait()
                self._fill()
                buffers, self._outgoing = self._outgoing, []
                self._unsent_response_bytes = 0
                for piece in _joined(buffers):
                    await self._stream.send(piece)
        except _STREAM_ERRORS as error:
            self._end = self._end or _cause(error)
            scope.cancel()

    def _fill(self) -> None:
        fills, self._fills = self._fills, []
        for fill in fills:
            fill()

    async def _read(self) -> object:
        """Handle received events; returns the reason for the connection's end."""
        while True:
            try:
                events = await self._receive()
            except anyio.EndOfStream:
                return "the peer closed it"
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
            callback(None, None, connection_ended(self.address, self._end))
        self._fill()
        self._greeted.set()


def _joined(buffers: list[Buffer]) -> Iterator[Any]:
    """The same bytes in few pieces. Streams accept any buffer, despite anyio's type hints."""
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
    """The underlying error, which anyio wraps."""
    return error.__cause__ or error


class Answer:
    """A handle for the response to a pending request."""

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
        """Wait for the response, whatever its code. Raises RequestTimeout, ConnectionLost."""
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
        """Stop waiting. A late response is discarded."""
        self._connection.forget(self.opaque)
