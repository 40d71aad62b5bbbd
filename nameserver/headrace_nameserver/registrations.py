"""Decode and check broker registrations before anything in them is stored.

Plain JSON of up to 64 KiB is decoded in the event loop. Larger bodies, the dialect written by
brokers with static topics, and the compressed form are decoded in a thread.
Source: docs/protocol.md "Registration"; tests/abuse/test_registration.py.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import msgspec

from headrace_protocol import fastjson
from headrace_protocol.bodies import DataVersion, QueueData
from headrace_protocol.bounds import (
    NAME_CHARS_MAX,
    PERM_MAX,
    QUEUE_NUMS_MAX,
    REGISTERED_TOPICS_MAX,
    OutOfBounds,
    check_address,
    check_items,
    check_name,
    check_perm,
    check_queue_nums,
    check_text,
)
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import Lane, RequestError
from headrace_protocol.registration import RegisterBrokerBody, Registration
from headrace_protocol.waiting import fetch

if TYPE_CHECKING:
    from headrace_protocol.bodies import TopicConfig
    from headrace_protocol.nameserver_headers import RegisterBrokerHeader
    from headrace_protocol.registration import RegisteredTopic
    from headrace_protocol.serving import Request
    from headrace_protocol.statictopic.mapping import MappingInfo

_REGISTRATIONS = Lane("registrations", threads=4)
# First version whose compressed registrations include static topics (5.0.0).
_MAPPINGS_VERSION = 413
_CRC_MASK = 0x7FFFFFFF

# A topic is an object with a nested object and ten fields.
_OBJECTS_MAX = 2 * REGISTERED_TOPICS_MAX + 1024
_FIELDS_MAX = 10 * REGISTERED_TOPICS_MAX
# Takes at most 5 ms to decode; 600 topics as brokers write them.
_AT_ONCE_BYTES = 64 * 1024
# Takes a thread about 4 s to decode; 12,000 topics.
_DIALECT_BYTES_MAX = 2 * 1024 * 1024


class BrokerTopics(msgspec.Struct):
    """The validated topics of a registration.

    queues, mappings: by topic. compacted: the topics that keep the newest message of each key.
    """

    data_version: DataVersion
    queues: dict[str, QueueData]
    mappings: dict[str, MappingInfo]
    compacted: frozenset[str] = frozenset()


def check_header(header: RegisterBrokerHeader) -> None:
    """Raise OutOfBounds for an invalid broker name, id or address."""
    check_name("brokerName", header.broker_name)
    check_name("clusterName", header.cluster_name)
    check_address("brokerAddr", header.broker_addr)
    if header.ha_server_addr:
        check_address("haServerAddr", header.ha_server_addr)
    check_text("zoneName", header.zone_name or "", NAME_CHARS_MAX)
    if header.broker_id < 0:
        raise OutOfBounds(
            f"brokerId {header.broker_id}: expected 0 for a master, or a positive number"
        )


async def read(header: RegisterBrokerHeader, request: Request) -> BrokerTopics:
    """The topics in the body of a registration. Raises RequestError, MalformedJson."""
    data = bytes(request.body)
    if not data:
        return check(header, Registration())
    _check_crc(header, data)
    if header.compressed:
        has_mappings = request.command.version >= _MAPPINGS_VERSION
        return await fetch(lambda: _read_compressed(header, data, has_mappings), _REGISTRATIONS)
    _check_size(data)
    if len(data) <= _AT_ONCE_BYTES:
        body = fastjson.decode_plain(data, Registration)
        if body is not None:
            return check(header, body)
    return await fetch(lambda: check(header, _read_plain(data)), _REGISTRATIONS)


def _read_plain(data: bytes) -> Registration:
    body = fastjson.decode_plain(data, Registration)
    if body is not None:
        return body
    if len(data) > _DIALECT_BYTES_MAX:
        raise OutOfBounds(
            f"a registration of {len(data)} bytes that is not plain JSON: "
            f"the maximum is {_DIALECT_BYTES_MAX}"
        )
    return Registration.decode(data)


def _check_crc(header: RegisterBrokerHeader, data: bytes) -> None:
    if header.body_crc32 == 0:
        return
    crc = zlib.crc32(data) & _CRC_MASK
    if crc != header.body_crc32:
        raise RequestError(
            ResponseCode.SYSTEM_ERROR,
            f"body of {len(data)} bytes has CRC {crc}, but the header says {header.body_crc32}: it "
            "was damaged in transit",
        )


def _check_size(data: bytes) -> None:
    """Bound the number of topics by counting characters, 100 times faster than decoding."""
    if data.count(b"{") > _OBJECTS_MAX or data.count(b",") > _FIELDS_MAX:
        raise OutOfBounds(
            f"a registration of {len(data)} bytes with more than {_OBJECTS_MAX} objects or "
            f"{_FIELDS_MAX} fields: the maximum is {REGISTERED_TOPICS_MAX} topics"
        )


def _read_compressed(header: RegisterBrokerHeader, data: bytes, has_mappings: bool) -> BrokerTopics:
    return check(header, RegisterBrokerBody.decode_compressed(data, has_mappings=has_mappings))


def check(header: RegisterBrokerHeader, body: Registration | RegisterBrokerBody) -> BrokerTopics:
    """The validated topics of a body. Raises OutOfBounds for invalid topics or mappings."""
    wrapper = body.topic_config_serialize_wrapper
    name = header.broker_name
    check_items("topics", wrapper.topic_config_table, REGISTERED_TOPICS_MAX)
    _check_mappings(name, wrapper.topic_queue_mapping_info_map)
    return BrokerTopics(
        data_version=wrapper.data_version,
        queues={
            topic: _queue_data(name, topic, config)
            for topic, config in wrapper.topic_config_table.items()
        },
        mappings=wrapper.topic_queue_mapping_info_map,
        compacted=frozenset(
            topic
            for topic, config in wrapper.topic_config_table.items()
            if config.attributes.get("cleanup.policy") == "COMPACTION"
        ),
    )


def _queue_data(name: str, topic: str, config: RegisteredTopic | TopicConfig) -> QueueData:
    queue_data = QueueData(
        broker_name=name,
        read_queue_nums=config.read_queue_nums,
        write_queue_nums=config.write_queue_nums,
        perm=config.perm,
        topic_sys_flag=config.topic_sys_flag,
    )
    check_queues(topic, queue_data)
    return queue_data


def check_queues(topic: str, queue_data: QueueData) -> None:
    """Raise OutOfBounds for an invalid topic name, queue number or permission."""
    check_name("topic", topic)
    if not _are_in_bounds(queue_data):
        check_queue_nums(f"topic {topic}: readQueueNums", queue_data.read_queue_nums)
        check_queue_nums(f"topic {topic}: writeQueueNums", queue_data.write_queue_nums)
        check_perm(f"topic {topic}: perm", queue_data.perm)


def _are_in_bounds(queue_data: QueueData) -> bool:
    """The same checks, without formatting labels for each of 65,536 topics."""
    return (
        0 <= queue_data.read_queue_nums <= QUEUE_NUMS_MAX
        and 0 <= queue_data.write_queue_nums <= QUEUE_NUMS_MAX
        and 0 <= queue_data.perm <= PERM_MAX
    )


def _check_mappings(name: str, mappings: dict[str, MappingInfo]) -> None:
    for topic, info in mappings.items():
        check_name("topic", topic)
        check_queue_nums(f"topic {topic}: totalQueues", info.total_queues)
        if info.bname != name:
            raise OutOfBounds(
                f"queue mapping of topic {topic}: bname is {info.bname!r}, the sender is {name}"
            )
        check_text(f"queue mapping of topic {topic}: scope", info.scope, NAME_CHARS_MAX)
        check_items(f"mapped queues of topic {topic}", info.curr_id_map, QUEUE_NUMS_MAX)
