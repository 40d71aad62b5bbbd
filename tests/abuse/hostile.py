"""Values that a hostile peer puts into headers and bodies."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import msgspec

from headrace_protocol.bodies import TopicConfig, TopicConfigSerializeWrapper
from headrace_protocol.codes import RequestCode as Code
from headrace_protocol.header_codecs import SerializeType
from headrace_protocol.registration import RegisterBrokerBody
from tests.support.registrations import compressed
from tests.support.wire_types import REQUEST_HEADERS

JSON, ROCKETMQ, MSGPACK = SerializeType

FOREIGN_TEXTS = (
    "x" * 30_000,
    "\x1b[2J",
    "../../../etc",
    "%n%s{0}",
    "ä" * 500,
    " ",
    "-1",
    "a\x01b\x02",
)
NO_FIELDS: dict[str, Any] = {}
SAME_HASH = 2**61 - 1
DEEP = 5000

BODIES_OF_OTHERS = {
    "nothing": b"",
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "zeros": bytes(5000),
    "zlib": zlib.compress(bytes(300_000)),
    "a number of blocks": struct.pack(">iii", 2**31 - 1, -(2**31), -1),
    "no text": b"\xff\xfe\xed\xa0\x80" * 20,
    "null": b"null",
    "a list": b'[1,"a",null,{}]',
    "wrong types": b'{"clientID":5,"topicConfigList":{},"mqSet":"x","groupName":[],"a":1e999}',
    "nulls": b'{"clientID":null,"topicConfigList":[null],"mqSet":[null],"groupName":null}',
    "bare names": b"{clientID:'c',mqSet:[{}],groupName:g,topicConfigList:[{}]}",
    "lines": b"noSuchKey=1\nstorePathRootDir=/\n\x1b[2J=\n",
}
DEEP_BODIES = {
    "lists": b"[" * DEEP + b"]" * DEEP,
    "lists without end": b"[" * 100_000,
    "objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "integer keys": b"{1:" * DEEP + b"1" + b"}" * DEEP,
    "object keys": b"{{" * DEEP,
    "a policy": b'{"groupName":"deep","groupRetryPolicy":' + b'{"a":' * 50 + b"1" + b"}" * 51,
}
LARGE_BODIES = {
    "one hash": b"{%b}" % b",".join(b"%d:1" % (n * SAME_HASH) for n in range(1, 8000)),
    "nulls": b'{"clientID":"c","mqSet":[%bnull]}' % (b"null," * 40_000),
    "names": b"{clientID:c,a:[%b1]}" % (b"1," * 100_000),
    "empty lists": b'{"a":[%b[]]}' % (b"[]," * 80_000),
}


def plain_value(field_type: Any) -> Any:
    """Something that the field's type takes."""
    kinds = msgspec.inspect.type_info(field_type)
    if isinstance(kinds, msgspec.inspect.UnionType):
        kinds = kinds.types[0]
    if isinstance(kinds, msgspec.inspect.IntType):
        return max(kinds.ge or 0, 0)
    if isinstance(kinds, msgspec.inspect.BoolType):
        return False
    return "Foreign"


def plain_fields(code: int) -> dict[str, Any]:
    """Values that the request's header must have."""
    header_type = REQUEST_HEADERS.get(code)
    if header_type is None:
        return {}
    return {
        field.encode_name: plain_value(field.type) for field in msgspec.structs.fields(header_type)
    }


def headers(code: int) -> Iterator[dict[str, Any]]:
    """Fields that are missing, plain, foreign, large or extreme, all of a kind at once."""
    plain = plain_fields(code)
    yield NO_FIELDS
    yield plain
    for text in FOREIGN_TEXTS:
        yield {name: text if value == "Foreign" else value for name, value in plain.items()}
    for number in (-1, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63), 10**30, 1.5):
        yield {name: number if isinstance(value, int) else value for name, value in plain.items()}
    yield {f"field {number}": "x" for number in range(1000)}


def closing_headers(code: int) -> Iterator[tuple[SerializeType, bytes]]:
    """Headers that are none, or nest: they may close their connection, and no more."""
    deep_list = b"[" * DEEP + b"]" * DEEP
    for deep in (deep_list, b'{"a":' * DEEP + b"1" + b"}" * DEEP, b"[" * 60_000):
        yield JSON, b'{"code":%d,"extFields":%b,"opaque":1}' % (code, deep)
        yield JSON, b'{"code":%d,"extFields":{"topic":%b},"opaque":1}' % (code, deep)
        yield JSON, b'{"code":%d,"z":%b,"extFields":{},"opaque":1}' % (code, deep)
    yield JSON, b'{"code":%d,"extFields":[],"opaque":1}' % code
    yield JSON, b'{"code":%d,"extFields":{"topic":{}},"opaque":1e400}' % code
    fixed = struct.pack(">hBhiiii", code % 2**15, 0, 0, 1, 0, 0, 2**31 - 1)
    yield ROCKETMQ, fixed
    yield ROCKETMQ, fixed[:-4] + struct.pack(">ihi", 6, -1, -1)
    for levels in (100, 990, DEEP):
        start = b"\x97" + struct.pack(">BI", 0xCE, code) + b"\xa4JAVA\xcd\x02\x01\x01\x00\xc0"
        yield MSGPACK, start + b"\x81\xa1a" + b"\x91" * levels + b"\x01"


# -- lists as long as they may be ------------------------------------------------------------------


def _lists(count: int) -> Iterator[tuple[Code, bytes]]:
    numbers = range(count)
    queues = [{"topic": f"T{n % 9}", "brokerName": "b", "queueId": n} for n in numbers]
    locks = {"consumerGroup": "Foreign", "clientId": "c", "mqSet": queues}
    yield Code.LOCK_BATCH_MQ, _json(locks)
    yield Code.UNLOCK_BATCH_MQ, _json(locks)
    groups = [{"groupName": f"g{n % 500}"} for n in numbers]
    yield Code.HEART_BEAT, _json({"clientID": "c", "producerDataSet": groups})
    yield Code.HEART_BEAT, _json({"clientID": "c", "consumerDataSet": groups})
    topics = [{"topic": f"T{n}"} for n in numbers]
    subscribed = {"groupName": "Foreign", "subscriptionDataSet": topics}
    yield Code.HEART_BEAT, _json({"clientID": "c", "consumerDataSet": [subscribed]})
    configs = [{"topicName": f"T{n % 500}"} for n in numbers]
    yield Code.UPDATE_AND_CREATE_TOPIC_LIST, _json({"topicConfigList": configs})
    yield Code.STAGE_ABORT, _json([f"a{n}" for n in numbers])
    attempts = [{"attempt": f"a{n}", "fileBytes": 1, "recordCount": 1} for n in numbers]
    decision = {"decisionId": "d", "batchId": 1, "attempts": {"b": attempts}}
    yield Code.STAGE_DECIDE, _json(decision)
    yield Code.UPDATE_BROKER_CONFIG, b"".join(b"k%d=1\n" % n for n in numbers)
    items = [{"gen": n, "bname": f"b{n}", "queueId": 0, "logicOffset": n} for n in numbers]
    detail = {"topic": "Foreign", "bname": "b", "scope": "__global__", "totalQueues": count}
    yield Code.UPDATE_AND_CREATE_STATIC_TOPIC, _json({**detail, "hostedQueues": {"0": items}})
    hosted = {str(n): items[:1] for n in numbers}
    yield Code.UPDATE_AND_CREATE_STATIC_TOPIC, _json({**detail, "hostedQueues": hosted})
    registration = _registration(count)
    yield Code.REGISTER_BROKER, registration.encode()
    yield Code.REGISTER_BROKER, compressed(registration)
    queue_datas = [{"brokerName": f"b{n}", "readQueueNums": 2**31 - 1} for n in numbers]
    yield Code.REGISTER_TOPIC_IN_NAMESRV, _json({"queueDatas": queue_datas})


def _registration(count: int) -> RegisterBrokerBody:
    topics = [TopicConfig(topic_name=f"T{n % 500}", read_queue_nums=n) for n in range(count)]
    table = {topic.topic_name: topic for topic in topics}
    return RegisterBrokerBody(
        topic_config_serialize_wrapper=TopicConfigSerializeWrapper(topic_config_table=table)
    )


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


LONG_LISTS = [each for count in (1, 300, 3000, 20_000) for each in _lists(count)]
