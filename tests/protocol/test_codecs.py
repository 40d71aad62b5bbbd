"""One suite over every codec: values come back, and spoiled bytes are a value or its error."""

from __future__ import annotations

import zlib
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_protocol import fastjson
from headrace_protocol.bodies import DataVersion, TopicConfig, TopicConfigSerializeWrapper
from headrace_protocol.bounds import OutOfBounds
from headrace_protocol.columns import RecordColumns
from headrace_protocol.command import Command
from headrace_protocol.errors import CorruptRecord, RemoteProtocolError
from headrace_protocol.fastjson import MalformedJson, ObjectKey
from headrace_protocol.frame import PREFIX_BYTES
from headrace_protocol.header_codecs import SerializeType, decode_header, encode_frame
from headrace_protocol.key_lookup import (
    NoRecord,
    WantedKey,
    decode_found,
    decode_keys,
    encode_found,
    encode_keys,
)
from headrace_protocol.message import (
    StoredMessage,
    decode_records,
    encode_batch,
    encode_properties,
    encode_record,
    host_flags,
)
from headrace_protocol.recall_handle import RecallHandle, decode_recall_handle
from headrace_protocol.registration import RegisterBrokerBody
from headrace_protocol.staging import Decision, StagedAttempt, decode_names, encode_names
from headrace_protocol.statictopic.mapping import MappingInfo
from tests.support.batches import iter_batch
from tests.support.registrations import compressed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Codec(NamedTuple):
    """A codec with values that it can hold.

    errors: all that any bytes may raise. has_end: False if a value may lack its end.
    """

    values: st.SearchStrategy[Any]
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]
    errors: tuple[type[Exception], ...]
    has_end: bool = True


# Of one value; each is a decoding.
PLACES_MAX = 100

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
ASCII = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=255)
NAMES = st.text(alphabet="abZ09_%-|", min_size=1, max_size=12)
INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
COUNT = st.integers(0, 2**31 - 1)
STAGED = st.text(alphabet="abZ09-", min_size=1, max_size=12)


def by(name: str) -> Callable[[list[Any]], dict[str, Any]]:
    return lambda values: {getattr(value, name): value for value in values}


# -- headers ---------------------------------------------------------------------------------------

HEADERS = st.builds(
    Command,
    code=st.integers(-0x8000, 0x7FFF),
    language=st.sampled_from(["JAVA", "PYTHON"]),
    version=st.integers(0, 0x7FFF),
    opaque=COUNT,
    flag=st.integers(0, 3),
    remark=st.none() | TEXT,
    ext_fields=st.dictionaries(TEXT, TEXT, max_size=5),
)


def header_bytes(kind: SerializeType, command: Command) -> bytes:
    fields = {name: getattr(command, name) for name in ("flag", "remark", "language", "version")}
    frame = encode_frame(kind, command.code, command.opaque, fields=command.ext_fields, **fields)
    return frame[PREFIX_BYTES:]


def plain_header(kind: SerializeType, data: bytes) -> Command:
    found = decode_header(kind, memoryview(data))
    whole = {name: getattr(found, name) for name in Command.__struct_fields__}
    return Command(**(whole | {"ext_fields": found.ext()}))


def header_codec(kind: SerializeType) -> Codec:
    errors = (RemoteProtocolError, msgspec.MsgspecError)
    return Codec(HEADERS, partial(header_bytes, kind), partial(plain_header, kind), errors)


# -- JSON ------------------------------------------------------------------------------------------

SCALARS = st.booleans() | INT64 | st.floats(allow_nan=False, allow_infinity=False) | st.text()
JAVA_KEYS = (
    st.text()
    | INT64
    | st.dictionaries(st.text(), INT64 | st.booleans() | st.text(), max_size=3).map(ObjectKey)
)


def json_values(keys: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        SCALARS,
        lambda child: st.lists(child | st.none()) | st.dictionaries(keys, child),
        max_leaves=12,
    )


def json_codec(keys: st.SearchStrategy[Any], **form: bool) -> Codec:
    encode = partial(fastjson.dumps, **form)
    values = json_values(keys).map(lambda value: [value])
    return Codec(values, encode, fastjson.loads, (MalformedJson,))


# -- records ---------------------------------------------------------------------------------------


def with_host_flags(fields: dict[str, Any]) -> dict[str, Any]:
    flags = host_flags(fields["born_host"], fields["store_host"])
    return fields | {"sys_flag": fields["sys_flag"] & ~0x30 | flags}


ENTRY = st.text(st.characters(exclude_characters="\x01\x02", exclude_categories=["Cs"]), min_size=1)
HOSTS = st.binary(min_size=8, max_size=8) | st.binary(min_size=20, max_size=20)
FIELDS = {
    "topic": ASCII,
    "queue_id": INT32,
    "flag": INT32,
    "queue_offset": INT64,
    "physical_offset": INT64,
    "sys_flag": st.integers(0, 0x7FF),
    "born_timestamp": INT64,
    "born_host": HOSTS,
    "store_timestamp": INT64,
    "store_host": HOSTS,
    "reconsume_times": INT32,
    "prepared_transaction_offset": INT64,
}
RECORDS = st.lists(
    st.fixed_dictionaries(
        FIELDS
        | {
            "body": st.binary(max_size=300),
            "properties": st.dictionaries(ENTRY, ENTRY, max_size=4).map(encode_properties),
        }
    ).map(with_host_flags),
    min_size=1,
    max_size=3,
)


def records_bytes(records: list[dict[str, Any]]) -> bytes:
    return b"".join(encode_record(**fields) for fields in records)


def plain_records(messages: Iterable[StoredMessage]) -> list[dict[str, Any]]:
    return [
        {name: getattr(message, name) for name in FIELDS}
        | {"body": message.stored_body, "properties": message.raw_properties}
        for message in messages
    ]


def one_by_one(data: bytes) -> list[dict[str, Any]]:
    messages = decode_records(data)
    assert sum(message.size for message in messages) == len(data)
    return plain_records(messages)


def as_columns(data: bytes) -> list[dict[str, Any]]:
    columns = RecordColumns.from_records(data)
    columns.check_bodies()
    return plain_records(map(columns.message, range(len(columns))))


def decoded_batch(data: bytes) -> list[tuple[int, bytes, bytes]]:
    return list(iter_batch(data))


# -- other bodies ----------------------------------------------------------------------------------

KEY = st.binary(min_size=1, max_size=40)
KEYS = st.lists(
    KEY.map(WantedKey) | st.builds(WantedKey, KEY, COUNT, st.integers(-1, 2**63 - 1)),
    min_size=1,
    max_size=20,
)
ONE_RECORD = st.binary(max_size=20).map(
    lambda body: encode_record(topic="T", queue_id=0, body=body)
)
FOUND = st.lists(st.sampled_from(NoRecord) | ONE_RECORD, min_size=1, max_size=20)
TOPICS = st.builds(
    TopicConfig,
    topic_name=NAMES,
    read_queue_nums=INT32,
    write_queue_nums=INT32,
    perm=INT32,
    topic_filter_type=st.sampled_from(["SINGLE_TAG", "MULTI_TAG"]),
    attributes=st.dictionaries(NAMES, st.text(max_size=5), max_size=2),
)
MAPPINGS = st.builds(
    MappingInfo,
    topic=NAMES,
    total_queues=INT32,
    epoch=INT64,
    curr_id_map=st.dictionaries(INT32, INT32, max_size=3),
)
REGISTRATIONS = st.builds(
    RegisterBrokerBody,
    filter_server_list=st.lists(NAMES, max_size=2),
    topic_config_serialize_wrapper=st.builds(
        TopicConfigSerializeWrapper,
        data_version=st.builds(DataVersion, timestamp=INT64, counter=INT64, state_version=INT64),
        topic_config_table=st.lists(TOPICS, max_size=3).map(by("topic_name")),
        topic_queue_mapping_info_map=st.lists(MAPPINGS, max_size=3).map(by("topic")),
    ),
)
DECISIONS = st.builds(
    Decision,
    NAMES,
    COUNT,
    st.dictionaries(
        NAMES,
        st.lists(st.builds(StagedAttempt, STAGED, INT64, INT64), max_size=3).map(tuple),
        max_size=3,
    ),
)
HANDLES = st.builds(RecallHandle, NAMES, NAMES, st.integers(0, 10**18 - 1), NAMES)


def keys_bytes(keys: list[WantedKey]) -> bytes:
    return len(keys).to_bytes(1) + encode_keys(keys)


def found_bytes(found: list[bytes | NoRecord]) -> bytes:
    return len(found).to_bytes(1) + b"".join(encode_found(found))


def counted(decode: Callable[[int, memoryview], Any]) -> Callable[[bytes], Any]:
    return lambda data: decode(data[0] if data else 0, memoryview(data)[1:])


def decoded_registration(data: bytes) -> RegisterBrokerBody:
    return RegisterBrokerBody.decode_compressed(zlib.compress(data), has_mappings=True)


def decoded_handle(data: bytes) -> RecallHandle | None:
    return decode_recall_handle(data.decode("latin-1"))


CODECS = {
    **{kind.name: header_codec(kind) for kind in SerializeType},
    "fastjson": json_codec(JAVA_KEYS),
    "fastjson, pretty": json_codec(JAVA_KEYS, pretty=True),
    "fastjson, strict": json_codec(st.text(), strict=True),
    "records": Codec(RECORDS, records_bytes, one_by_one, (CorruptRecord,)),
    "records as columns": Codec(RECORDS, records_bytes, as_columns, (CorruptRecord,)),
    "batch": Codec(
        st.lists(
            st.tuples(INT32, st.binary(max_size=50), st.binary(max_size=50)), min_size=1, max_size=5
        ),
        encode_batch,
        decoded_batch,
        (CorruptRecord,),
    ),
    "wanted keys": Codec(KEYS, keys_bytes, counted(decode_keys), (OutOfBounds,)),
    "found records": Codec(FOUND, found_bytes, counted(decode_found), (CorruptRecord,)),
    "registration": Codec(
        REGISTRATIONS,
        lambda body: zlib.decompress(compressed(body)),
        decoded_registration,
        (MalformedJson,),
    ),
    "decision": Codec(DECISIONS, Decision.encode, Decision.decode, (msgspec.MsgspecError,)),
    "names of attempts": Codec(
        st.lists(STAGED), encode_names, decode_names, (msgspec.MsgspecError,)
    ),
    "recall handle": Codec(
        HANDLES, lambda handle: handle.encode().encode(), decoded_handle, (), has_end=False
    ),
}
EACH = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
SOME = settings(deadline=None, max_examples=15)


@EACH
@SOME
@given(data=st.data())
def test_a_value_comes_back(codec: Codec, data: st.DataObject) -> None:
    value = data.draw(codec.values)
    assert codec.decode(codec.encode(value)) == value


def read(codec: Codec, data: bytes, *, is_exact: bool = False) -> None:
    """Decode to a value, which has these bytes if it is exact, or to an error of the codec's."""
    try:
        value = codec.decode(data)
    except codec.errors:
        return
    if is_exact:
        assert codec.encode(value) == data


@EACH
@SOME
@given(data=st.data())
def test_a_value_that_is_spoiled_at_any_place_is_a_value_or_an_error(
    codec: Codec, data: st.DataObject
) -> None:
    whole = codec.encode(data.draw(codec.values))
    flip = data.draw(st.integers(1, 255))
    for place in range(min(len(whole), PLACES_MAX)):
        read(codec, whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1 :])
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(whole))] * 2)))
    read(codec, whole[:start] + data.draw(st.binary()) + whole[end:])


@EACH
@SOME
@given(data=st.data())
def test_a_value_without_its_end_is_an_error_or_those_before_it(
    codec: Codec, data: st.DataObject
) -> None:
    whole = codec.encode(data.draw(codec.values))
    for end in range(max(len(whole) - PLACES_MAX, 1), len(whole)):
        read(codec, whole[:end], is_exact=codec.has_end)


@EACH
@settings(deadline=None, max_examples=50)
@given(st.binary(max_size=80) | st.text(alphabet="{}[]:,\"'\\u0019aeE.+- \n").map(str.encode))
def test_any_bytes_are_a_value_or_an_error(codec: Codec, data: bytes) -> None:
    read(codec, data)
