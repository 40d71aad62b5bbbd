"""The mapping of a static topic: the chain of physical queues behind each logic queue.

The last item of a chain is the leader, the only one that is written. JSON texts are read in both
spellings of integer keys and written exactly as RocketMQ writes them.
Source: docs/static-topics.md; docs/store-format.md "topicQueueMapping.json";
tests/protocol/test_statictopic_mapping.py.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeVar

import msgspec

from headrace_protocol import fastjson
from headrace_protocol.bodies import DataVersion, TopicQueueMappingInfo
from headrace_protocol.headers import Int32, Int64  # noqa: TC001 - msgspec reads annotations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from headrace_protocol.fastjson import Buffer

T = TypeVar("T")

MAPPING_SCOPE = "__global__"
NO_LEADER_BROKER = "__syslo__none__"
UNDECIDED = -1

# What a broker tells nameservers, and a route tells clients: no chains.
MappingInfo = TopicQueueMappingInfo


class MappingItem(msgspec.Struct, rename="camel", frozen=True, kw_only=True, gc=False):
    """A physical queue that holds a range of a logic queue; -1 means undecided.

    gen: number of the item in its logic queue. bname, queue_id: broker, and physical queue there.
    logic_offset: static offset of physical offset ``start_offset``, which is 0 so far.
    end_offset: physical end, exclusive; only decided where static offsets jump behind it.
    time_of_start, time_of_end: ms since 1970 at which the item became and stopped being the leader.
    """

    # Alphabetical, which is the order in which fastjson writes them.
    bname: str = ""
    end_offset: Int64 = UNDECIDED
    gen: Int32 = 0
    logic_offset: Int64 = UNDECIDED
    queue_id: Int32 = 0
    start_offset: Int64 = 0
    time_of_end: Int64 = UNDECIDED
    time_of_start: Int64 = UNDECIDED


Chain = tuple[MappingItem, ...]


class TopicMapping(msgspec.Struct, rename="camel", frozen=True, kw_only=True):
    """One broker's copy of a static topic's mapping.

    bname: the broker. epoch: version of the topic's mapping, in ms, equal on all brokers.
    hosted: logic queue -> chain, of the queues that this broker leads, or led before the leader.
    total_queues: number of logic queues of the topic on all brokers.
    curr_id_map: always empty; RocketMQ writes it.
    dirty: the topic is being created, and this broker does not know yet which queues it leads.
    """

    bname: str
    curr_id_map: dict[Int32, Int32] = {}
    dirty: bool = False
    epoch: Int64 = 0
    hosted: dict[Int32, Chain] = msgspec.field(name="hostedQueues", default_factory=dict)
    scope: str = MAPPING_SCOPE
    topic: str
    total_queues: Int32 = 0

    def led(self) -> dict[int, int]:
        """Physical queue of each logic queue that this broker leads."""
        return {
            queue: chain[-1].queue_id
            for queue, chain in self.hosted.items()
            if chain and chain[-1].bname == self.bname
        }

    def info(self) -> MappingInfo:
        """The form for nameservers, with the queues that this broker leads."""
        return MappingInfo(
            topic=self.topic,
            scope=self.scope,
            total_queues=self.total_queues,
            bname=self.bname,
            epoch=self.epoch,
            dirty=self.dirty,
            curr_id_map=self.led(),
        )


def logic_broker_name(scope: str = MAPPING_SCOPE) -> str:
    """The broker name of logic queues in a client's MessageQueue."""
    return f"__syslo__{scope.removeprefix('__')}"


# -- JSON ------------------------------------------------------------------------------------------


def decode_detail(data: Buffer) -> TopicMapping:
    """Decode one broker's mapping: the body of 513. Raises MalformedJson naming the field."""
    return fastjson.decode_strict(data, TopicMapping)


class _Emptied(msgspec.Struct):
    """headrace's own part of the body of 513."""

    emptied: dict[Int32, MappingItem] = {}


def decode_emptied(data: Buffer) -> dict[int, MappingItem]:
    """Decode the empty items that leave chains, from the body of 513; see ``encode_detail``."""
    return fastjson.decode_strict(data, _Emptied).emptied


def encode_detail(
    mapping: TopicMapping,
    emptied: Mapping[int, MappingItem] | None = None,
    *,
    strict: bool = False,
) -> bytes:
    """Encode one broker's mapping, with integer keys bare, or quoted for strict readers.

    emptied: logic queue -> empty item that its new leader replaces; other brokers ignore it.
    """
    text = msgspec.json.encode(mapping)
    if emptied:
        text = text[:-1] + b"," + msgspec.json.encode(_Emptied(dict(emptied)))[1:]
    return text if strict else _QUOTED_KEY.sub(rb"\1:", text)


# Digits follow a quote only at the start of a string; one before a colon is a key.
_QUOTED_KEY = re.compile(rb'(?<=[{,])"(-?\d+)":')


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
    except msgspec.DecodeError as error:
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
