"""Bounds on what a peer may send are checked before any work is done for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_broker.store.log import batch_records
from headrace_daemon.network import MemoryNetwork
from headrace_protocol import bounds, fastjson
from headrace_protocol.bodies import BrokerData, HeartbeatData
from headrace_protocol.bounds import HEADER_BYTES_MAX, OutOfBounds, body_of
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RemoteProtocolError
from headrace_protocol.fastjson import PARSED_BYTES_MAX, MalformedJson
from headrace_protocol.frame import FIRST_FRAME_BYTES_MAX, FrameReader
from headrace_protocol.header_codecs import SerializeType, admit, decode_header
from headrace_protocol.java_hash import (
    _java_hash_cached,
    _tags_code_of_bytes,
    index_key_hash,
    java_hash,
    tags_code,
    tags_code_of,
)
from headrace_protocol.message import BATCH_ITEMS_MAX, encode_batch
from headrace_protocol.serving import Registry, Reply, Request
from headrace_protocol.statictopic.mapping import MappingInfo
from tests.support.channel import MemoryChannel
from tests.support.wires import daemons, queue_fields, request, send_fields

KIB = 1024
MERSENNE = 2**61 - 1  # what CPython takes integers modulo, for their hash


def never(*_args: Any) -> Any:
    pytest.fail("work was done for what is over a bound")


# -- bodies ----------------------------------------------------------------------------------------


class Service:
    """A registry whose function records the bodies that it gets."""

    def __init__(self, code: RequestCode) -> None:
        self.bodies: list[bytes] = []
        self.code = code
        self.registry = Registry(never)
        self.registry.route(code, self.serve)

    def serve(self, request: Request) -> Reply:
        self.bodies.append(bytes(request.body))
        return Reply()

    def ask(self, body: bytes) -> tuple[int, str]:
        channel = MemoryChannel()
        self.registry.handle(channel, FrameReader().feed(request(self.code, body=body)))
        ((command, _),) = channel.replies()
        return command.code, command.remark or ""


@pytest.mark.parametrize(
    "code", [RequestCode.HEART_BEAT, RequestCode.STAGE_ABORT, RequestCode.UPDATE_BROKER_CONFIG]
)
def test_a_body_over_the_bound_of_its_code_is_refused(code: RequestCode) -> None:
    service, bytes_max = Service(code), body_of(code).bytes_max
    largest = b'"' + b"x" * (bytes_max - 2) + b'"'
    assert service.ask(largest) == (ResponseCode.SUCCESS, "")
    answer, remark = service.ask(largest + b" ")
    assert answer == ResponseCode.INVALID_PARAMETER
    assert remark == f"{code.name} with a body of {bytes_max + 1} bytes: {bytes_max} is the most"
    assert service.bodies == [largest]


def test_the_dialect_is_parsed_only_in_small_bodies() -> None:
    service = Service(RequestCode.HEART_BEAT)
    for form in (b"{clientID:'%b'}", b'{{"a":1}:"%b"}', b'{"a":"%b",,}', b'{"a":"%b'):
        small = form % (b"x" * 1000)
        assert service.ask(small) == (ResponseCode.SUCCESS, "")
        answer, remark = service.ask(form % (b"x" * PARSED_BYTES_MAX))
        assert answer == ResponseCode.INVALID_PARAMETER, form
        assert "only JSON is read" in remark
    assert len(service.bodies) == 4


# -- the dialect -----------------------------------------------------------------------------------


@pytest.fixture
def no_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what runs in C may read."""
    monkeypatch.setattr(fastjson._Parser, "parse", never)


def padded(text: bytes) -> bytes:
    """Text beyond the size that the parser accepts."""
    return text + b" " * PARSED_BYTES_MAX


@pytest.mark.usefixtures("no_parser")
def test_integer_keys_of_a_large_text_get_their_quotes() -> None:
    text = b'{"brokerAddrs": { 0 : "a:1",-1:"b{,2:", "3":"c\\",4:\\\\"},"cluster":"{5:"}'
    data = fastjson.bounded(padded(text))
    assert fastjson.decode(data, BrokerData).broker_addrs == {0: "a:1", -1: "b{,2:", 3: 'c",4:\\'}
    many = b'{"currIdMap":{%b}}' % b",".join(b"%d:%d" % (n, n) for n in range(9000))
    assert len(many) > PARSED_BYTES_MAX
    info = fastjson.decode(fastjson.bounded(many), MappingInfo)
    assert info.curr_id_map == {n: n for n in range(9000)}


@pytest.mark.usefixtures("no_parser")
@pytest.mark.parametrize(
    "text",
    [
        b"{" + b",".join(b"%d:1" % (n * MERSENNE) for n in range(12_000)) + b"}",
        b"{clientID:1,x:[" + b"1," * 100_000 + b"1]}",
        b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
        b"{1:" * 20_000 + b"1" + b"}" * 20_000,
        b'{"a":"' + b"\\u0041" * 10_000,
        b'\\"' * 50_000,
    ],
    ids=["one hash", "bare names", "deep", "deep integers", "no end", "quotes"],
)
def test_large_text_that_needs_the_parser_is_refused(text: bytes) -> None:
    with pytest.raises(MalformedJson, match="only JSON is read"):
        fastjson.bounded(text)


@pytest.mark.usefixtures("no_parser")
@pytest.mark.parametrize(
    "text", [b'{"clientID":1e999}', b'{"clientID":"\xff"}', b'{"clientID":[1]}', b"[1]"]
)
def test_a_large_body_that_cant_be_read_never_reaches_the_parser(text: bytes) -> None:
    with pytest.raises(MalformedJson):
        fastjson.decode(fastjson.bounded(padded(text)), HeartbeatData)


@pytest.mark.usefixtures("no_parser")
def test_nulls_of_a_large_body_are_left_out() -> None:
    data = fastjson.bounded(padded(b'{"clientID":"c","producerDataSet":null}'))
    assert fastjson.decode(data, HeartbeatData) == HeartbeatData(client_id="c")


@pytest.mark.slow
@given(st.recursive(st.integers(-9, 9) | st.text(), st.lists))
def test_json_is_left_as_it_is(value: Any) -> None:
    data = padded(json.dumps(value).encode())
    assert fastjson.bounded(data) is data


PIECES = st.sampled_from(
    ["{", "}", "[", "]", ",", ":", '"', "\\", "'", "0", "-12", "a", " ", "\n", '"k"', '{0:"x"}']
)


@pytest.mark.slow
@given(st.lists(PIECES).map("".join))
def test_a_large_text_is_read_as_the_parser_reads_it_or_refused(text: str) -> None:
    data = text.encode()
    try:
        value = json.loads(bytes(fastjson.bounded(padded(data))))
    except (MalformedJson, json.JSONDecodeError):
        return
    assert json.loads(json.dumps(fastjson.loads(data))) == value


def test_integers_have_19_digits_at_most() -> None:
    assert fastjson.loads(b"{-9999999999999999999:1}") == {-(10**19 - 1): 1}
    for text in (b"{10000000000000000000:1}", b"{%d:1}" % (100 * MERSENNE)):
        with pytest.raises(MalformedJson, match="out of range"):
            fastjson.loads(text)


# -- frames ----------------------------------------------------------------------------------------


def start_of(frame: bytes) -> bytes:
    """The prefix and the header."""
    return frame[: 8 + int.from_bytes(frame[5:8])]


@pytest.mark.parametrize("codec", list(SerializeType))
def test_a_large_first_frame_is_refused_by_its_header(codec: SerializeType) -> None:
    frame = request(34, body=bytes(300 * KIB), codec=codec)
    with pytest.raises(RemoteProtocolError, match="HEART_BEAT with a body of 307200 bytes"):
        FrameReader(admit=admit).feed(start_of(frame))
    assert FrameReader().feed(start_of(frame)) == []


def test_a_large_header_of_a_first_frame_is_read() -> None:
    properties = f"k\x01{'x' * FIRST_FRAME_BYTES_MAX}\x02"
    frame = request(310, send_fields(i=properties), b"x")
    reader = FrameReader(admit=admit)
    assert reader.feed(frame[:100]) == []
    ((_, header, body),) = reader.feed(frame[100:])
    assert len(header) > FIRST_FRAME_BYTES_MAX
    assert bytes(body) == b"x"


@pytest.mark.parametrize("cut", [5, 9, 40, 5000])
def test_a_permitted_large_first_frame_is_read_however_it_is_cut(cut: int) -> None:
    frame = request(310, send_fields(), body=bytes(300 * KIB))
    reader = FrameReader(admit=admit)
    assert reader.feed(frame[:cut]) == []
    ((_, header, body),) = reader.feed(frame[cut:] + frame[:3])
    assert b'"code":310' in bytes(header)
    assert len(body) == 300 * KIB


async def test_a_first_frame_may_be_a_large_message() -> None:
    async with daemons(MemoryNetwork()) as under_test, under_test.wire() as wire:
        command, _ = await wire.ask(request(310, send_fields(), bytes(KIB * KIB)))
        assert command.code == ResponseCode.SUCCESS


async def test_a_large_first_frame_of_another_kind_is_closed() -> None:
    async with daemons(MemoryNetwork()) as under_test, under_test.wire() as wire:
        await wire.send(start_of(request(34, body=bytes(300 * KIB))))
        await wire.closed()
    async with daemons(MemoryNetwork()) as under_test, under_test.wire() as wire:
        await wire.ask(request(28))
        command, _ = await wire.ask(request(34, body=bytes(300 * KIB)))
        assert (command.code, command.opaque) == (ResponseCode.INVALID_PARAMETER, 1)


async def test_a_header_over_its_bound_is_closed() -> None:
    async with daemons(MemoryNetwork()) as under_test, under_test.wire() as wire:
        command, _ = await wire.ask(request(100, {"namespace": "x" * (HEADER_BYTES_MAX - 200)}))
        assert command.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
        await wire.send(request(100, {"namespace": "x" * HEADER_BYTES_MAX}))
        await wire.closed()


async def test_a_plain_send_with_a_header_over_the_bound_is_closed() -> None:
    async with daemons(MemoryNetwork()) as under_test, under_test.wire() as wire:
        properties = f"KEYS\x01k\x02UNIQ_KEY\x01{'a' * 32}\x02"
        command, _ = await wire.ask(request(310, send_fields(i=properties), b"x"))
        assert command.code == ResponseCode.SUCCESS
        await wire.send(request(310, send_fields(i=properties, z="z" * HEADER_BYTES_MAX), b"x"))
        await wire.closed()


# -- hashes ----------------------------------------------------------------------------------------


@pytest.mark.slow
@given(st.text(min_size=200, max_size=400))
def test_a_long_text_has_the_hash_of_its_definition(text: str) -> None:
    raw, value = text.encode("utf-16-be", "surrogatepass"), 0
    for at in range(0, len(raw), 2):
        value = (31 * value + int.from_bytes(raw[at : at + 2])) % 2**32
    assert java_hash(text) % 2**32 == value


def test_a_text_longer_than_any_tags_is_not_hashed() -> None:
    java_hash("x" * bounds.HASHED_CHARS_MAX)
    for hashed in (java_hash, tags_code, lambda t: index_key_hash("T", t)):
        with pytest.raises(OutOfBounds, match=r"65537|65539"):
            hashed("x" * (bounds.HASHED_CHARS_MAX + 1))


def test_long_tags_are_not_kept() -> None:
    caches = (_java_hash_cached, _tags_code_of_bytes)
    kept = [cache.cache_info().currsize for cache in caches]
    tags = str(Random(1).random()) * 30
    assert tags_code(tags) == tags_code_of(f"TAGS\x01{tags}\x02".encode())
    assert [cache.cache_info().currsize for cache in caches] == kept


async def test_properties_over_their_bound_are_not_looked_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    properties = f"UNIQ_KEY\x01abc\x02TAGS\x01{'x' * 100_000}\x02"
    async with daemons(MemoryNetwork()) as under_test, under_test.wire() as wire:
        await wire.ask(request(28))
        monkeypatch.setattr("headrace_protocol.java_hash.java_hash", never)
        for code in (310, 320):
            command, _ = await wire.ask(request(code, send_fields(i=properties), b"x"))
            assert command.code == ResponseCode.MESSAGE_ILLEGAL, command.remark
            assert "the maximum of 32767" in (command.remark or "")
        monkeypatch.undo()


async def test_a_query_key_over_its_bound_is_refused() -> None:
    fields = {"key": "k" * 200_000, "maxNum": 9, "beginTimestamp": 0, "endTimestamp": 2**63 - 1}
    async with daemons(MemoryNetwork()) as under_test, under_test.wire() as wire:
        command, _ = await wire.ask(request(12, queue_fields(**fields)))
        assert command.code == ResponseCode.INVALID_PARAMETER
        assert "200" in (command.remark or "")


# -- names and numbers -----------------------------------------------------------------------------


def nested(levels: int, value: Any) -> Any:
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (bounds.check_topic, ["T", "%RETRY%" + "g" * 248, "t" * 127], ["", "a b", "t" * 128, "ä"]),
        (bounds.check_group, ["g" * 120], ["", "a.b", "g" * 121, "\x1b[2J"]),
        (
            lambda name: bounds.check_name("broker", name),
            ["a.b-c", "größe", "n" * 255],
            ["", "a b", "\x1b", "n" * 256, "a\n", "\u202e"],
        ),
        (
            lambda address: bounds.check_address("brokerAddr", address),
            ["10.0.0.1:10911", "[::1]:1", "[fe80::1%eth0]:1", "host-1.example_x:65535"],
            [
                "",
                ":1",
                "h:",
                "h:0",
                "h:65536",
                "h:1:2",
                "h o:1",
                "h:1\n",
                "::1:1",
                "h" * 255 + ":1",
            ],
        ),
        (lambda perm: bounds.check_perm("perm", perm), [0, 6, 15], [-1, 16, 2**31 - 1]),
        (
            lambda number: bounds.check_queue_nums("readQueueNums", number),
            [0, 65_536],
            [-1, 65_537, 2**31 - 1],
        ),
        (
            lambda items: bounds.check_items("queues", items),
            [range(10_000)],
            [range(10_001)],
        ),
        (
            lambda value: bounds.check_depth("policy", value),
            [1, {"a": [{"b": {"c": [1, {"d": [[]]}]}}]}],
            [nested(8, {}), nested(8, []), nested(900, 1)],
        ),
    ],
)
def test_names_and_numbers(check: Callable[[Any], None], good: list[Any], bad: list[Any]) -> None:
    for value in good:
        check(value)
    for value in bad:
        with pytest.raises(OutOfBounds) as raised:
            check(value)
        assert raised.value.code == ResponseCode.INVALID_PARAMETER
        assert len(str(raised.value)) < 300


@pytest.mark.parametrize("codec", [SerializeType.JSON, SerializeType.MSGPACK])
@pytest.mark.parametrize("name", ["code", "version", "opaque", "flag"])
def test_integers_of_a_header_have_19_digits_at_most(name: str, codec: SerializeType) -> None:
    values = {"code": 31, "version": 513, "opaque": 1, "flag": 0, name: 2**63}
    if codec is SerializeType.JSON:
        header = json.dumps(values).encode()
    else:
        fields = [values["code"], "JAVA", values["version"], values["opaque"], values["flag"]]
        header = msgpack.packb([*fields, None, {}])
    with pytest.raises(RemoteProtocolError, match="malformed"):
        decode_header(codec, header)


# -- batches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b"", b"x"], ids=["of_empty_items", "of_items_alike"])
async def test_a_batch_of_too_many_messages_is_refused_before_it_is_made_records(
    monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    item = encode_batch([(0, body, b"")])
    async with daemons(MemoryNetwork()) as under_test, under_test.wire() as wire:
        sent = request(320, send_fields(m="true"), item * BATCH_ITEMS_MAX)
        assert (await wire.ask(sent))[0].code == ResponseCode.SUCCESS
        monkeypatch.setattr(batch_records, "_tags_codes", never)
        sent = request(320, send_fields(m="true"), item * (BATCH_ITEMS_MAX + 1))
        command, _ = await wire.ask(sent)
        assert command.code == ResponseCode.MESSAGE_ILLEGAL
        assert f"the batch has more than {BATCH_ITEMS_MAX} messages" in (command.remark or "")
        monkeypatch.undo()
