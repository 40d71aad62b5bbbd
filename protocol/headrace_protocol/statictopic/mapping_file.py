"""The file topicQueueMapping.json: the mappings of a broker, as RocketMQ writes them.

Source: docs/store-format.md "topicQueueMapping.json"; tests/protocol/test_statictopic_mapping.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from headrace_protocol import fastjson
from headrace_protocol.bodies import DataVersion
from headrace_protocol.statictopic.mapping import MappingItem, TopicMapping

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from headrace_protocol.fastjson import Buffer

T = TypeVar("T")


class _File(msgspec.Struct, rename="camel"):
    data_version: DataVersion = msgspec.field(default_factory=DataVersion)
    topic_queue_mapping_info_map: dict[str, msgspec.Raw] = {}


def decode_file(data: Buffer) -> tuple[dict[str, TopicMapping], DataVersion]:
    """Decode topicQueueMapping.json. Raises MalformedJson naming the field.

    Cost: 0.3 s for 64,000 items.
    """
    return decode_entries(data, lambda _topic, mapping: mapping)


def decode_entries(
    data: Buffer, convert: Callable[[str, TopicMapping], T]
) -> tuple[dict[str, T], DataVersion]:
    """As ``decode_file``, but each mapping is converted before the next one is decoded."""
    file = fastjson.decode_strict(data, _File)
    entries = file.topic_queue_mapping_info_map
    try:
        found = {topic: convert(topic, _decode_entry(raw)) for topic, raw in entries.items()}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise fastjson.MalformedJson(str(error)) from error
    return found, file.data_version


_decode_entry = msgspec.json.Decoder(TopicMapping).decode


def encode_file(mappings: Mapping[str, TopicMapping], version: DataVersion) -> bytes:
    """Encode topicQueueMapping.json."""
    return file_text(map(entry_text, mappings.values()), version)


def file_text(entries: Iterable[bytes], version: DataVersion) -> bytes:
    """topicQueueMapping.json from the texts of its entries, which are copied once."""
    parts = [part for entry in entries for part in (b",\n\t\t", entry)]
    # The first separator is the start.
    parts[:1] = [
        b'{\n\t"dataVersion":%b,\n\t"topicQueueMappingInfoMap":{' % _pretty(version, 1).encode(),
        *([b"\n\t\t"] if parts else []),
    ]
    return b"".join((*parts, b"\n\t}\n}" if len(parts) > 1 else b"}\n}"))


def entry_text(mapping: TopicMapping) -> bytes:
    """A topic's entry in topicQueueMapping.json."""
    fields = [
        f'"bname":{_quoted(mapping.bname)}',
        f'"currIdMap":{_pretty(mapping.curr_id_map, 3)}',
        f'"dirty":{_pretty(mapping.dirty, 3)}',
        f'"epoch":{mapping.epoch}',
        f'"hostedQueues":{_block(_chain_texts(mapping), "{", "}", 3)}',
        f'"scope":{_quoted(mapping.scope)}',
        f'"topic":{_quoted(mapping.topic)}',
        f'"totalQueues":{mapping.total_queues}',
    ]
    return f"{_quoted(mapping.topic)}:{_block(fields, '{', '}', 2)}".encode()


def _chain_texts(mapping: TopicMapping) -> Iterable[str]:
    names: dict[str, str] = {}
    for queue, chain in mapping.hosted.items():
        items = []
        for item in chain:
            name = names.get(item.bname) or names.setdefault(item.bname, _quoted(item.bname))
            items.append(
                _ITEM
                % (
                    name,
                    item.end_offset,
                    item.gen,
                    item.logic_offset,
                    item.queue_id,
                    item.start_offset,
                    item.time_of_end,
                    item.time_of_start,
                )
            )
        yield f"{queue}:{_block(items, '[', ']', 4)}"


def _block(parts: Iterable[str], start: str, end: str, level: int) -> str:
    indent = "\n" + "\t" * (level + 1)
    text = f",{indent}".join(parts)
    return f"{start}{indent}{text}{indent[:-1]}{end}" if text else f"{start}{end}"


def _pretty(value: object, level: int) -> str:
    return fastjson.dumps(value, pretty=True).decode().replace("\n", "\n" + "\t" * level)


def _quoted(text: str) -> str:
    return fastjson.dumps(text).decode()


# A template, because a file may have 64,000 items.
_ITEM = _block(
    (
        f'"{name}":%{"s" if name == "bname" else "d"}'
        for name in MappingItem.__struct_encode_fields__
    ),
    "{",
    "}",
    5,
)
