"""Offsets in the answer to a POP: startOffsetInfo, msgOffsetInfo and orderCountInfo.

Each text is a list of entries of three parts, one entry per queue: ``kind queue value``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from headrace_protocol.bounds import QUEUE_NUMS_MAX, OutOfBounds, check_items, check_text
from headrace_protocol.pop.handle import TopicKind
from headrace_protocol.pop.headers import POP_MESSAGES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

# An answer has one queue per message at most, whose offset and queue are numbers of 20 digits.
INFO_CHARS_MAX: Final = POP_MESSAGES_MAX * 64
_PARTS: Final = 3
_OFFSET_MAX: Final = 2**63 - 1
# Marks the place of a single message instead of a queue: qoQUEUE%OFFSET.
_QUEUE_OFFSET: Final = "qo"


class PoppedQueue(NamedTuple):
    """The messages of one queue in an answer.

    start_offset: the offset in their handles. offsets: of the messages, ascending.
    """

    kind: TopicKind
    queue_id: int
    start_offset: int
    offsets: Sequence[int]


class OrderCount(NamedTuple):
    """Number of earlier deliveries of a queue's messages, or of the one at ``offset``."""

    kind: TopicKind
    queue_id: int
    times: int
    offset: int | None = None


def encode_offsets(queues: Iterable[PoppedQueue]) -> tuple[str, str]:
    """The texts of startOffsetInfo and msgOffsetInfo."""
    starts, messages = [], []
    for kind, queue_id, start_offset, offsets in queues:
        starts.append(f"{kind} {queue_id} {start_offset}")
        messages.append(f"{kind} {queue_id} {','.join(map(str, offsets))}")
    return ";".join(starts), ";".join(messages)


def parse_offsets(start_info: str | None, message_info: str | None) -> list[PoppedQueue]:
    """The queues in an answer. Raises OutOfBounds for malformed infos."""
    starts = {
        (kind, queue_id): _number(start, "start offset")
        for kind, queue_id, start in _entries("startOffsetInfo", start_info)
    }
    messages = {
        (kind, queue_id): [_number(offset, "offset") for offset in offsets.split(",")]
        for kind, queue_id, offsets in _entries("msgOffsetInfo", message_info)
    }
    if starts.keys() != messages.keys():
        raise OutOfBounds("startOffsetInfo and msgOffsetInfo differ in their queues")
    return [PoppedQueue(*key, start, messages[key]) for key, start in starts.items()]


def encode_order_counts(counts: Iterable[OrderCount]) -> str:
    """The text of orderCountInfo."""
    return ";".join(
        f"{kind} {queue_id} {times}"
        if offset is None
        else f"{kind} {_QUEUE_OFFSET}{queue_id}%{offset} {times}"
        for kind, queue_id, times, offset in counts
    )


def parse_order_counts(info: str | None) -> list[OrderCount]:
    """The counts in an answer. Raises OutOfBounds for a malformed info."""
    return [_order_count(*parts) for parts in _split("orderCountInfo", info)]


def _order_count(kind: str, place: str, count: str) -> OrderCount:
    offset = None
    if place.startswith(_QUEUE_OFFSET):
        place, _, text = place.removeprefix(_QUEUE_OFFSET).partition("%")
        offset = _number(text, "offset")
    return OrderCount(_kind(kind), _queue_id(place), _number(count, "count"), offset)


def _entries(name: str, info: str | None) -> Iterator[tuple[TopicKind, int, str]]:
    seen = set()
    for kind, queue_id, value in _split(name, info):
        key = _kind(kind), _queue_id(queue_id)
        if key in seen:
            raise OutOfBounds(f"{name} names queue {queue_id} twice")
        seen.add(key)
        yield *key, value


def _split(name: str, info: str | None) -> Iterator[list[str]]:
    if not info:
        return
    check_text(name, info, INFO_CHARS_MAX)
    entries = info.split(";")
    check_items(f"queues in {name}", entries, POP_MESSAGES_MAX * 2)
    for entry in entries:
        parts = entry.split(" ")
        if len(parts) != _PARTS:
            raise OutOfBounds(f"{name}: {entry!r} has {len(parts)} parts, expected {_PARTS}")
        yield parts


def _kind(text: str) -> TopicKind:
    return TopicKind(_number(text, "kind of topic", TopicKind.RETRY_V2))


def _queue_id(text: str) -> int:
    return _number(text, "queue", QUEUE_NUMS_MAX)


def _number(text: str, name: str, maximum: int = _OFFSET_MAX) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 19 and int(text) <= maximum):
        raise OutOfBounds(f"{name} {text!r}, expected 0 to {maximum}")
    return int(text)
