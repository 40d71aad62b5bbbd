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
from headrace_protocol.headers import Int32, Int64  # noqa: TC001 - msgspec reads annotations

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from headrace_protocol.fastjson import Buffer

T = TypeVar("T")

MAPPING_SCOPE = "__global__"
NO_LEADER_BROKER = "__syslo__none__"
UNDECIDED = -1


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


class MappingInfo(msgspec.Struct, rename="camel", kw_only=True):
    """The queues of a static topic that a broker leads.

    curr_id_map: static queue id -> physical queue id on broker ``bname``.
    """

    topic: str = ""
    scope: str = "__global__"
    total_queues: Int32 = 0
    bname: str = ""
    epoch: Int64 = 0
    dirty: bool = False
    curr_id_map: dict[Int32, Int32] = {}


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

    @property
    def item_count(self) -> int:
        """The number of items of all chains."""
        return sum(map(len, self.hosted.values()))

    def chain(self, queue: int) -> Chain | None:
        """The chain of a logic queue; None if this broker does not have it."""
        return self.hosted.get(queue) or None

    def logic_queues(self) -> dict[int, int]:
        """Logic queue of each physical queue of this broker that has an item."""
        return {item.queue_id: queue for queue, item in self._own_items()}

    def later_queues(self) -> set[int]:
        """The physical queues of this broker that do not begin their logic queue."""
        return {item.queue_id for _, item in self._own_items() if item.logic_offset != 0}

    def _own_items(self) -> Iterator[tuple[int, MappingItem]]:
        for queue, chain in self.hosted.items():
            for item in chain:
                if item.bname == self.bname:
                    yield queue, item

    def undecided(self) -> list[int]:
        """The logic queues whose last item has no logicOffset yet."""
        return [
            queue
            for queue, chain in self.hosted.items()
            if chain and chain[-1].logic_offset == UNDECIDED
        ]

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
