"""Every recorded frame of the peer: read as it was meant, and written back byte for byte."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from random import Random
from typing import Any

import msgspec
import pytest

from headrace_protocol.codes import RequestCode
from headrace_protocol.command import Command
from headrace_protocol.connection import Connection, RequestReceived, ResponseReceived
from headrace_protocol.frame import FrameReader
from headrace_protocol.header_codecs import SerializeType, decode_header, encode_frame
from headrace_protocol.message import decode_records
from tests.support.batches import iter_batch
from tests.support.golden_frames import GoldenFrame, golden_frames
from tests.support.wire_types import RECORD_RESPONSES, REQUEST_HEADERS, RESPONSE_HEADERS

# What clients add to requests that does not change what we do: the type of request, the broker's
# name, whose topics are meant, and the version of a table that we send whole.
IGNORED = {"ReqT", "bname", "ns", "nsd", "oway", "dataVersion"}
# Requests with fields that we have no struct for, since we do not serve them.
NOT_SERVED = {"CHECK_TRANSACTION_STATE"}


def decode(frame: GoldenFrame) -> tuple[int, Command, bytes]:
    ((serialize_type, header, body),) = FrameReader().feed(frame.data)
    return serialize_type, decode_header(serialize_type, header), bytes(body)


def fields_of(command: Command) -> dict[str, str] | None:
    """The extension fields, None when there is not even an empty map of them."""
    raw = command.ext_fields
    return None if isinstance(raw, msgspec.Raw) and bytes(raw) == b"null" else command.ext()


def test_there_are_all_frames() -> None:
    assert len(golden_frames()) == 855


def test_frames_say_what_was_recorded() -> None:
    for frame in golden_frames():
        serialize_type, command, body = decode(frame)
        assert SerializeType(serialize_type).name == frame.serialize, frame.seq
        said = (command.code, command.opaque, command.flag, command.language, command.version)
        assert said == (frame.code, frame.opaque, frame.flag, frame.language, frame.version)
        assert (command.is_response, command.is_oneway) == (frame.response, frame.oneway)
        assert command.remark == frame.remark, frame.seq
        assert command.ext() == (frame.ext or {}), frame.seq
        assert len(body) == frame.body_length, frame.seq


def test_frames_are_written_back_byte_for_byte() -> None:
    for frame in golden_frames():
        serialize_type, command, body = decode(frame)
        start = encode_frame(
            serialize_type,
            command.code,
            command.opaque,
            flag=command.flag,
            fields=fields_of(command),
            remark=command.remark,
            body_bytes=len(body),
            language=command.language,
            version=command.version,
        )
        assert start + body == frame.data, frame.seq


# -- typed headers ---------------------------------------------------------------------------------


def typed(frame: GoldenFrame) -> type[msgspec.Struct] | None:
    table = RESPONSE_HEADERS if frame.response else REQUEST_HEADERS
    return table.get(RequestCode[frame.request_name])


def with_fields(*, response: bool) -> Iterator[tuple[GoldenFrame, Command]]:
    """Frames with extension fields; of the responses, those that say success or found nothing."""
    for frame in golden_frames():
        if frame.response is response and frame.ext:
            yield frame, decode(frame)[1]


def test_every_request_with_fields_has_its_struct() -> None:
    missing = {
        frame.request_name
        for frame, _ in with_fields(response=False)
        if typed(frame) is None and set(frame.ext or ()) - IGNORED
    }
    assert missing == NOT_SERVED


def test_every_response_with_fields_has_its_struct() -> None:
    assert all(typed(frame) for frame, _ in with_fields(response=True))


@pytest.mark.parametrize("response", [False, True])
def test_typed_headers_hold_every_field(response: bool) -> None:
    for frame, command in with_fields(response=response):
        header_type = typed(frame)
        if header_type is None:
            continue
        held = {
            name: _text(value)
            for name, value in msgspec.to_builtins(command.header(header_type)).items()
            if value is not None
        }
        sent = {name: text for name, text in (frame.ext or {}).items() if name not in IGNORED}
        assert {name: held.get(name) for name in sent} == sent, (frame.seq, frame.request_name)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# -- bodies that are not JSON ----------------------------------------------------------------------


def test_records_in_answers_are_written_back() -> None:
    count = 0
    for frame in golden_frames():
        if frame.response and RequestCode[frame.request_name] in RECORD_RESPONSES and frame.body:
            messages = decode_records(frame.body)
            assert b"".join(message.encode() for message in messages) == frame.body
            count += len(messages)
    assert count == 78


def test_batches_hold_their_messages() -> None:
    batches = [frame for frame in golden_frames() if frame.request_name == "SEND_BATCH_MESSAGE"]
    bodies = [
        [bytes(body) for _, body, _ in iter_batch(frame.body)]
        for frame in batches
        if not frame.response
    ]
    assert [len(messages) for messages in bodies] == [2, 2]


# -- cut -------------------------------------------------------------------------------------------


def receive(pieces: list[bytes], opaques: list[int]) -> list[tuple[Any, ...]]:
    """The events of a client that waits for ``opaques`` and gets ``pieces``."""
    connection: Connection[int] = Connection()
    connection._waiting.update({opaque: opaque for opaque in opaques})
    return [_seen(event) for piece in pieces for event in connection.receive_data(piece)]


def _seen(event: ResponseReceived[int] | RequestReceived) -> tuple[Any, ...]:
    command = event.command
    waiter = event.waiter if isinstance(event, ResponseReceived) else None
    return (waiter, command.code, command.opaque, command.flag, command.ext(), bytes(event.body))


def conversations() -> list[list[GoldenFrame]]:
    """Frames of one direction of one connection, as they followed each other."""
    ways: dict[tuple[int, str], list[GoldenFrame]] = {}
    for frame in golden_frames():
        ways.setdefault((frame.conn, frame.dir), []).append(frame)
    return list(ways.values())


def test_conversations_are_heard_the_same_however_they_are_cut() -> None:
    rng = Random(855)
    for frames in conversations():
        data = b"".join(frame.data for frame in frames)
        opaques = [frame.opaque for frame in frames if frame.response]
        whole = receive([data], opaques)
        assert [seen[2] for seen in whole] == [frame.opaque for frame in frames]
        cuts = sorted(rng.randrange(len(data) + 1) for _ in range(2 * len(frames)))
        pieces = [data[start:end] for start, end in itertools.pairwise([0, *cuts, len(data)])]
        assert receive(pieces, opaques) == whole


@pytest.mark.slow
def test_frames_are_heard_byte_by_byte() -> None:
    for frame in golden_frames():
        opaques = [frame.opaque] if frame.response else []
        data = frame.data
        pieces = [data[at : at + 1] for at in range(len(data))]
        assert receive(pieces, opaques) == receive([data], opaques), frame.seq
