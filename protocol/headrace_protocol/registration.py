"""The body of REGISTER_BROKER: a broker's topics, in two forms.

Source: docs/protocol.md "JSON bodies"; tests/protocol/test_bodies.py.
"""

from __future__ import annotations

import io
import struct
import zlib
from typing import TYPE_CHECKING, Any

import msgspec

from headrace_protocol import fastjson
from headrace_protocol.bodies import (
    PERM_READ,
    PERM_WRITE,
    Body,
    DataVersion,
    TopicConfig,
    TopicConfigSerializeWrapper,
)
from headrace_protocol.bounds import BODIES, REGISTERED_TOPICS_MAX, inflated_bytes_max
from headrace_protocol.codes import RequestCode
from headrace_protocol.fastjson import MalformedJson
from headrace_protocol.headers import Int32  # noqa: TC001 - msgspec reads annotations
from headrace_protocol.statictopic.mapping import MappingInfo

if TYPE_CHECKING:
    from headrace_protocol.fastjson import Buffer


class RegisterBrokerBody(Body):
    """A broker's registration: the body of REGISTER_BROKER (103)."""

    topic_config_serialize_wrapper: TopicConfigSerializeWrapper = msgspec.field(
        default_factory=TopicConfigSerializeWrapper
    )
    filter_server_list: list[str] = msgspec.field(default_factory=list)

    @classmethod
    def decode_compressed(cls, data: Buffer, *, has_mappings: bool) -> RegisterBrokerBody:
        """Decode the body of a request with compressed=true in its header.

        has_mappings: whether the sender's version (>= 413) appends static topics.

        Raises MalformedJson if the body does not have this form.
        """
        try:
            return _read_compressed(_Blocks(_inflate(data)), has_mappings=has_mappings)
        except (zlib.error, struct.error, UnicodeDecodeError) as error:
            raise MalformedJson(f"compressed register body: {error}") from error


class RegisteredTopic(msgspec.Struct, rename="camel", kw_only=True, gc=False):
    """The fields of a TopicConfig that a nameserver needs."""

    attributes: dict[str, str] = msgspec.field(default_factory=dict)
    perm: Int32 = PERM_READ | PERM_WRITE
    read_queue_nums: Int32 = 16
    topic_sys_flag: Int32 = 0
    write_queue_nums: Int32 = 16


class RegisteredTopics(Body):
    """The fields of a TopicConfigSerializeWrapper that a nameserver needs."""

    topic_config_table: dict[str, RegisteredTopic] = msgspec.field(default_factory=dict)
    data_version: DataVersion = msgspec.field(default_factory=DataVersion)
    topic_queue_mapping_info_map: dict[str, MappingInfo] = msgspec.field(default_factory=dict)


class Registration(Body):
    """The fields of RegisterBrokerBody that a nameserver needs; four times as fast to decode."""

    topic_config_serialize_wrapper: RegisteredTopics = msgspec.field(
        default_factory=RegisteredTopics
    )
    filter_server_list: list[str] = msgspec.field(default_factory=list)


# More than the largest registration within the limits, including queue mappings.
_INFLATED_BYTES_MAX = 32 * 1024 * 1024
_BLOCK_BYTES_MAX = 1024 * 1024
_INT = struct.Struct(">i")


def _inflate(data: Buffer) -> bytes:
    plain_bytes_max = BODIES[RequestCode.REGISTER_BROKER].bytes_max
    bytes_max = min(inflated_bytes_max(len(data), plain_bytes_max), _INFLATED_BYTES_MAX)
    inflater = zlib.decompressobj()
    inflated = inflater.decompress(data, bytes_max)
    if inflater.unconsumed_tail:
        raise MalformedJson(f"compressed register body: over {bytes_max} bytes inflated")
    if not inflater.eof:
        raise MalformedJson("compressed register body: the end is missing")
    return inflated


class _Blocks(io.BytesIO):
    def number(self) -> int:
        (number,) = _INT.unpack(self.read(_INT.size))
        return int(number)

    def count(self, what: str) -> int:
        return self._at_most(REGISTERED_TOPICS_MAX, what)

    def block(self) -> bytes:
        block_bytes = self._at_most(_BLOCK_BYTES_MAX, "bytes in a block")
        block = self.read(max(block_bytes, 0))
        if len(block) != block_bytes:
            raise MalformedJson(
                f"compressed register body: a block of {block_bytes} bytes, found {len(block)}"
            )
        return block

    def _at_most(self, number_max: int, what: str) -> int:
        number = self.number()
        if number > number_max:
            raise MalformedJson(
                f"compressed register body: {number} {what}: the maximum is {number_max}"
            )
        return number


def _read_compressed(blocks: _Blocks, *, has_mappings: bool) -> RegisterBrokerBody:
    data_version = DataVersion.decode(blocks.block())
    topics = [_read_topic(blocks.block().decode()) for _ in range(blocks.count("topics"))]
    filter_servers = fastjson.decode(blocks.block(), list[str])
    mapping_count = blocks.count("queue mappings") if has_mappings else 0
    mappings = [fastjson.decode(blocks.block(), MappingInfo) for _ in range(mapping_count)]
    return RegisterBrokerBody(
        filter_server_list=filter_servers,
        topic_config_serialize_wrapper=TopicConfigSerializeWrapper(
            data_version=data_version,
            topic_config_table={topic.topic_name: topic for topic in topics},
            topic_queue_mapping_info_map={info.topic: info for info in mappings},
        ),
    )


# Older senders leave out attributes.
_TOPIC_TEXT_FIELDS = (
    "topicName",
    "readQueueNums",
    "writeQueueNums",
    "perm",
    "topicFilterType",
    "attributes",
)


def _read_topic(text: str) -> TopicConfig:
    parts = text.split(" ", 5)
    fields: dict[str, Any] = dict(zip(_TOPIC_TEXT_FIELDS, parts, strict=False))
    try:
        if len(parts) < len(_TOPIC_TEXT_FIELDS) - 1:
            raise MalformedJson(f"expected {' '.join(_TOPIC_TEXT_FIELDS)}")
        fields["attributes"] = fastjson.loads(fields.get("attributes", "{}").encode())
        return msgspec.convert(fields, TopicConfig, strict=False)
    except msgspec.MsgspecError as error:
        raise MalformedJson(f"compressed register body: topic {text!r}: {error}") from error
