"""Mappings of static topics as JSON, in the texts of Apache RocketMQ."""

from __future__ import annotations

import msgspec
import pytest

from headrace_protocol import fastjson
from headrace_protocol.bodies import DataVersion
from headrace_protocol.fastjson import MalformedJson
from headrace_protocol.statictopic.mapping import (
    MappingItem,
    TopicMapping,
    decode_detail,
    encode_detail,
    logic_broker_name,
)
from headrace_protocol.statictopic.mapping_file import decode_file, encode_file
from tests.support.golden import STORES, golden_store

DETAIL = (
    b'{"bname":"b0","currIdMap":{},"dirty":false,"epoch":1700000001000,"hostedQueues":{0:[{"bname":'
    b'"b0","endOffset":-1,"gen":0,"logicOffset":0,"queueId":0,"startOffset":0,"timeOfEnd":-1,'
    b'"timeOfStart":-1}]},"scope":"__global__","topic":"T","totalQueues":2}'
)
MAPPING = TopicMapping(
    topic="T",
    bname="b0",
    epoch=1_700_000_001_000,
    total_queues=2,
    hosted={0: (MappingItem(bname="b0", logic_offset=0),)},
)


@pytest.mark.parametrize("store", STORES)
def test_the_peers_file_is_written_back_byte_for_byte(store: str) -> None:
    text = (golden_store(store) / "config" / "topicQueueMapping.json").read_bytes()
    mappings, version = decode_file(text)
    assert [*mappings] == ["G_STATIC"]
    assert mappings["G_STATIC"].led() == {0: 0, 1: 1, 2: 2, 3: 3}
    assert version.counter == 1
    assert encode_file(mappings, version) == text


def test_a_detail_is_the_peers_text() -> None:
    assert decode_detail(DETAIL) == MAPPING
    assert encode_detail(MAPPING) == DETAIL


def test_a_detail_is_read_with_quoted_keys() -> None:
    text = encode_detail(MAPPING, strict=True)
    assert text == DETAIL.replace(b"{0:", b'{"0":')
    assert decode_detail(text) == MAPPING


def test_a_file_is_encoded_as_a_tree_of_values_would_be() -> None:
    other = TopicMapping(topic='Ü"', bname="x\\", curr_id_map={1: 2}, dirty=True, hosted={3: ()})
    version = DataVersion(counter=3)
    mappings = {"T": MAPPING, 'Ü"': other}
    tree = {"dataVersion": version, "topicQueueMappingInfoMap": mappings}
    assert encode_file(mappings, version) == fastjson.dumps(tree, pretty=True)
    assert decode_file(encode_file(mappings, version)) == (mappings, version)


def test_an_empty_file() -> None:
    text = encode_file({}, DataVersion())
    assert text.endswith(b'"topicQueueMappingInfoMap":{}\n}')
    assert decode_file(text) == ({}, DataVersion())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"gen":0', b'"gen":"0"'),
        (b'"gen":0', b'"gen":0.5'),
        (b'"gen":0', b'"gen":2147483648'),
        (b'"logicOffset":0', b'"logicOffset":9223372036854775808'),
        (b'"dirty":false', b'"dirty":0'),
        (b'"topic":"T"', b'"topic":null'),
        (b'"topic":"T",', b""),
        (b"{0:", b"{x:"),
        (b"{0:", b"{2147483648:"),
        (b'"totalQueues":2}', b'"totalQueues":2'),
    ],
)
def test_a_wrong_type_or_number_is_refused(old: bytes, new: bytes) -> None:
    assert old in DETAIL
    with pytest.raises(MalformedJson):
        decode_detail(DETAIL.replace(old, new))


@pytest.mark.parametrize("text", [b'"topic":"\xff"', b'"topic":1'])
def test_a_file_with_another_topic_is_refused(text: bytes) -> None:
    whole = b'{"topicQueueMappingInfoMap":{"T":%s}}' % DETAIL
    assert decode_file(whole)[0].keys() == {"T"}
    with pytest.raises(MalformedJson):
        decode_file(whole.replace(b'"topic":"T"', text))


def test_keys_in_texts_stay_as_they_are() -> None:
    mapping = msgspec.structs.replace(MAPPING, bname='{"1":')
    assert decode_detail(encode_detail(mapping)) == mapping


def test_the_info_has_the_queues_led_here() -> None:
    moved = (
        MappingItem(bname="b0", logic_offset=0),
        MappingItem(bname="b1", gen=1, logic_offset=10, queue_id=7),
    )
    hosted = {0: (MappingItem(bname="b0", logic_offset=0, queue_id=5),), 1: moved}
    info = msgspec.structs.replace(MAPPING, hosted=hosted).info()
    assert info.curr_id_map == {0: 5}
    assert (info.topic, info.bname, info.epoch, info.total_queues) == ("T", "b0", MAPPING.epoch, 2)


def test_the_name_of_the_logic_broker() -> None:
    assert logic_broker_name() == "__syslo__global__"
    assert logic_broker_name("mine") == "__syslo__mine"
