"""The record codec, properties, hashes, ids and batch bodies."""

from __future__ import annotations

import datetime as dt
import sys
import tracemalloc
import zlib

import lz4.frame
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from headrace_protocol.compression import (
    COMPRESSED,
    COMPRESSION_LZ4,
    COMPRESSION_ZSTD,
    BodyTooLarge,
    CodecMissing,
    codec,
    decompress,
)
from headrace_protocol.errors import CorruptRecord
from headrace_protocol.java_hash import index_key_hash, java_hash, tags_code, tags_code_of
from headrace_protocol.message import (
    BLANK_RECORD,
    MAGIC_BLANK,
    MAGIC_V1,
    MAGIC_V2,
    StoredMessage,
    decode_properties,
    decode_record,
    decode_records,
    encode_properties,
    encode_record,
    property_number,
    property_value,
    with_properties,
)
from headrace_protocol.message_ids import (
    UniqKeyGenerator,
    decode_host,
    decode_offset_message_id,
    encode_host,
    encode_offset_message_id,
)

ASCII = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1)
TEXT = st.text(st.characters(exclude_characters="\x01\x02", exclude_categories=["Cs"]), min_size=1)
HOSTS = st.binary(min_size=8, max_size=8) | st.binary(min_size=20, max_size=20)
INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)


@pytest.mark.parametrize(("topic", "magic"), [("t" * 127, MAGIC_V1), ("t" * 128, MAGIC_V2)])
def test_a_long_topic_needs_the_second_version(topic: str, magic: int) -> None:
    message = decode_record(encode_record(topic=topic, queue_id=0, body=b"b"))
    assert (message.topic, message.magic) == (topic, magic)


def test_an_end_of_file_record_is_no_message() -> None:
    raw = BLANK_RECORD.pack(200, MAGIC_BLANK) + bytes(192)
    with pytest.raises(CorruptRecord, match="magic number 0xcbd43194"):
        decode_record(raw)


def test_several_records_are_read_back_to_back() -> None:
    raw = [encode_record(topic="T", queue_id=n, body=b"x" * n) for n in range(3)]
    assert [message.queue_id for message in decode_records(b"".join(raw))] == [0, 1, 2]
    with pytest.raises(CorruptRecord) as caught:
        decode_records(b"".join(raw)[:-1])
    assert caught.value.position == len(raw[0]) + len(raw[1])


def test_properties_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="32768 bytes, more than 32767"):
        encode_record(topic="T", queue_id=0, body=b"", properties=b"x" * 32768)


@given(st.dictionaries(TEXT, TEXT))
def test_properties_come_back(properties: dict[str, str]) -> None:
    assert decode_properties(encode_properties(properties)) == properties


@pytest.mark.parametrize(
    ("raw", "properties"),
    [
        (b"", {}),
        (b"a\x01b", {"a": "b"}),
        (b"a\x01\x02c\x01d\x02", {"c": "d"}),
        (b"\x01b\x02", {}),
        (b"ab\x02\x02", {}),
        (b"a\x01b\x02a\x01c\x02", {"a": "c"}),
        (b"a\x01b\x01c\x02", {"a": "b\x01c"}),
    ],
)
def test_properties_by_the_peers_rules(raw: bytes, properties: dict[str, str]) -> None:
    assert decode_properties(raw) == properties


PIECES = st.sampled_from([b"TAGS", b"KEYS", b"X", b"\x01", b"\x02", b"a", "é".encode(), b""])


@given(st.lists(PIECES).map(b"".join))
def test_one_property_is_found_as_among_all(raw: bytes) -> None:
    properties = decode_properties(raw)
    assert property_value(raw, b"TAGS").decode() == properties.get("TAGS", "")
    assert tags_code_of(raw) == tags_code(properties.get("TAGS"))


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("007", 7), ("9" * 18, 10**18 - 1), ("9" * 19, -1), ("\u00b2", -1), ("-1", -1)],
)
def test_a_number_is_one_to_eighteen_digits(text: str, number: int) -> None:
    assert property_number(f"N\x01{text}\x02".encode(), b"N", -1) == number
    assert property_number(b"M\x011\x02", b"N", -1) == -1


def test_properties_that_are_set_replace_others_of_their_names() -> None:
    raw = b"A\x011\x02B\x012\x02AB\x013\x02A\x014"
    assert with_properties(raw, {b"A": b"5", b"C": b"6"}) == (
        b"B\x012\x02AB\x013\x02A\x015\x02C\x016\x02"
    )
    assert with_properties(raw, {}, [b"A", b"B"]) == b"AB\x013\x02"


def naive_hash(text: str) -> int:
    value = 0
    raw = text.encode("utf-16-be", "surrogatepass")
    for at in range(0, len(raw), 2):
        value = (31 * value + int.from_bytes(raw[at : at + 2], "big")) % 2**32
    return value - 2**32 if value >= 2**31 else value


@given(st.text())
def test_the_hash_is_that_of_its_definition(text: str) -> None:
    assert java_hash(text) == naive_hash(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [("", 0), ("TagA", 2598919), ("polygenelubricants", -(2**31)), ("Aa", 2112), ("BB", 2112)],
)
def test_hashes_that_java_gives(text: str, value: int) -> None:
    assert java_hash(text) == value


def test_no_tags_have_code_0() -> None:
    assert tags_code(None) == tags_code("") == 0


def key_with_hash(topic: str, wanted: int) -> str:
    """Seven characters from @ on, which are enough for any hash."""
    rest = (wanted - naive_hash(f"{topic}#@@@@@@@")) % 2**32
    digits = [rest // 31**place % 31 for place in range(6, -1, -1)]
    return "".join(chr(ord("@") + digit) for digit in digits)


@given(ASCII, INT32)
def test_an_index_hash_is_never_negative(topic: str, value: int) -> None:
    assert index_key_hash(topic, key_with_hash(topic, value)) == (
        abs(value) if value > -(2**31) else 0
    )


def test_the_smallest_hash_has_no_positive_one() -> None:
    assert index_key_hash("T", key_with_hash("T", -(2**31))) == 0


@pytest.mark.parametrize(("ip", "port"), [("10.1.2.3", 10911), ("2001:db8::1", 65535)])
def test_hosts_and_offset_message_ids_come_back(ip: str, port: int) -> None:
    host = encode_host(ip, port)
    assert decode_host(host) == (ip, port)
    message_id = encode_offset_message_id(host, 123456789)
    assert decode_offset_message_id(message_id) == (host, 123456789)


def test_an_offset_message_id_as_the_peer_writes_it() -> None:
    host = encode_host("127.0.0.1", 10911)
    assert encode_offset_message_id(host, 1101304) == "7F00000100002A9F000000000010CDF8"


@pytest.mark.parametrize("message_id", ["", "7F", "x" * 32])
def test_a_wrong_message_id_is_refused(message_id: str) -> None:
    with pytest.raises(ValueError, match=r"32 or 56|hexadecimal"):
        decode_offset_message_id(message_id)


def test_uniq_keys_differ_and_tell_the_time_since_the_month_began() -> None:
    october_ms, november_ms = (
        round(dt.datetime(2026, month, 1).timestamp() * 1000)  # noqa: DTZ001 - local time is meant
        for month in (10, 11)
    )
    times = iter((november_ms - 1, november_ms + 5, november_ms + 5))
    keys = UniqKeyGenerator(times.__next__, 4711, bytes((127, 0, 0, 1)), 7)
    start = "7F000001" + f"{4711:04X}" + "00000007"
    assert [keys.next() for _ in range(3)] == [
        f"{start}{november_ms - 1 - october_ms:08X}0001",
        f"{start}000000050002",
        f"{start}000000050003",
    ]
    assert len(UniqKeyGenerator(lambda: october_ms, 1, bytes(16)).next()) == 56


def stored(body: bytes, sys_flag: int) -> StoredMessage:
    return decode_record(encode_record(topic="T", queue_id=0, body=body, sys_flag=sys_flag))


BODY = b"many words, many words, many words"


@pytest.mark.parametrize(
    ("body", "sys_flag"),
    [
        (BODY, 0),
        *(codec(name).compress(BODY * 9) for name in ("zlib", "lz4", "zstd")),
        (zlib.compress(BODY), COMPRESSED),
        (lz4.frame.compress(BODY), COMPRESSED | COMPRESSION_LZ4),
        (zstandard.compress(BODY), COMPRESSED | COMPRESSION_ZSTD),
    ],
)
def test_a_body_is_decompressed(body: bytes, sys_flag: int) -> None:
    assert stored(body, sys_flag).body in {BODY, BODY * 9}
    assert stored(body, sys_flag).stored_body == body


def test_a_body_that_does_not_become_shorter_stays() -> None:
    for name in ("zlib", "lz4", "zstd"):
        assert codec(name).compress(b"x") == (b"x", 0)


# Of no declared size, as streams of other clients.
STREAMED = {
    "zlib": (zlib.compress(bytes(50_000_000)), 0),
    "lz4": (lz4.frame.compress(bytes(50_000_000), store_size=False), COMPRESSION_LZ4),
    "zstd": (
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(50_000_000)),
        COMPRESSION_ZSTD,
    ),
}


@pytest.mark.parametrize(("body", "kind"), STREAMED.values(), ids=STREAMED.keys())
@pytest.mark.parametrize("allowed", [100_000, 20_000_000])
def test_a_bomb_costs_a_piece_more_than_allowed(body: bytes, kind: int, allowed: int) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(BodyTooLarge):
            decompress(body, COMPRESSED | kind, allowed)
        _, peak_bytes = tracemalloc.get_traced_memory()
        assert peak_bytes < allowed + 1_000_000
        assert len(decompress(body, COMPRESSED | kind)) == 50_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (lz4.frame.compress(bytes(5_000_000), store_size=True), COMPRESSION_LZ4),
        (zstandard.compress(bytes(5_000_000)), COMPRESSION_ZSTD),
    ],
)
def test_a_size_that_is_declared_is_checked_first(body: bytes, kind: int) -> None:
    # Damaged behind the declaration, which nobody reads.
    damaged = body[:20] + bytes(len(body) - 20)
    with pytest.raises(BodyTooLarge):
        decompress(damaged, COMPRESSED | kind, 4_999_999)
    with pytest.raises(CorruptRecord):
        decompress(damaged, COMPRESSED | kind, 5_000_000)


@pytest.mark.parametrize("kind", [0, COMPRESSION_LZ4, COMPRESSION_ZSTD])
def test_a_body_that_is_not_compressed_is_corrupt(kind: int) -> None:
    with pytest.raises(CorruptRecord, match="does not decompress"):
        _ = stored(BODY, COMPRESSED | kind).body


@pytest.mark.parametrize(
    ("name", "body", "kind"),
    [
        ("ZLIB", zlib.compress(bytes(1_000_000)), 0),
        ("LZ4", lz4.frame.compress(bytes(1_000_000)), COMPRESSION_LZ4),
        ("ZSTD", zstandard.compress(bytes(1_000_000)), COMPRESSION_ZSTD),
    ],
)
def test_a_body_is_decompressed_no_further_than_allowed(name: str, body: bytes, kind: int) -> None:
    sys_flag = COMPRESSED | kind
    assert len(decompress(body, sys_flag, 1_000_000)) == 1_000_000
    with pytest.raises(BodyTooLarge, match=f"{name} body of {len(body)} bytes .* 999999"):
        decompress(body, sys_flag, 999_999)


@pytest.mark.parametrize(
    ("body", "kind"), [(zlib.compress(BODY), 0), (lz4.frame.compress(BODY), COMPRESSION_LZ4)]
)
def test_a_compressed_body_without_its_end_is_corrupt(body: bytes, kind: int) -> None:
    with pytest.raises(CorruptRecord, match="truncated"):
        decompress(body[:-1], COMPRESSED | kind)


@pytest.mark.parametrize(
    ("kind", "package"), [(COMPRESSION_LZ4, "lz4"), (COMPRESSION_ZSTD, "zstandard")]
)
def test_a_missing_codec_names_its_package(
    kind: int, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("lz4", "lz4.frame", "zstandard"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(CodecMissing, match=f"pip install {package}"):
        _ = stored(BODY, COMPRESSED | kind).body


def test_a_message_names_itself() -> None:
    properties = encode_properties({"UNIQ_KEY": "U1", "KEYS": " a  b ", "TAGS": "t"})
    raw = encode_record(topic="T", queue_id=3, body=b"", properties=properties, queue_offset=9)
    message = decode_record(raw)
    assert (message.keys, message.tags, message.message_id) == (["a", "b"], "t", "U1")
    assert "T/3@9" in repr(message)
    bare = decode_record(encode_record(topic="T", queue_id=3, body=b""))
    assert bare.message_id == bare.offset_message_id == "0" * 32
