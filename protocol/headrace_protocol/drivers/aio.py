"""A client's connection for trio and asyncio, through anyio.

One reader and one writer task per connection. Requests queue up bytes without waiting; the writer
joins all that are there into one send, so a burst of requests costs one system call.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import anyio

from headrace_protocol.connection import Body, Connection, RequestReceived
from headrace_protocol.drivers.address import split_address
from headrace_protocol.drivers.errors import (
    ConnectFailed,
    ConnectionLost,
    HeadraceError,
    RequestTimeout,
)
from headrace_protocol.drivers.response import Response
from headrace_protocol.errors import RemoteProtocolError
from headrace_protocol.header_codecs import SerializeType

if TYPE_CHECKING:
    import msgspec
    from anyio.abc import ByteStream

    from headrace_protocol.command import Command

# Called in the reader task with command and body, or with None, None and what went wrong.
Callback = Callable[["Command | None", "memoryview | None", "HeadraceError | None"], None]
# Given the opaque, the buffers of a whole request frame.
Encode = Callable[[int], list[Body]]
RequestHandler = Callable[["AsyncConnection", RequestReceived], None]
Connect = Callable[[str], Awaitable["ByteStream"]]

RECEIVE_BYTES_MIN = 64 * 1024
RECEIVE_BYTES_MAX = 1024 * 1024
_CONNECT_TIMEOUT_S = 5.0
_STREAM_ERRORS = (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError)


async def connect_tcp(address: str) -> ByteStream:
    """A TCP connection to ``host:port``; anyio turns Nagle's algorithm off."""
    host, port = split_address(address)
    return await anyio.connect_tcp(host, port)


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
        self._outgoing: list[Body] = []
        self._something_to_send: anyio.Event | None = None
        self._end: object = None

    @property
    def is_open(self) -> bool:
        """Whether requests can still be made."""
        return self._end is None

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
        body: Body = b"",
        *,
        timeout_ms: float,
    ) -> Response:
        """Ask and wait for the answer, whatever its code.

        Raises RequestTimeout, ConnectionLost, LocalProtocolError (too large for a frame).
        """
        answer = _Answer()
        opaque = self.submit(code, header, body, answer)
        return await self._wait(code, opaque, answer, timeout_ms)

    async def request_encoded(self, code: int, encode: Encode, *, timeout_ms: float) -> Response:
        """Like ``request`` for a caller that encodes its frame itself."""
        answer = _Answer()
        opaque = self.submit_encoded(encode, answer)
        return await self._wait(code, opaque, answer, timeout_ms)

    def submit(
        self, code: int, header: msgspec.Struct | None, body: Body, callback: Callback
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

    def send_soon(self, *buffers: Body) -> None:
        """Queue whole frames for the writer, which joins all that wait into one send."""
        self._outgoing += buffers
        if self._something_to_send:
            self._something_to_send.set()
            self._something_to_send = None

    def forget(self, opaque: int) -> None:
        """Stop waiting: the callback will not be called."""
        self._connection.forget(opaque)

    def oneway(self, code: int, header: msgspec.Struct | None = None, body: Body = b"") -> None:
        """Queue a request that gets no answer. Raises ConnectionLost, LocalProtocolError."""
        self._check_open()
        self.send_soon(*self._connection.oneway(code, header, body))

    def respond(
        self,
        request: RequestReceived,
        code: int,
        header: msgspec.Struct | None = None,
        body: Body = b"",
        remark: str | None = None,
    ) -> None:
        """Answer a request of the other side."""
        self.send_soon(*self._connection.respond(request, code, header, body, remark))

    async def _wait(self, code: int, opaque: int, answer: _Answer, timeout_ms: float) -> Response:
        with anyio.move_on_after(timeout_ms / 1000):
            try:
                await answer.arrived.wait()
            finally:
                self._connection.forget(opaque)
        if answer.error:
            raise answer.error
        if answer.command is None or answer.body is None:
            raise RequestTimeout(self.address, code, timeout_ms)
        return Response(self.address, code, answer.command, answer.body)

    def _check_open(self) -> None:
        if not self.is_open:
            raise ConnectionLost(self.address, self._end)

    async def _write(self, scope: anyio.CancelScope) -> None:
        try:
            while True:
                if not self._outgoing:
                    self._something_to_send = anyio.Event()
                    await self._something_to_send.wait()
                buffers, self._outgoing = self._outgoing, []
                await self._stream.send(b"".join(buffers))
        except _STREAM_ERRORS as error:
            self._end = _cause(error)
            scope.cancel()

    async def _read(self) -> object:
        """Handle what arrives; returns why it ended."""
        receive_bytes = RECEIVE_BYTES_MIN
        while True:
            try:
                data = await self._stream.receive(receive_bytes)
            except anyio.EndOfStream:
                return "the other side closed it"
            except _STREAM_ERRORS as error:
                return _cause(error)
            try:
                events = self._connection.receive_data(data)
            except RemoteProtocolError as error:
                return error
            # Large answers come in few pieces, small ones do not cost a large buffer each.
            full = len(data) == receive_bytes
            receive_bytes = min(receive_bytes * 2, RECEIVE_BYTES_MAX) if full else RECEIVE_BYTES_MIN
            for event in events:
                if isinstance(event, RequestReceived):
                    if self._on_request:
                        self._on_request(self, event)
                else:
                    event.waiter(event.command, event.body, None)

    def _fail(self, end: object) -> None:
        self._end = self._end or end
        for callback in self._connection.abandon():
            callback(None, None, ConnectionLost(self.address, self._end))


def _cause(error: Exception) -> object:
    """The reason that people know, from inside anyio's wrapping."""
    return error.__cause__ or error


class _Answer:
    """Waits for one response."""

    __slots__ = ("arrived", "body", "command", "error")

    def __init__(self) -> None:
        self.arrived = anyio.Event()
        self.command: Command | None = None
        self.body: memoryview | None = None
        self.error: HeadraceError | None = None

    def __call__(self, command: Any, body: Any, error: Any) -> None:
        self.command, self.body, self.error = command, body, error
        self.arrived.set()
