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


def decompress(stored_body: bytes, sys_flag: int, body_bytes_max: int = BODY_BYTES_MAX) -> bytes:
    """Decompress a body; returns it unchanged if ``sys_flag`` says that it is not compressed.

    Raises CodecMissing with the package to install, BodyTooLarge if the result has more than
    ``body_bytes_max`` bytes, CorruptRecord if it does not decompress.
    """
    if not sys_flag & COMPRESSED:
        return stored_body
    codec, inflate = _CODECS.get(sys_flag & COMPRESSION_MASK, _ZLIB)
    body = inflate(stored_body, body_bytes_max + 1)
    if body is None:
        raise CorruptRecord(0, f"{codec} body does not decompress: it is truncated")
    if len(body) > body_bytes_max:
        raise BodyTooLarge(codec, len(stored_body), body_bytes_max)
    return body


def decompress_each(
    bodies: list[bytes],
    sys_flags: Iterable[tuple[int, int]],
    body_bytes_max: int = BODY_BYTES_MAX,
    batch_bytes_max: int = BATCH_BYTES_MAX,
) -> None:
    """Decompress the stored bodies of a batch in place.

    sys_flags: index and flags of each body that may be compressed.
    Raises as ``decompress``, and BatchTooLarge for more than ``batch_bytes_max`` in total.
    """
    room = batch_bytes_max - sum(map(len, bodies))
    for index, sys_flag in sys_flags:
        room += len(bodies[index])
        try:
            body = decompress(bodies[index], sys_flag, max(0, min(body_bytes_max, room)))
        except BodyTooLarge as error:
            if room < body_bytes_max:
                raise BatchTooLarge(len(bodies), batch_bytes_max) from error
            raise
        bodies[index] = body
        room -= len(body)


# Each stops behind ``bytes_max``, so that a small body cannot fill the memory: after a look at the
# size that the body declares, pieces are inflated until there are more bytes than that. They return
# None for a truncated body, except with ZSTD, whose reader does not detect it.

_PIECE_BYTES: Final = 1024 * 1024


def _joined(first: bytes, more: Callable[[], bytes], bytes_max: int) -> bytes:
    """All pieces, or so many that they are more than ``bytes_max``."""
    pieces, size, piece = [first], len(first), first
    while piece and size < bytes_max and (piece := more()):
        pieces.append(piece)
        size += len(piece)
    return b"".join(pieces) if len(pieces) > 1 else first


def _inflate_zlib(stored_body: bytes, bytes_max: int) -> bytes | None:
    inflater = zlib.decompressobj()
    piece_bytes = min(bytes_max, _PIECE_BYTES)

    def more() -> bytes:
        return inflater.decompress(inflater.unconsumed_tail, piece_bytes)

    try:
        body = _joined(inflater.decompress(stored_body, piece_bytes), more, bytes_max)
    except zlib.error as error:
        raise CorruptRecord(0, f"ZLIB body does not decompress: {error}") from error
    return body if inflater.eof or len(body) >= bytes_max else None


def _inflate_lz4(stored_body: bytes, bytes_max: int) -> bytes | None:
    frame = _lz4("the body is LZ4-compressed")
    inflater = frame.LZ4FrameDecompressor()
    piece_bytes = min(bytes_max, _PIECE_BYTES)

    def more() -> bytes:
        if inflater.eof or inflater.needs_input:
            return b""
        piece: bytes = inflater.decompress(b"", piece_bytes)
        return piece

    try:
        declared = frame.get_frame_info(stored_body)["content_size"]
        _check_declared("LZ4", stored_body, declared, bytes_max)
        body = _joined(inflater.decompress(stored_body, piece_bytes), more, bytes_max)
    except RuntimeError as error:
        raise CorruptRecord(0, f"LZ4 body does not decompress: {error}") from error
    return body if inflater.eof or len(body) >= bytes_max else None


def _inflate_zstd(stored_body: bytes, bytes_max: int) -> bytes | None:
    zstandard = _zstd("the body is ZSTD-compressed")
    try:
        # Java's stream writer leaves the size out of the frame, which one-shot decompress() needs.
        _check_declared("ZSTD", stored_body, zstandard.frame_content_size(stored_body), bytes_max)
        reader = zstandard.ZstdDecompressor().stream_reader(stored_body)
        piece_bytes = min(bytes_max, _PIECE_BYTES)
        return _joined(reader.read(piece_bytes), lambda: reader.read(piece_bytes), bytes_max)
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
_CODECS: dict[int, tuple[str, Callable[[bytes, int], bytes | None]]] = {
    COMPRESSION_LZ4: ("LZ4", _inflate_lz4),
    COMPRESSION_ZSTD: ("ZSTD", _inflate_zstd),
}
