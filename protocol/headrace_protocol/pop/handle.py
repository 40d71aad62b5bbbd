"""The handle of a message that is out: what an ack and its kin name it by.

POP_CK in the message's properties, ``extraInfo`` in requests. Anybody can write one, so that its
numbers are claims.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple

from headrace_protocol.bounds import NAME_CHARS_MAX, OutOfBounds
from headrace_protocol.system_topics import RETRY_PREFIX

# POP_CK: the property of a message with its handle.
HANDLE_PROPERTY: Final = "POP_CK"
# 1ST_POP_TIME: the property with the time of the first delivery of all, in ms since 1970.
FIRST_POP_PROPERTY: Final = "1ST_POP_TIME"
# The revive queue in the handles of an orderly POP.
ORDER_REVIVE_QUEUE: Final = 999

HANDLE_CHARS_MAX: Final = NAME_CHARS_MAX + 9 * 21
_INT32_MAX: Final = 2**31 - 1
_INT64_MAX: Final = 2**63 - 1
_PARTS_MIN: Final = 7
_PARTS_MAX: Final = 9  # a gRPC proxy adds the physical offset
_SHOWN_CHARS: Final = 60


class TopicKind(IntEnum):
    """The topic that a message was popped from, relative to that of the request."""

    NORMAL = 0
    RETRY_V1 = 1
    RETRY_V2 = 2

    @classmethod
    def of(cls, topic: str, asked: str, group: str) -> TopicKind:
        """The kind of ``topic`` in answers to a POP of ``asked``. Raises OutOfBounds for none."""
        for kind in cls:
            if kind.topic(asked, group) == topic:
                return kind
        raise OutOfBounds(f"{topic} is neither {asked} nor its retry topic for group {group}")

    def topic(self, asked: str, group: str) -> str:
        """The topic's name, for a POP of the topic ``asked``."""
        return f"{_PREFIXES[self].format(group=group)}{asked}"


_PREFIXES: Final = ("", RETRY_PREFIX + "{group}_", RETRY_PREFIX + "{group}+")


def original_topic(topic: str, group: str) -> str:
    """The topic that a message was sent to, which may be in a retry topic of a group that pops."""
    for prefix in _PREFIXES[1:]:
        if topic.startswith(prefix := prefix.format(group=group)):
            return topic.removeprefix(prefix)
    return topic


class Handle(NamedTuple):
    """A handle.

    start_offset: first queue offset of the messages that were popped together.
    pop_time, invisible_time: ms since 1970, and ms from there on until the message is visible.
    queue_offset: the message's own; None in a handle of all messages of a POP.
    """

    start_offset: int
    pop_time: int
    invisible_time: int
    revive_queue_id: int
    kind: TopicKind
    broker_name: str
    queue_id: int
    queue_offset: int | None = None

    def text(self) -> str:
        """The handle as messages and requests have it."""
        parts = self[:-1] if self.queue_offset is None else self
        return " ".join(map(str, parts))

    @property
    def is_orderly(self) -> bool:
        """True if an orderly POP gave it out."""
        return self.revive_queue_id == ORDER_REVIVE_QUEUE

    @property
    def visible_time(self) -> int:
        """Time at which the message becomes visible again, in ms since 1970."""
        return self.pop_time + self.invisible_time

    def topic(self, asked: str, group: str) -> str:
        """The topic that holds the message, for a POP of the topic ``asked``."""
        return self.kind.topic(asked, group)


def parse(text: str) -> Handle:
    """The parts of a handle. Raises OutOfBounds that names the part that is wrong."""
    if len(text) > HANDLE_CHARS_MAX:
        raise OutOfBounds(f"a handle of {len(text)} characters: the maximum is {HANDLE_CHARS_MAX}")
    parts = text.split(" ")
    if not _PARTS_MIN <= len(parts) <= _PARTS_MAX:
        raise _malformed(text, f"{len(parts)} parts, expected {_PARTS_MIN} to {_PARTS_MAX}")
    broker_name = parts[5]
    if not broker_name or not broker_name.isprintable():
        raise _malformed(text, "no broker's name")
    handle = Handle(
        _number(text, parts, 0, "start offset"),
        _number(text, parts, 1, "pop time"),
        _number(text, parts, 2, "invisible time"),
        _number(text, parts, 3, "revive queue", _INT32_MAX),
        TopicKind(_number(text, parts, 4, "kind of topic", TopicKind.RETRY_V2)),
        broker_name,
        _number(text, parts, 6, "queue", _INT32_MAX),
        _number(text, parts, 7, "queue offset") if len(parts) > _PARTS_MIN else None,
    )
    if handle.visible_time > _INT64_MAX:
        raise _malformed(text, "it never becomes visible")
    return handle


def _number(text: str, parts: list[str], place: int, name: str, maximum: int = _INT64_MAX) -> int:
    part = parts[place]
    # More digits than an int64 has would take time to convert.
    if not (part.isascii() and part.isdigit() and len(part) <= 19 and int(part) <= maximum):
        raise _malformed(text, f"{name} {part[:_SHOWN_CHARS]!r}, expected 0 to {maximum}")
    return int(part)


def _malformed(text: str, reason: str) -> OutOfBounds:
    return OutOfBounds(f"handle {text[:_SHOWN_CHARS]!r}: {reason}")
