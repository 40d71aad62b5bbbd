"""Templates of answers: they say what the general codec writes."""

from __future__ import annotations

import json
import struct
from random import Random

import pytest

from headrace_protocol.codes import ResponseCode
from headrace_protocol.command import FLAG_RESPONSE, Command, header_fields
from headrace_protocol.header_codecs import SerializeType, decode_header, encode_frame
from headrace_protocol.headers import (
    PullMessageResponseHeader,
    RequestHeader,
    SendMessageHeaderV2,
    SendMessageResponseHeader,
)
from headrace_protocol.quick_frames import (
    UNREADABLE,
    SendAnswer,
    decode_send,
    decode_signed,
    pull_found,
    send_replies,
)
from headrace_protocol.rights.signature import signed_text

STORE_HOST = "7F00000100002A9F"


def read(frames: bytes) -> list[tuple[int, object]]:
    """Bytes of the body of each frame, and its header, whose keys have no order."""
    found = []
    while frames:
        total, header_bytes = struct.unpack_from(">ii", frames)
        header = json.loads(frames[8 : 8 + header_bytes])
        body_bytes = total - header_bytes - 4
        found.append((body_bytes, header))
        # Only the last one has a body, which is not here.
        frames = frames[8 + header_bytes :]
    return found


def general(
    header: RequestHeader, opaque: int, code: int, remark: str | None, body_bytes: int = 0
) -> bytes:
    return encode_frame(
        SerializeType.JSON,
        code,
        opaque,
        flag=FLAG_RESPONSE,
        fields=header_fields(header),
        remark=remark,
        body_bytes=body_bytes,
    )


@pytest.mark.parametrize("remark", [None, "stored, but not known to be on disk"])
# The longest one is beyond the prepared prefixes.
@pytest.mark.parametrize("uniq_key", ["A1", "k" * 2000])
def test_replies_to_sends(remark: str | None, uniq_key: str) -> None:
    code = ResponseCode.FLUSH_DISK_TIMEOUT if remark else ResponseCode.SUCCESS
    answers: list[SendAnswer] = [(0, 0, uniq_key, 7), (3, 10_000, "B2", 8), (0, 0, "not stored", 9)]
    places = [(0, 5), (2**62, 6)]
    expected = b""
    for (queue_id, delta, key, opaque), (at, offset) in zip(answers, places, strict=False):
        header = SendMessageResponseHeader(
            msg_id=f"{STORE_HOST}{at:016X}",
            queue_id=queue_id,
            queue_offset=offset + delta,
            transaction_id=key,
        )
        expected += general(header, opaque, code, remark)
    replies = send_replies(STORE_HOST, answers, places, int(code), remark or "")
    assert read(replies) == read(expected)


@pytest.mark.parametrize("delta", [0, 10_000, -3])
@pytest.mark.parametrize("body_bytes", [0, 4 << 20])
def test_the_answer_to_a_pull(delta: int, body_bytes: int) -> None:
    header = PullMessageResponseHeader(
        suggest_which_broker_id=0,
        next_begin_offset=12,
        min_offset=3,
        max_offset=2**62,
        offset_delta=delta or None,
        topic_sys_flag=0,
        group_sys_flag=0,
    )
    expected = general(header, 77, ResponseCode.SUCCESS, "FOUND", body_bytes)
    assert read(pull_found((12, 2**62, 3), delta, 77, body_bytes)) == read(expected)


def test_a_send_is_read_as_by_the_general_codec() -> None:
    header = SendMessageHeaderV2(
        producer_group="g",
        topic="T",
        default_topic="TBW102",
        default_topic_queue_nums=4,
        queue_id=3,
        sys_flag=4,
        born_timestamp=1234,
        flag=5,
        properties="UNIQ_KEY\x01A\x02",
        reconsume_times=2,
        batch=True,
    )
    frame = encode_frame(SerializeType.JSON, 310, 9, fields=header_fields(header))[8:]
    quick, command = decode_send(frame), decode_header(SerializeType.JSON, frame)
    assert isinstance(command, Command)
    assert (quick.opaque, quick.flag) == (command.opaque, command.flag)
    slow = command.header(SendMessageHeaderV2)
    for name in quick.fields.__struct_fields__:
        assert getattr(quick.fields, name) == getattr(slow, name), name


@pytest.mark.parametrize("seed", range(20))
def test_what_a_send_signs_is_read_as_by_the_general_way(seed: int) -> None:
    rng = Random(seed)
    names = ["AccessKey", "Signature", *rng.sample(["SecurityToken", *"abcdefghijklmn"], 9)]
    fields = {name: rng.choice(["", "x", "é\x01", name]) for name in rng.sample(names, len(names))}
    header = encode_frame(SerializeType.JSON, 310, 9, fields=fields)[8:]
    read = decode_signed(header).fields
    assert (read.text(), read.signature) == (signed_text(fields), fields["Signature"])


@pytest.mark.parametrize(
    "fields",
    [
        {"Signature": "s"},
        {"AccessKey": "alice"},
        {"AccessKey": "alice", "Signature": "s", "another": "field"},
        {"AccessKey": "alice", "Signature": "s", "_UNIQUE_KEY_QUERY": "true"},
    ],
)
def test_a_send_that_signs_other_fields_is_served_by_itself(fields: dict[str, str]) -> None:
    header = encode_frame(SerializeType.JSON, 310, 9, fields=fields)[8:]
    with pytest.raises(UNREADABLE):
        decode_signed(header)
