"""The serving side of the protocol, without a socket: request codes to functions, errors to codes.

Both daemons answer through it; ``drivers.server`` moves the bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.command import FLAG_ONEWAY, FLAG_RESPONSE, Command, header_fields
from headrace_protocol.errors import LocalProtocolError, RequestError
from headrace_protocol.header_codecs import (
    HEADRACE_MARK,
    SerializeType,
    decode_header,
    encode_frame,
)

if TYPE_CHECKING:
    from headrace_protocol.frame import Frame

Header = TypeVar("Header", bound=msgspec.Struct)
Buffer = bytes | bytearray | memoryview


class Channel(Protocol):
    """A connected client, as a service sees it.

    address: "host:port" of the client.
    host_bytes: the same as records hold it: 4 or 16 bytes of address, 4 of port, big-endian.
    attachments: what the services remember about this client, by a name of their own.
    """

    address: str
    host_bytes: bytes
    is_greeted: bool
    attachments: dict[str, Any]

    @property
    def is_open(self) -> bool:
        """Whether what is written can still reach the client."""

    def write(self, *buffers: Buffer) -> None:
        """Queue bytes; they are sent when the batch of requests at hand is done."""


class Reply(msgspec.Struct, gc=False):
    """An answer on its way out.

    body: buffers, sent in order without being joined or copied.
    """

    header: msgspec.Struct | None = None
    body: tuple[Buffer, ...] = ()
    code: int = ResponseCode.SUCCESS
    remark: str | None = None


class Request(msgspec.Struct, gc=False):
    """One request with the channel that it came from.

    body: lives until the function that got the request returns.
    """

    channel: Channel
    serialize_type: int
    command: Command
    body: memoryview

    def header(self, header_type: type[Header]) -> Header:
        """The extension fields; see ``Command.header``."""
        return self.command.header(header_type)

    def reply(self, reply: Reply) -> None:
        """Answer, in the codec that the request came in; nothing when it wants no answer."""
        command = self.command
        if command.is_oneway:
            return
        frame = encode_frame(
            self.serialize_type,
            reply.code,
            command.opaque,
            flag=FLAG_RESPONSE,
            fields=header_fields(reply.header),
            remark=reply.remark,
            body_bytes=sum(map(len, reply.body)),
        )
        self.channel.write(frame, *reply.body)


# Returns the answer, or None when it has answered itself or holds the request to answer later.
RequestFunction = Callable[[Request], Reply | None]
# Serves requests of one client that came at once; hands on to ``Registry.serve`` what it can't.
ReadyFunction = Callable[["Channel", "list[Frame]"], None]


class Registry:
    """Request codes and the functions that serve them.

    unexpected: told of an exception that no function should let out: request and exception.
    """

    def __init__(self, unexpected: Callable[[Request, Exception], None]) -> None:
        self._functions: dict[int, RequestFunction] = {}
        self._unexpected = unexpected
        self._ready_start = b""
        self._ready_function: ReadyFunction | None = None

    def route(self, code: RequestCode, function: RequestFunction) -> None:
        """Let ``function`` serve ``code``."""
        assert code not in self._functions, code
        self._functions[code] = function

    def route_ready(self, header_start: bytes, function: ReadyFunction) -> None:
        """Let ``function`` serve, many at a time, requests whose JSON header begins like this."""
        self._ready_start = header_start
        self._ready_function = function

    def handle(self, channel: Channel, frames: list[Frame]) -> None:
        """Serve what one client sent at once; every request is answered, one-way or held.

        Raises RemoteProtocolError for a header that can't be read: close the channel then.
        """
        function = self._ready_function
        if function is None or not channel.is_greeted:
            for frame in frames:
                self.serve(channel, frame)
            return
        start, start_bytes = self._ready_start, len(self._ready_start)
        ready: list[Frame] = []
        for frame in frames:
            if frame[1][:start_bytes] == start and frame[0] == SerializeType.JSON:
                ready.append(frame)
                continue
            if ready:
                function(channel, ready)
                ready = []
            self.serve(channel, frame)
        if ready:
            function(channel, ready)

    def serve(self, channel: Channel, frame: Frame) -> None:
        """Serve one frame. Raises RemoteProtocolError as ``handle``."""
        serialize_type, header, body = frame
        command = decode_header(serialize_type, header)
        if command.is_response:
            return
        if not channel.is_greeted:
            _greet(channel, command)
        self._serve(Request(channel, serialize_type, command, body))

    def _serve(self, request: Request) -> None:
        try:
            function = self._functions.get(request.command.code)
            reply = _unknown(request) if function is None else function(request)
        except RequestError as error:
            reply = Reply(code=error.code, remark=error.remark)
        except msgspec.MsgspecError as error:
            reply = Reply(code=ResponseCode.INVALID_PARAMETER, remark=_malformed(request, error))
        except Exception as error:  # noqa: BLE001 - one bad request must not end the daemon
            self._unexpected(request, error)
            reply = Reply(
                code=ResponseCode.SYSTEM_ERROR,
                remark=f"{type(error).__name__}: {error} (see the log of this daemon)",
            )
        if reply is not None:
            _send(request, reply)


def _send(request: Request, reply: Reply) -> None:
    try:
        request.reply(reply)
    except LocalProtocolError as error:
        request.reply(Reply(code=ResponseCode.SYSTEM_ERROR, remark=f"the answer: {error}"))


def notice(code: RequestCode, header: msgspec.Struct | None = None) -> bytes:
    """A one-way request from a daemon to its client; in JSON, which every client reads."""
    return encode_frame(SerializeType.JSON, code, 0, flag=FLAG_ONEWAY, fields=header_fields(header))


def _greet(channel: Channel, command: Command) -> None:
    channel.is_greeted = True
    # Fields that can't be read are for the request's function to refuse.
    with contextlib.suppress(msgspec.ValidationError):
        if HEADRACE_MARK in command.ext():
            channel.write(notice(RequestCode.HEADRACE_HELLO))


def _unknown(request: Request) -> Reply:
    code = request.command.code
    return Reply(
        code=ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
        remark=f" request type {code} not supported",
    )


def _malformed(request: Request, error: msgspec.MsgspecError) -> str:
    code = request.command.code
    name = RequestCode(code).name if code in _KNOWN_CODES else "?"
    return f"malformed request {name} ({code}): {error}"


_KNOWN_CODES = frozenset(RequestCode)
