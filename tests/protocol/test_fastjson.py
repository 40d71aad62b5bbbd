"""The peer's JSON dialect: whatever it writes is read, whatever is not JSON is refused by place."""

from __future__ import annotations

import enum
import json
import tarfile
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_protocol import fastjson
from headrace_protocol.fastjson import DEPTH_MAX, MalformedJson, ObjectKey
from tests.support.golden_frames import GOLDEN

INTEGERS = st.integers(-(2**63), 2**63 - 1)
QUEUE = ObjectKey({"brokerName": "a", "queueId": 0, "topic": "T"})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (
            '{"a":[1,-2.5,1e3,true,false,null,"x"]}',
            {"a": [1, -2.5, 1000.0, True, False, None, "x"]},
        ),
        ('{0:"10.0.0.1:10911", -1 : 2}', {0: "10.0.0.1:10911", -1: 2}),
        ('{{"brokerName":"a","queueId":0,"topic":"T"}:5}', {QUEUE: 5}),
        ('{{"topic":"T","queueId":0,"brokerName":"a"}:5}', {QUEUE: 5}),
        ("{'a':'it\\'s \"b\"'}", {"a": 'it\'s "b"'}),
        ("{name:1,$x_1:2,null:3,größe:4}", {"name": 1, "$x_1": 2, "null": 3, "größe": 4}),
        ("{a:[],b:{}}", {"a": [], "b": {}}),
        (' \t\r\n{ "a" : [ 1 , 2 ] } \n', {"a": [1, 2]}),
        ('["a\x01b\x02"]', ["a\x01b\x02"]),
        (r"""['\"\'\\\/\b\f\n\r\t\v\u4e2d\uD83D\uDE00']""", ["\"'\\/\b\f\n\r\t\v中😀"]),
        (r"""['\ud800x']""", ["\ufffdx"]),
        ('{"a":1,a:2}', {"a": 2}),
        ("12345678901234567890", 12345678901234567890),
    ],
)
def test_reads_the_dialect(text: str, value: object) -> None:
    assert fastjson.loads(text.encode()) == value


@pytest.mark.parametrize(
    ("data", "position", "reason"),
    [
        (b"", 0, "the end"),
        (b"{", 1, "a key, found the end"),
        (b'{"a"', 4, "':'"),
        (b'{"a":1', 6, "','"),
        (b'{"a":1,}', 7, "a key"),
        (b"[1 2]", 3, "','"),
        (b"{1.5:1}", 1, "a key with a fraction"),
        (b"{[1]:1}", 1, "a key"),
        (b"{{a:[1]}:1}", 1, "object key contains objects"),
        (b"{a:undefined}", 3, "a value"),
        (b"{a:-}", 3, "a number"),
        (b"[1e999]", 1, "out of range"),
        (b"[" + b"9" * 5000 + b"]", 1, "out of range"),
        ('{"ä":"no end'.encode(), 5, "closing quote"),
        (rb"{'a\q':1}", 3, "unknown escape"),
        ('"ä'.encode() + b'\xff"', 2, "not UTF-8"),
        (b"{} {}", 3, "the end"),
    ],
)
def test_names_where_it_is_malformed(data: bytes, position: int, reason: str) -> None:
    with pytest.raises(MalformedJson, match=f"at character {position}$") as caught:
        fastjson.loads(data)
    assert caught.value.position == position
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 100_000,
        b"[" * (DEPTH_MAX + 1) + b"]" * (DEPTH_MAX + 1),
        b"{0:" * 100_000,
        b"{" * 100_000,
        b'{"a":' * (DEPTH_MAX + 1) + b"1" + b"}" * (DEPTH_MAX + 1),
    ],
)
def test_bounds_the_depth(data: bytes) -> None:
    with pytest.raises(MalformedJson, match="64 levels"):
        fastjson.loads(data)


def test_reads_up_to_the_depth() -> None:
    for start, end in ((b"[", b"]"), (b"{0:", b"}")):
        value = fastjson.loads(start * (DEPTH_MAX - 1) + b"[]" + end * (DEPTH_MAX - 1))
        assert fastjson.dumps(value).startswith(start * 3)


def test_an_open_quote_takes_no_exponential_time() -> None:
    with pytest.raises(MalformedJson):
        fastjson.loads(b"{a:'" + b"x" * 100_000)


def scalars() -> st.SearchStrategy[Any]:
    numbers = INTEGERS | st.floats(allow_nan=False, allow_infinity=False)
    return st.booleans() | numbers | st.text()


@pytest.mark.slow
@given(st.recursive(scalars(), lambda child: st.lists(child) | st.dictionaries(st.text(), child)))
def test_any_reader_reads_the_strict_form(value: Any) -> None:
    data = fastjson.dumps(value, strict=True)
    assert data.isascii()
    assert json.loads(data) == value
    assert fastjson.loads(data) == value


class Colour(enum.IntEnum):
    RED = 1


class Inner(msgspec.Struct, rename="camel", frozen=True):
    queue_id: int
    name: str = "n"


class Outer(msgspec.Struct, rename="camel"):
    z_last: int = 0
    by_queue: dict[Inner, int] = {}
    by_id: dict[int, str] = {}
    nothing: str | None = None
    is_on: bool = False


def test_writes_structs_as_the_peer_does() -> None:
    value = Outer(z_last=3, by_queue={Inner(1): 5}, by_id={2: "ü"})
    expected = '{"byId":{2:"ü"},"byQueue":{{"name":"n","queueId":1}:5},"isOn":false,"zLast":3}'
    assert fastjson.dumps(value) == expected.encode()
    assert fastjson.decode(expected.encode(), Outer) == value


def test_writes_the_rest_as_the_peer_does() -> None:
    value = {"none": None, "enum": Colour.RED, "nan": float("nan"), "list": (None, True)}
    assert fastjson.dumps(value) == b'{"enum":"RED","nan":null,"list":[null,true]}'
    assert fastjson.dumps({2: {"b": 1, "a": "é"}, 10: 0}, strict=True) == (
        rb'{"10":0,"2":{"a":"\u00e9","b":1}}'
    )
    with pytest.raises(TypeError, match="no JSON form for bytes"):
        fastjson.dumps(b"")


def test_decode_is_as_lenient_as_the_peer() -> None:
    text = b'{"zLast":"7","isOn":"true","byId":{"1":"a",2:"b"},"nothing":null,"other":{"x":[]}}'
    assert fastjson.decode(text, Outer) == Outer(z_last=7, is_on=True, by_id={1: "a", 2: "b"})
    assert fastjson.decode(b'{"zLast":null}', Outer) == Outer()


def test_decode_names_the_field_of_a_wrong_type() -> None:
    with pytest.raises(MalformedJson, match=r"Expected `object`, got `int` - at `\$.byId`"):
        fastjson.decode(b"{byId:1}", Outer)
    with pytest.raises(MalformedJson, match=r"\$.zLast"):
        fastjson.decode(b'{"zLast":[]}', Outer)
    with pytest.raises(MalformedJson, match="character 8"):
        fastjson.decode(b'{"zLast"', Outer)


def config_files() -> dict[str, bytes]:
    with tarfile.open(GOLDEN / "store-clean.tar.gz") as store:
        members = [m for m in store if m.isfile() and "/config/" in m.name]
        contents = {m.name: store.extractfile(m) for m in members}
        return {name: file.read() for name, file in contents.items() if file is not None}


def test_config_files_of_the_peer_keep_every_byte() -> None:
    files = {name: data for name, data in config_files().items() if not name.endswith("timercheck")}
    assert len(files) > 12
    for name, data in files.items():
        assert fastjson.dumps(fastjson.loads(data), pretty=b"\n" in data) == data, name


def test_maps_of_numbers_are_written_like_any_other() -> None:
    numbers = {10: 1, 2: -3}
    assert fastjson.dumps(numbers) == b"{10:1,2:-3}"
    assert fastjson.dumps(numbers, strict=True) == b'{"10":1,"2":-3}'
    assert fastjson.dumps(numbers, pretty=True) == b"{\n\t10:1,\n\t2:-3\n}"
    for other in ({1: True}, {1: None}, {"1": 1}, {True: 1}, {1: 2, "b": 3}, {}):
        with_text = fastjson.dumps({**other, "z": "z"})
        written = fastjson.dumps(other)
        assert with_text.startswith(written[:-1])


@pytest.mark.parametrize(
    "text",
    [
        b'{\n\t0:"x",\n\t-1:"y"\n}',
        b'{\n  0:"x",-1:"y"}',
        b'{0 : "x",\n "-1":"y"}',
        b'{"0":"x",\n-1\n:"y"}',
    ],
)
def test_strict_text_has_bare_or_quoted_integer_keys(text: bytes) -> None:
    assert fastjson.decode_strict(text, dict[int, str]) == {0: "x", -1: "y"}


@pytest.mark.parametrize("text", [b'{"a":"\n1:"}', b'{"a":"\n1:","b":"\n2:"}', b'{"a\n1:":"b"}'])
def test_a_line_break_in_a_string_makes_no_key(text: bytes) -> None:
    with pytest.raises(MalformedJson):
        fastjson.decode_strict(text, dict[str, str])
