"""The client's side of a connection, without a socket: requests out, events in.

A driver owns the bytes: it sends what ``request`` returns and hands what it received to
``receive_data``. Source: docs/protocol.md "Connection".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from headrace_protocol.codes import RequestCode
from headrace_protocol.command import FLAG_ONEWAY, FLAG_RESPONSE, Command, header_fields
from headrace_protocol.frame import Buffer, Frame, FrameReader
from headrace_protocol.header_codecs import (
    HEADRACE_MARK,
    SerializeType,
    decode_header,
    encode_frame,
)

if TYPE_CHECKING:
    import msgspec

Waiter = TypeVar("Waiter")

_OPAQUE_MASK = 0x7FFFFFFF


class ResponseReceived(NamedTuple, Generic[Waiter]):
    """The answer to a request of ours; ``body`` is a view of the bytes that were received."""

    waiter: Waiter
    command: Command
    body: memoryview


class RequestReceived(NamedTuple):
    """The other side asks something of us (a notice, or a request that wants ``respond``)."""

    serialize_type: int
    command: Command
    body: memoryview


Event = ResponseReceived[Waiter] | RequestReceived


class Connection(Generic[Waiter]):
    """Pairs the responses of one connection with what waits for them.

    serialize_type: header codec to begin with. With JSON, the first request says that we know
    MSGPACK; once a server of ours has answered that it does too, the headers are MSGPACK.
    peer_is_headrace: whether the other side has shown that it is ours; known with its first answer.
    """

    def __init__(self, serialize_type: SerializeType = SerializeType.JSON) -> None:
        self.serialize_type = serialize_type
        self.peer_is_headrace = serialize_type is SerializeType.MSGPACK
        self._reader = FrameReader()
        self._waiting: dict[int, Waiter] = {}
        self._last_opaque = 0
        self._mark_next = serialize_type is SerializeType.JSON

    @property
    def waiting_count(self) -> int:
        """Requests sent whose response has not come."""
        return len(self._waiting)

    def request(
        self,
        code: int,
        header: msgspec.Struct | None = None,
        body: Buffer = b"",
        *,
        waiter: Waiter,
    ) -> tuple[int, list[Buffer]]:
        """Encode a request and remember ``waiter`` until its response comes.

        Returns the opaque (for ``forget``) and the buffers to send, in order.
        Raises LocalProtocolError when it does not fit a frame.
        """
        opaque = self._next_opaque()
        buffers = self._encode(code, opaque, 0, header, body)
        self._waiting[opaque] = waiter
        return opaque, buffers

    def expect(self, waiter: Waiter) -> int:
        """Remember ``waiter`` for a request that the caller encodes, with the opaque returned."""
        opaque = self._next_opaque()
        self._waiting[opaque] = waiter
        return opaque

    def oneway(
        self, code: int, header: msgspec.Struct | None = None, body: Buffer = b""
    ) -> list[Buffer]:
        """Encode a request that gets no response; returns the buffers to send."""
        return self._encode(code, self._next_opaque(), FLAG_ONEWAY, header, body)

    def respond(
        self,
        request: RequestReceived,
        code: int,
        header: msgspec.Struct | None = None,
        body: Buffer = b"",
        remark: str | None = None,
    ) -> list[Buffer]:
        """Encode the response to a request of the other side, in the codec that it used."""
        frame = encode_frame(
            request.serialize_type,
            code,
            request.command.opaque,
            flag=FLAG_RESPONSE,
            fields=header_fields(header),
            remark=remark,
            body_bytes=len(body),
        )
        return [frame, body] if body else [frame]

    def forget(self, opaque: int) -> None:
        """Stop waiting (a time-out): the response, should it come, is dropped."""
        self._waiting.pop(opaque, None)

    def receive_data(self, data: Buffer) -> list[Event[Waiter]]:
        """Take received bytes and return what they complete, in order.

        Raises RemoteProtocolError when they are not the remoting protocol: close then.
        """
        return self._events(self._reader.feed(data))

    def room(self) -> memoryview | None:
        """Where a large frame goes on; see ``FrameReader.room``."""
        return self._reader.room()

    def received(self, count: int) -> list[Event[Waiter]]:
        """As ``receive_data``, for ``count`` bytes that were received to the start of ``room``."""
        return self._events(self._reader.received(count))

    def _events(self, frames: list[Frame]) -> list[Event[Waiter]]:
        events: list[Event[Waiter]] = []
        for serialize_type, header, body in frames:
            command = decode_header(serialize_type, header)
            if command.is_response:
                waiter = self._waiting.pop(command.opaque, None)
                if waiter is not None:
                    events.append(ResponseReceived(waiter, command, memoryview(body)))
            elif command.code == RequestCode.HEADRACE_HELLO:
                self.serialize_type = SerializeType.MSGPACK
                self.peer_is_headrace = True
            else:
                events.append(RequestReceived(serialize_type, command, memoryview(body)))
        return events

    def abandon(self) -> list[Waiter]:
        """The connection is gone: return everything that still waits, and forget it."""
        waiting = list(self._waiting.values())
        self._waiting.clear()
        return waiting

    def _next_opaque(self) -> int:
        self._last_opaque = (self._last_opaque + 1) & _OPAQUE_MASK
        return self._last_opaque

    def _encode(
        self, code: int, opaque: int, flag: int, header: msgspec.Struct | None, body: Buffer
    ) -> list[Buffer]:
        fields: dict[str, Any] | None = header_fields(header)
        if self._mark_next:
            self._mark_next = False
            fields = {**(fields or {}), HEADRACE_MARK: "1"}
        serialize_type = self.serialize_type
        if serialize_type is SerializeType.ROCKETMQ and code > _ROCKETMQ_CODE_MAX:
            serialize_type = SerializeType.JSON
        frame = encode_frame(
            serialize_type, code, opaque, flag=flag, fields=fields, body_bytes=len(body)
        )
        return [frame, body] if body else [frame]


# Codes above do not survive the ROCKETMQ header's 16 bits.
_ROCKETMQ_CODE_MAX = 0x7FFF
