"""The remoting frame: ``length | type and header length | header | body``.

Source: docs/protocol.md "Frame".
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from headrace_protocol.errors import LocalProtocolError, RemoteProtocolError

# The peer's netty decoder refuses more, counted with the four bytes of the length.
FRAME_BYTES_MAX = 16 * 1024 * 1024
# Largest frame before the first valid request, unless its header names a code that permits a body
# of that size.
FIRST_FRAME_BYTES_MAX = 64 * 1024
LENGTH_BYTES = 4
PREFIX = struct.Struct(">II")
PREFIX_BYTES = PREFIX.size

_LENGTH = struct.Struct(">I")
_HEADER_LENGTH_MASK = 0xFFFFFF

# First bytes of what people point at a remoting port by mistake.
_FOREIGN = (
    (b"PRI ", "HTTP/2 (a gRPC client speaks to the proxy's port, not to this one)"),
    (b"GET ", "HTTP"),
    (b"POST", "HTTP"),
    (b"PUT ", "HTTP"),
    (b"HEAD", "HTTP"),
    (b"OPTI", "HTTP"),
    (b"DELE", "HTTP"),
    (b"HTTP", "HTTP"),
    (b"PROX", "the PROXY protocol"),
    (b"SSH-", "SSH"),
    (b"\x16\x03", "TLS (this port speaks plain text)"),
)


# Serialize type, header, body, not yet decoded: bytes, or a view where copying would cost more than
# views do. A plain tuple, since there is one for every frame.
Buffer = bytes | bytearray | memoryview
Frame = tuple[int, Buffer, Buffer]

# Takes the serialize type, header and body size of a large frame; raises RemoteProtocolError to
# reject it.
Admit = Callable[[int, Buffer, int], None]

# From here on a view of the body is cheaper than a copy, and so is all that is done with it.
_VIEW_BYTES = 16 * 1024
# From here on it pays to receive a frame to where it stays.
_IN_PLACE_BYTES = 64 * 1024


def foreign_protocol(start: bytes) -> str | None:
    """The name of the other protocol that a stream with this ``start`` speaks, if we know it."""
    return next((name for mark, name in _FOREIGN if start.startswith(mark)), None)


def frame_prefix(serialize_type: int, header_bytes: int, body_bytes: int) -> bytes:
    """The eight bytes before a header of ``header_bytes`` bytes.

    Raises LocalProtocolError for a frame that a peer would refuse.
    """
    length = LENGTH_BYTES + header_bytes + body_bytes
    if length + LENGTH_BYTES > FRAME_BYTES_MAX:
        raise LocalProtocolError(
            f"a frame of {length + LENGTH_BYTES} bytes is over the limit of {FRAME_BYTES_MAX}: "
            "send fewer or smaller messages at once"
        )
    return PREFIX.pack(length, serialize_type << 24 | header_bytes)


class FrameReader:
    """Cuts a byte stream into frames; looks at every byte once.

    frame_bytes_max: largest frame taken, in bytes with its length field.
    admit: called for each frame above FIRST_FRAME_BYTES_MAX as soon as its header has arrived;
    None admits all.
    header_bytes_max: largest header of a frame that comes in pieces, as each does that has a header
    of more bytes than are fed at once.
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
        """Bytes held of a frame whose end has not come."""
        return len(self._partial)

    def room(self) -> memoryview | None:
        """Where the rest of a large frame belongs; None unless one has begun.

        Receiving to the start of it saves a copy. Once it was asked for, the frame's bytes go there
        and are told to ``received``; ``feed`` goes on after them.
        """
        if self._room is None and self._missing >= _IN_PLACE_BYTES:
            have = len(self._partial)
            whole = bytearray(have + self._missing)
            whole[:have] = self._partial
            self._partial, self._room = whole, memoryview(whole)[have:]
        return self._room

    def received(self, count: int) -> list[Frame]:
        """The frame, if ``count`` bytes more at the start of ``room`` complete it."""
        assert self._room is not None
        frames: list[Frame] = []
        self._missing -= count
        self._room = self._room[count:] if self._missing else None
        if not self._missing:
            whole, self._partial = self._partial, bytearray()
            self._cut(whole, frames)
        return frames

    def feed(self, data: Buffer) -> list[Frame]:
        """Take what was received and return the frames that are whole now.

        Nothing in them refers to ``data``, which may be overwritten.

        Raises RemoteProtocolError when the bytes can't be frames; the reader is of no use then.
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
        """Add the whole frames in ``data``; return the bytes after them."""
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
        """Complete the frame that was cut off; return the position after its end in ``view``."""
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
        """Bytes missing until the partial frame can be examined further.

        The steps are its prefix, its header if it must be admitted, and its end.
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
                f"a header of {header_end - PREFIX_BYTES} bytes: {self._header_bytes_max} is the "
                "most"
            )
        if self.admit is not None and frame_bytes > FIRST_FRAME_BYTES_MAX:
            if header_end > FIRST_FRAME_BYTES_MAX:
                raise RemoteProtocolError(
                    f"the first frame has a header of {header_end - PREFIX_BYTES} bytes"
                )
            if have < header_end:
                return int(header_end - have)
            header = bytes(self._partial[PREFIX_BYTES:header_end])
            self.admit(mark >> 24, header, frame_bytes - header_end)
        return int(frame_bytes - have)

    def _refuse(self, start: bytes) -> None:
        foreign = foreign_protocol(start)
        if foreign:
            raise RemoteProtocolError(f"this is {foreign}, not the remoting protocol: {start!r}")
        length = _LENGTH.unpack_from(start)[0]
        if length + LENGTH_BYTES > self._frame_bytes_max:
            raise RemoteProtocolError(
                f"a frame of {length + LENGTH_BYTES} bytes is over the limit of "
                f"{self._frame_bytes_max}"
            )
        raise RemoteProtocolError(f"a header longer than its frame of {length} bytes: {start!r}")
