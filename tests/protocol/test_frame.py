"""The frame: whole, cut, trailing, foreign and broken bytes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_protocol.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from headrace_protocol.frame import (
    FRAME_BYTES_MAX,
    PREFIX,
    FrameReader,
    foreign_protocol,
    frame_prefix,
)

Parts = tuple[int, bytes, bytes]


def frame(serialize_type: int, header: bytes, body: bytes) -> bytes:
    return frame_prefix(serialize_type, len(header), len(body)) + header + body


def read(reader: FrameReader, data: bytes) -> list[Parts]:
    return [(kind, bytes(header), bytes(body)) for kind, header, body in reader.feed(data)]


def read_in_pieces(data: bytes, cuts: list[int], limit: int = FRAME_BYTES_MAX) -> object:
    """Frames, or frames before the error and the error's text."""
    reader = FrameReader(limit)
    frames: list[Parts] = []
    bounds = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    try:
        for start, end in itertools.pairwise(bounds):
            frames += read(reader, data[start:end])
    except RemoteProtocolError:
        return "error"
    return frames, reader.partial_bytes


parts = st.lists(
    st.tuples(st.integers(0, 255), st.binary(max_size=40), st.binary(max_size=60)), max_size=6
)


@given(parts, st.binary(max_size=7), st.lists(st.integers(0, 1000), max_size=8))
def test_frames_are_the_same_however_they_are_cut(
    wanted: list[Parts], trailing: bytes, cuts: list[int]
) -> None:
    # Trailing bytes that begin a frame of 1 KiB and never end.
    start = PREFIX.pack(1024, 5)[: len(trailing)]
    data = b"".join(frame(*each) for each in wanted) + start
    assert read_in_pieces(data, cuts) == (wanted, len(start))


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=12))
def test_any_bytes_give_the_same_end_however_they_are_cut(data: bytes, cuts: list[int]) -> None:
    assert read_in_pieces(data, cuts, limit=200) == read_in_pieces(data, [], limit=200)


@given(
    st.lists(st.integers(0, 200_000), max_size=5),
    st.lists(st.integers(1, 150_000), min_size=1, max_size=8),
)
def test_frames_received_in_place_are_the_same(body_bytes: list[int], pieces: list[int]) -> None:
    wanted = [(0, b"header", bytes([number]) * each) for number, each in enumerate(body_bytes)]
    data = b"".join(frame(*each) for each in wanted)
    reader, found, position = FrameReader(), [], 0
    for piece in itertools.cycle(pieces):
        if position == len(data):
            break
        room = reader.room()
        if room is None:
            found += read(reader, data[position : position + piece])
            position += min(piece, len(data) - position)
        else:
            part = data[position : position + min(piece, len(room))]
            room[: len(part)] = part
            found += [(kind, bytes(h), bytes(b)) for kind, h, b in reader.received(len(part))]
            position += len(part)
    assert (found, reader.partial_bytes, reader.room()) == (wanted, 0, None)


def test_a_frame_over_the_limit_is_refused_before_it_is_received() -> None:
    reader = FrameReader(frame_bytes_max=100)
    with pytest.raises(RemoteProtocolError, match="101 bytes is over the limit of 100"):
        reader.feed(PREFIX.pack(97, 4))


def test_a_frame_at_the_limit_is_taken() -> None:
    reader = FrameReader(frame_bytes_max=100)
    assert read(reader, PREFIX.pack(96, 4) + b"x" * 92) == [(0, b"xxxx", b"x" * 88)]


@pytest.mark.parametrize("header_bytes", [50, 51])
def test_a_header_that_arrives_in_pieces_is_limited(header_bytes: int) -> None:
    reader = FrameReader(header_bytes_max=50)
    data = frame(0, b"h" * header_bytes, b"body")
    if header_bytes > 50:
        with pytest.raises(RemoteProtocolError, match="header"):
            read(reader, data[:20])
    else:
        assert read(reader, data[:20]) + read(reader, data[20:]) == [(0, b"h" * 50, b"body")]


@pytest.mark.parametrize("length", [0, 3])
def test_a_frame_too_short_for_its_own_prefix_is_refused(length: int) -> None:
    with pytest.raises(RemoteProtocolError, match="header longer than its frame"):
        FrameReader().feed(PREFIX.pack(length, 0))


def test_a_header_longer_than_its_frame_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="header longer than its frame"):
        FrameReader().feed(PREFIX.pack(10, 7))


@pytest.mark.parametrize(
    ("start", "name"),
    [
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "HTTP/2"),
        (b"GET / HTTP/1.1\r\n", "HTTP"),
        (b"POST /x HTTP/1.1\r\n", "HTTP"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "TLS"),
        (b"SSH-2.0-OpenSSH", "SSH"),
        (b"PROXY TCP4 1.2.3.4", "the PROXY"),
    ],
)
@pytest.mark.parametrize("cut", [3, 8, 1000])
def test_foreign_protocols_are_named(start: bytes, name: str, cut: int) -> None:
    reader = FrameReader()
    with pytest.raises(RemoteProtocolError, match=f"this is {name}"):  # noqa: PT012
        reader.feed(start[:cut])
        reader.feed(start[cut:])


def test_a_frame_is_no_foreign_protocol() -> None:
    assert foreign_protocol(frame(0, b"{}", b"")) is None


def test_a_frame_that_a_peer_would_refuse_is_not_made() -> None:
    with pytest.raises(LocalProtocolError, match="send fewer or smaller"):
        frame_prefix(0, 100, FRAME_BYTES_MAX - 107)
    assert frame_prefix(0, 100, FRAME_BYTES_MAX - 108)


def test_both_errors_are_protocol_errors() -> None:
    assert issubclass(LocalProtocolError, ProtocolError)
    assert issubclass(RemoteProtocolError, ProtocolError)
