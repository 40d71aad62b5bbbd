"""Compressed registrations, as Apache's brokers send them; headrace's send plain ones."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from headrace_protocol import fastjson

if TYPE_CHECKING:
    from headrace_protocol.bodies import TopicConfig
    from headrace_protocol.registration import RegisterBrokerBody


def compressed(body: RegisterBrokerBody) -> bytes:
    """The body for a header with compressed=true; order and topic_sys_flag are lost."""
    wrapper = body.topic_config_serialize_wrapper
    topics = [_topic_text(topic) for topic in wrapper.topic_config_table.values()]
    mappings = [fastjson.dumps(info) for info in wrapper.topic_queue_mapping_info_map.values()]
    blocks = (
        _block(wrapper.data_version.encode()),
        len(topics).to_bytes(4),
        *map(_block, topics),
        _block(fastjson.dumps(body.filter_server_list)),
        len(mappings).to_bytes(4),
        *map(_block, mappings),
    )
    return zlib.compress(b"".join(blocks))


def _block(data: bytes) -> bytes:
    return len(data).to_bytes(4) + data


def _topic_text(topic: TopicConfig) -> bytes:
    attributes = fastjson.dumps(topic.attributes).decode()
    return (
        f"{topic.topic_name} {topic.read_queue_nums} {topic.write_queue_nums} {topic.perm} "
        f"{topic.topic_filter_type} {attributes}"
    ).encode()
