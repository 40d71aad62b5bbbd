"""Compression of bodies; a decompressed body has a limit, since a small one can fill the memory."""

from __future__ import annotations

import zlib
from collections.abc import Callable  # noqa: TC003 - of a NamedTuple
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headrace_protocol.errors import CorruptRecord, PortableError

if TYPE_CHECKING:
    from collections.abc import Iterable

# Bits of a record's sysFlag.
COMPRESSED: Final = 0x1
COMPRESSION_MASK: Final = 0x700
COMPRESSION_LZ4: Final = 0x100
COMPRESSION_ZSTD: Final = 0x200
COMPRESSION_ZLIB: Final = 0x300
# Default limit for decompressing a body; producers send at most 4 MiB.
BODY_BYTES_MAX: Final = 64 * 1024 * 1024
# Default limit for all bodies of a batch together, which can inflate a thousandfold.
BATCH_BYTES_MAX: Final = 256 * 1024 * 1024


class CodecMissing(ValueError):
    """A body is compressed with a codec whose package is not installed."""


class BodyTooLarge(PortableError, ValueError):
    """A compressed body is larger than its reader allows."""

    def __init__(self, codec: str, stored_bytes: int, body_bytes_max: int) -> None:
        super().__init__(
            f"a {codec} body of {stored_bytes} bytes has more than {body_bytes_max} bytes when "
            "decompressed: if such bodies are sent, give the consumer a larger body_bytes_max"
        )


class BatchTooLarge(PortableError, ValueError):
    """The bodies of a batch together exceed the reader's limit."""

    def __init__(self, message_count: int, batch_bytes_max: int) -> None:
        super().__init__(
            f"the bodies of {message_count} messages have more than {batch_bytes_max} bytes when "
            "decompressed: read the messages one by one, fetch fewer at a time (max_messages), "
            "or raise the consumer's batch_bytes_max"
        )


# The errors of a body that can't be read.
UNREADABLE: Final = (BodyTooLarge, CodecMissing, CorruptRecord)


class Codec(NamedTuple):
    """A way of compressing. flags: the bits of sysFlag for it."""

    flags: int
    deflate: Callable[[bytes], bytes]

    def compress(self, body: bytes) -> tuple[bytes, int]:
        """The body compressed, and its sysFlag bits; as it is if that is not longer."""
        compressed = self.deflate(body)
        if len(compressed) >= len(body):
            return body, 0
        return compressed, self.flags


def codec(name: str) -> Codec:
    """The codec "zlib", "lz4" or "zstd". Raises CodecMissing, KeyError for another name."""
    flags, make = _DEFLATE[name]
    return Codec(COMPRESSED | flags, make())


def placed(error: ValueError, place: str) -> ValueError:
    """An error of reading a body, whose text says of which message it is."""
    reason = error.reason if isinstance(error, CorruptRecord) else error
    error.args = (f"{place}: {reason}",)
    return error


def decompress(stored_body: bytes, sys_flag: int, body_bytes_max: int = BODY_BYTES_MAX) -> bytes:
    """Decompress a body; returns it unchanged if ``sys_flag`` says that it is not compressed.

    Raises CodecMissing with the package to install, BodyTooLarge if the result has more than
    ``body_bytes_max`` bytes, CorruptRecord if it does not decompress.
    """
    if not sys_flag & COMPRESSED:
        return stored_body
    codec, inflate = _CODECS.get(sys_flag & COMPRESSION_MASK, _ZLIB)
    pieces = inflate(stored_body, body_bytes_max + 1)
    if pieces is None:
        raise CorruptRecord(0, f"{codec} body does not decompress: it is truncated")
    if sum(map(len, pieces)) > body_bytes_max:
        raise BodyTooLarge(codec, len(stored_body), body_bytes_max)
    # Only now, since joining takes the memory twice.
    return b"".join(pieces)


def decompress_each(
    bodies: list[bytes],
    sys_flags: Iterable[tuple[int, int]],
    body_bytes_max: int = BODY_BYTES_MAX,
    batch_bytes_max: int = BATCH_BYTES_MAX,
    place_of: Callable[[int], str] = "body {}".format,
) -> None:
    """Decompress the stored bodies of a batch in place.

    sys_flags: index and flags of each body that may be compressed. place_of: names the message of
    an index, for errors.
    Raises as ``decompress``, and BatchTooLarge for more than ``batch_bytes_max`` in total.
    """
    room = batch_bytes_max - sum(map(len, bodies))
    for index, sys_flag in sys_flags:
        room += len(bodies[index])
        try:
            body = decompress(bodies[index], sys_flag, max(0, min(body_bytes_max, room)))
        except UNREADABLE as error:
            if isinstance(error, BodyTooLarge) and room < body_bytes_max:
                raise BatchTooLarge(len(bodies), batch_bytes_max) from error
            raise placed(error, place_of(index)) from None
        bodies[index] = body
        room -= len(body)


# Each stops at ``bytes_max``, so that a small body cannot fill the memory: after a look at the size
# that the body declares, it is inflated in pieces until there are so many bytes. They return None
# for a truncated body, except with ZSTD, whose reader does not detect it.

_PIECE_BYTES: Final = 256 * 1024


def _pieces(more: Callable[[int], bytes], bytes_max: int) -> list[bytes]:
    """All pieces, of ``bytes_max`` bytes at most. more: the next piece, of so many at most."""
    pieces: list[bytes] = []
    left = bytes_max
    while left and (piece := more(min(left, _PIECE_BYTES))):
        pieces.append(piece)
        left -= len(piece)
    return pieces


def _inflate_zlib(stored_body: bytes, bytes_max: int) -> list[bytes] | None:
    inflater = zlib.decompressobj()
    rest = stored_body

    def more(piece_bytes: int) -> bytes:
        nonlocal rest
        piece = inflater.decompress(rest, piece_bytes)
        rest = inflater.unconsumed_tail
        return piece

    try:
        pieces = _pieces(more, bytes_max)
    except zlib.error as error:
        raise CorruptRecord(0, f"ZLIB body does not decompress: {error}") from error
    return pieces if inflater.eof or sum(map(len, pieces)) >= bytes_max else None


def _inflate_lz4(stored_body: bytes, bytes_max: int) -> list[bytes] | None:
    frame = _lz4("the body is LZ4-compressed")
    inflater = frame.LZ4FrameDecompressor()
    rest = stored_body

    def more(piece_bytes: int) -> bytes:
        nonlocal rest
        if inflater.eof or (inflater.needs_input and not rest):
            return b""
        piece: bytes = inflater.decompress(rest, piece_bytes)
        rest = b""
        return piece

    try:
        declared = frame.get_frame_info(stored_body)["content_size"]
        _check_declared("LZ4", stored_body, declared, bytes_max)
        pieces = _pieces(more, bytes_max)
    except RuntimeError as error:
        raise CorruptRecord(0, f"LZ4 body does not decompress: {error}") from error
    return pieces if inflater.eof or sum(map(len, pieces)) >= bytes_max else None


def _inflate_zstd(stored_body: bytes, bytes_max: int) -> list[bytes] | None:
    zstandard = _zstd("the body is ZSTD-compressed")
    try:
        # Java's stream writer leaves the size out of the frame, which one-shot decompress() needs.
        _check_declared("ZSTD", stored_body, zstandard.frame_content_size(stored_body), bytes_max)
        return _pieces(zstandard.ZstdDecompressor().stream_reader(stored_body).read, bytes_max)
    except zstandard.ZstdError as error:
        raise CorruptRecord(0, f"ZSTD body does not decompress: {error}") from error


def _check_declared(name: str, stored_body: bytes, declared: int, bytes_max: int) -> None:
    """Raise BodyTooLarge for a frame whose declared size reaches ``bytes_max``."""
    if declared >= bytes_max:
        raise BodyTooLarge(name, len(stored_body), bytes_max - 1)


def _lz4(need: str) -> Any:
    try:
        import lz4.frame
    except ImportError as error:
        raise CodecMissing(f"{need}: pip install lz4") from error
    return lz4.frame


def _zstd(need: str) -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise CodecMissing(f"{need}: pip install zstandard") from error
    return zstandard


# RocketMQ's level.
_ZLIB_LEVEL: Final = 5
_DEFLATE: Final[dict[str, tuple[int, Callable[[], Callable[[bytes], bytes]]]]] = {
    "zlib": (COMPRESSION_ZLIB, lambda: partial(zlib.compress, level=_ZLIB_LEVEL)),
    "lz4": (COMPRESSION_LZ4, lambda: _lz4("compression='lz4' needs a package").compress),
    "zstd": (
        COMPRESSION_ZSTD,
        lambda: _zstd("compression='zstd' needs a package").ZstdCompressor().compress,
    ),
}

_ZLIB = ("ZLIB", _inflate_zlib)
_CODECS: dict[int, tuple[str, Callable[[bytes, int], list[bytes] | None]]] = {
    COMPRESSION_LZ4: ("LZ4", _inflate_lz4),
    COMPRESSION_ZSTD: ("ZSTD", _inflate_zstd),
}
