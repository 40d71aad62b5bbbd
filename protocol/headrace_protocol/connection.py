"""The client side of a connection, free of I/O: requests out, events in.

A driver moves the bytes: it sends the buffers that ``request`` returns and passes received bytes to
``receive_data``. Source: docs/protocol.md "Connection".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from headrace_protocol.codes import RequestCode
from headrace_protocol.command import (
    FLAG_ONEWAY,
    FLAG_RESPONSE,
    Command,
    header_fields,
    to_text_fields,
)
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

# Returns a request's fields with its signature.
Sign = Callable[[Mapping[str, str], Buffer], dict[str, str]]

_OPAQUE_MASK = 0x7FFFFFFF


class ResponseReceived(NamedTuple, Generic[Waiter]):
    """The response to a request of ours; ``body`` is a view of the received bytes."""

    waiter: Waiter
    command: Command
    body: memoryview


class RequestReceived(NamedTuple):
    """A request from the peer: a notice, or a request to answer with ``respond``."""

    serialize_type: int
    command: Command
    body: memoryview


Event = ResponseReceived[Waiter] | RequestReceived


class Connection(Generic[Waiter]):
    """Matches the responses of one connection to the waiters for them.

    serialize_type: the initial header codec. With JSON, the first request announces that we support
        MSGPACK; once a headrace server has announced the same, headers are sent as MSGPACK.
    peer_is_headrace: whether the peer has announced that it is headrace; known with its first
        response.
    sign: adds a signature to the fields of each request, if any.
    """

    def __init__(self, serialize_type: SerializeType = SerializeType.JSON) -> None:
        self.serialize_type = serialize_type
        self.peer_is_headrace = serialize_type is SerializeType.MSGPACK
        self.sign: Sign | None = None
        self._reader = FrameReader()
        self._waiting: dict[int, Waiter] = {}
        self._last_opaque = 0
        self._mark_next = serialize_type is SerializeType.JSON

    @property
    def waiting_count(self) -> int:
        """Number of requests without a response yet."""
        return len(self._waiting)

    def request(
        self,
        code: int,
        header: msgspec.Struct | None = None,
        body: Buffer = b"",
        *,
        waiter: Waiter,
    ) -> tuple[int, list[Buffer]]:
        """Encode a request and keep ``waiter`` until its response arrives.

        Returns the opaque (for ``forget``) and the buffers to send, in order.
        Raises LocalProtocolError if the request does not fit a frame.
        """
        opaque = self._next_opaque()
        buffers = self._encode(code, opaque, 0, header, body)
        self._waiting[opaque] = waiter
        return opaque, buffers

    def expect(self, waiter: Waiter) -> int:
        """Keep ``waiter`` for a request that the caller encodes with the returned opaque."""
        opaque = self._next_opaque()
        self._waiting[opaque] = waiter
        return opaque

    def signed(self, buffers: list[Buffer]) -> list[Buffer]:
        """A frame that the caller has encoded, signed if requests are."""
        if self.sign is None:
            return buffers
        [(serialize_type, header, body)] = FrameReader().feed(b"".join(buffers))
        command = decode_header(serialize_type, header)
        frame = encode_frame(
            serialize_type,
            command.code,
            command.opaque,
            flag=command.flag,
            fields=self.sign(command.ext(), body),
            body_bytes=len(body),
        )
        return [frame, body] if body else [frame]

    def oneway(
        self, code: int, header: msgspec.Struct | None = None, body: Buffer = b""
    ) -> list[Buffer]:
        """Encode a one-way request, which gets no response; returns the buffers to send."""
        return self._encode(code, self._next_opaque(), FLAG_ONEWAY, header, body)

    def respond(
        self,
        request: RequestReceived,
        code: int,
        header: msgspec.Struct | None = None,
        body: Buffer = b"",
        remark: str | None = None,
    ) -> list[Buffer]:
        """Encode the response to a request of the peer, in the codec of that request."""
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
        """Stop waiting, such as after a timeout. A late response is discarded."""
        self._waiting.pop(opaque, None)

    def receive_data(self, data: Buffer) -> list[Event[Waiter]]:
        """Process received bytes; returns the events that they complete, in order.

        Raises RemoteProtocolError if the bytes are not the remoting protocol: close the connection.
        """
        return self._events(self._reader.feed(data))

    def room(self) -> memoryview | None:
        """A buffer for the rest of a large frame; see ``FrameReader.room``."""
        return self._reader.room()

    def received(self, count: int) -> list[Event[Waiter]]:
        """As ``receive_data``, for ``count`` bytes received at the start of ``room``."""
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
        """Clear and return all waiters, after the connection has ended."""
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
        if self.sign is not None:
            fields = self.sign(to_text_fields(fields or {}), body)
        serialize_type = self.serialize_type
        if serialize_type is SerializeType.ROCKETMQ and code > _ROCKETMQ_CODE_MAX:
            serialize_type = SerializeType.JSON
        frame = encode_frame(
            serialize_type, code, opaque, flag=flag, fields=fields, body_bytes=len(body)
        )
        return [frame, body] if body else [frame]


# Larger codes do not fit the 16 bits in a ROCKETMQ header.
_ROCKETMQ_CODE_MAX = 0x7FFF
