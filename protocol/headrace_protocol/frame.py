"""The remoting frame: ``length | type and header length | header | body``.

Source: docs/protocol.md "Frame".
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Final

from headrace_protocol.errors import ForeignProtocol, LocalProtocolError, RemoteProtocolError

# Limit of the peer's netty decoder, including the four bytes of the length.
FRAME_BYTES_MAX = 16 * 1024 * 1024
# Limit before the first valid request, unless the frame's header has a code that permits a body of
# that size. A send with 32 KiB of properties may have a header of over 100 KiB: JSON escapes them.
FIRST_FRAME_BYTES_MAX = 64 * 1024
LENGTH_BYTES = 4
PREFIX = struct.Struct(">II")
PREFIX_BYTES = PREFIX.size

_LENGTH = struct.Struct(">I")
_HEADER_LENGTH_MASK = 0xFFFFFF

# A server that requires TLS answers with an alert.
TLS: Final = "TLS"
TLS_CLIENT: Final = "TLS (this port speaks plain text)"
# First bytes of other protocols that are sent to a remoting port by mistake.
_FOREIGN = (
    (b"PRI ", "HTTP/2 (a gRPC client speaks to the proxy's port, not to this one)"),
    (b"GET ", "HTTP"),
    (b"POST", "HTTP"),
    (b"PUT ", "HTTP"),
    (b"HEAD", "HTTP"),
    (b"OPTI", "HTTP"),
    (b"DELE", "HTTP"),
    (b"HTTP", "HTTP"),
    (b"<!DO", "HTTP"),
    (b"PROX", "the PROXY protocol"),
    (b"SSH-", "SSH"),
    (b"\x16\x03", TLS_CLIENT),
    (b"\x15\x03", TLS),
)


# Serialize type, header and body, not yet decoded: bytes, or a view where that is cheaper than a
# copy. A plain tuple, because there is one for every frame.
Buffer = bytes | bytearray | memoryview
Frame = tuple[int, Buffer, Buffer]

# Called with the serialize type, header and body size of a large frame; raises
# RemoteProtocolError to reject it.
Admit = Callable[[int, Buffer, int], None]

# From this size on a view of the body is cheaper than a copy, including its later use.
_VIEW_BYTES = 16 * 1024
# From this size on receiving a frame in place pays off.
_IN_PLACE_BYTES = 64 * 1024


def frame_bytes(frames: Iterable[Frame]) -> int:
    """The size of headers and bodies."""
    return sum(len(header) + len(body) for _, header, body in frames)


def foreign_protocol(start: bytes) -> str | None:
    """The name of the foreign protocol that begins with ``start``; None if unknown."""
    return next((name for mark, name in _FOREIGN if start.startswith(mark)), None)


def frame_prefix(serialize_type: int, header_bytes: int, body_bytes: int) -> bytes:
    """The eight bytes before a header of ``header_bytes`` bytes.

    Raises LocalProtocolError for a frame that a peer would reject.
    """
    length = LENGTH_BYTES + header_bytes + body_bytes
    if length + LENGTH_BYTES > FRAME_BYTES_MAX:
        raise LocalProtocolError(
            f"a frame of {length + LENGTH_BYTES} bytes is over the limit of {FRAME_BYTES_MAX}: "
            "send fewer or smaller messages at once"
        )
    return PREFIX.pack(length, serialize_type << 24 | header_bytes)


class FrameReader:
    """Splits a byte stream into frames, scanning every byte once.

    frame_bytes_max: maximum frame size, including the length field.
    admit: called for each frame above FIRST_FRAME_BYTES_MAX as soon as its header has arrived; None
        admits all frames.
    header_bytes_max: maximum header size of a frame that arrives in pieces. Every frame whose
        header is larger than one ``feed`` arrives in pieces.
    """

    __slots__ = (
        "_frame_bytes_max",
        "_header_bytes_max",
        "_missing",
        "_partial",
        "_room",
        "admit",
    )

    def __init__(
        self,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        admit: Admit | None = None,
        header_bytes_max: int = FRAME_BYTES_MAX,
    ) -> None:
        self._frame_bytes_max = frame_bytes_max
        self._header_bytes_max = header_bytes_max
        self.admit = admit
        self._partial = bytearray()
        self._missing = 0
        self._room: memoryview | None = None

    @property
    def partial_bytes(self) -> int:
        """Buffered bytes of an incomplete frame."""
        return len(self._partial)

    def room(self) -> memoryview | None:
        """A buffer for the rest of a large frame; None unless one has begun.

        Receiving into its start saves a copy. After a call that returned a buffer, the frame's
        remaining bytes must be received into it and reported to ``received``; the bytes after the
        frame go to ``feed`` again.
        """
        if self._room is None and self._missing >= _IN_PLACE_BYTES:
            have = len(self._partial)
            whole = bytearray(have + self._missing)
            whole[:have] = self._partial
            self._partial, self._room = whole, memoryview(whole)[have:]
        return self._room

    def received(self, count: int) -> list[Frame]:
        """Report ``count`` bytes received at the start of ``room``; returns the completed frame."""
        assert self._room is not None
        frames: list[Frame] = []
        self._missing -= count
        self._room = self._room[count:] if self._missing else None
        if not self._missing:
            whole, self._partial = self._partial, bytearray()
            self._cut(whole, frames)
        return frames

    def feed(self, data: Buffer) -> list[Frame]:
        """Process received bytes; returns the frames that they complete.

        The frames do not refer to ``data``, which may be overwritten.

        Raises RemoteProtocolError if the bytes are not frames; the reader is unusable afterwards.
        """
        frames: list[Frame] = []
        if self._partial:
            view = memoryview(data)
            position = self._finish_partial(view, frames)
            data = view[position:]
        rest = self._cut(bytes(data), frames)
        if rest:
            self._begin_partial(rest)
        return frames

    def _cut(self, data: bytes | bytearray, frames: list[Frame]) -> bytes | bytearray:
        """Append the complete frames in ``data``; returns the bytes after them."""
        end = len(data)
        position = 0
        unpack = PREFIX.unpack_from
        frame_bytes_max = self._frame_bytes_max
        while end - position >= PREFIX_BYTES:
            length, mark = unpack(data, position)
            frame_end = position + LENGTH_BYTES + length
            header_at = position + PREFIX_BYTES
            body_at = header_at + (mark & _HEADER_LENGTH_MASK)
            if length + LENGTH_BYTES > frame_bytes_max or body_at > frame_end:
                self._refuse(bytes(data[position:header_at]))
            if frame_end > end:
                break
            body: Buffer = (
                data[body_at:frame_end]
                if frame_end - body_at < _VIEW_BYTES
                else memoryview(data)[body_at:frame_end]
            )
            frames.append((mark >> 24, data[header_at:body_at], body))
            position = frame_end
        return data[position:] if position else data

    def _begin_partial(self, rest: bytes | bytearray) -> None:
        self._partial = bytearray(rest)
        self._missing = self._still_missing()

    def _finish_partial(self, view: memoryview, frames: list[Frame]) -> int:
        """Complete the partial frame; returns the position after its end in ``view``."""
        position = 0
        while self._partial and position < len(view):
            piece = view[position : position + self._missing]
            self._partial += piece
            position += len(piece)
            self._missing -= len(piece)
            if self._missing:
                break
            self._missing = self._still_missing()
            if not self._missing:
                whole, self._partial = self._partial, bytearray()
                self._cut(whole, frames)
        return position

    def _still_missing(self) -> int:
        """Number of bytes missing until the next step of reading the partial frame.

        The steps end with its prefix, its header if it must be admitted, and its last byte.
        """
        have = len(self._partial)
        if have < PREFIX_BYTES:
            return PREFIX_BYTES - have
        length, mark = PREFIX.unpack_from(self._partial)
        frame_bytes = length + LENGTH_BYTES
        header_end = PREFIX_BYTES + (mark & _HEADER_LENGTH_MASK)
        if frame_bytes > self._frame_bytes_max or header_end > frame_bytes:
            self._refuse(bytes(self._partial[:PREFIX_BYTES]))
        if header_end - PREFIX_BYTES > self._header_bytes_max:
            raise RemoteProtocolError(
                f"a header of {header_end - PREFIX_BYTES} bytes: the maximum is "
                f"{self._header_bytes_max}"
            )
        if self.admit is not None and frame_bytes > FIRST_FRAME_BYTES_MAX:
            if have < header_end:
                return int(header_end - have)
            header = bytes(self._partial[PREFIX_BYTES:header_end])
            self.admit(mark >> 24, header, frame_bytes - header_end)
        return int(frame_bytes - have)

    def _refuse(self, start: bytes) -> None:
        foreign = foreign_protocol(start)
        if foreign:
            raise ForeignProtocol(foreign, start)
        length = _LENGTH.unpack_from(start)[0]
        if length + LENGTH_BYTES > self._frame_bytes_max:
            raise RemoteProtocolError(
                f"a frame of {length + LENGTH_BYTES} bytes is over the limit of "
                f"{self._frame_bytes_max}"
            )
        raise RemoteProtocolError(f"a header longer than its frame of {length} bytes: {start!r}")
