"""Bodies of GET_BY_KEY: invalid ones are rejected by name."""

from __future__ import annotations

import pytest

from headrace_protocol.bounds import ITEMS_MAX, OutOfBounds
from headrace_protocol.errors import CorruptRecord
from headrace_protocol.key_lookup import (
    NoRecord,
    WantedKey,
    decode_found,
    decode_keys,
    encode_found,
    encode_keys,
)
from headrace_protocol.message import encode_record


def test_an_answer_does_not_copy_its_records() -> None:
    record = memoryview(encode_record(topic="T", queue_id=0, body=b"x"))
    assert encode_found([NoRecord.NEVER, record])[1] is record


@pytest.mark.parametrize(
    ("count", "body", "reason"),
    [
        (2, encode_keys([WantedKey(b"k")]), "cannot hold 2 keys"),
        (1, encode_keys([WantedKey(b"")]), "key 0 has 0 bytes"),
        (1, encode_keys([WantedKey(b"k" * 32_768)]), "key 0 has 32768 bytes"),
        (1, encode_keys([WantedKey(b"k", -2)]), "neither queue -2"),
        (1, encode_keys([WantedKey(b"k", 1, -2)]), "nor offset -2"),
        (1, encode_keys([WantedKey(b"k", -1, 7)]), "needs a queue"),
        (1, encode_keys([WantedKey(b"k")])[:-1], "end at byte 17 of a body of 16"),
        (1, encode_keys([WantedKey(b"k")]) + b"k", "end at byte 17 of a body of 18"),
        (ITEMS_MAX + 1, b"", f"the maximum is {ITEMS_MAX}"),
    ],
)
def test_an_invalid_list_of_keys_is_rejected(count: int, body: bytes, reason: str) -> None:
    with pytest.raises(OutOfBounds, match=reason):
        decode_keys(count, body)


def test_a_size_below_any_record_is_rejected() -> None:
    with pytest.raises(CorruptRecord, match="size 7"):
        decode_found(1, b"\0\0\0\x07" + b"x" * 7)
