"""Bodies of GET_BY_KEY survive a round trip, and damaged ones are rejected."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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

KEYS = st.lists(
    st.one_of(
        st.binary(min_size=1, max_size=40).map(WantedKey),
        st.builds(
            WantedKey,
            st.binary(min_size=1, max_size=40),
            st.integers(0, 2**31 - 1),
            st.integers(-1, 2**63 - 1),
        ),
    ),
    min_size=1,
    max_size=20,
)
RECORDS = st.binary(max_size=20).map(lambda body: encode_record(topic="T", queue_id=0, body=body))
FOUND = st.lists(st.one_of(st.sampled_from(NoRecord), RECORDS), min_size=1, max_size=20)


@given(KEYS)
def test_keys_survive_a_round_trip(keys: list[WantedKey]) -> None:
    assert decode_keys(len(keys), memoryview(encode_keys(keys))) == keys


@given(FOUND)
def test_results_survive_a_round_trip(found: list[bytes | NoRecord]) -> None:
    assert decode_found(len(found), b"".join(encode_found(found))) == found


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


@given(FOUND, st.integers(1, 30))
def test_a_torn_answer_is_rejected(found: list[bytes | NoRecord], missing_bytes: int) -> None:
    body = b"".join(encode_found(found))
    with pytest.raises(CorruptRecord):
        decode_found(len(found), body[:-missing_bytes])
    with pytest.raises(CorruptRecord):
        decode_found(len(found), body + b"x")


def test_a_size_below_any_record_is_rejected() -> None:
    with pytest.raises(CorruptRecord, match="size 7"):
        decode_found(1, b"\0\0\0\x07" + b"x" * 7)
