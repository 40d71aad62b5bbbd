"""Attributes of topics, and changes to them in the form ``+key=value,-key``.

Source: docs/protocol.md "Topic attributes".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from headrace_broker.store.retention.topic_floors import TopicLimit
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from headrace_protocol.bodies import TopicConfig

QUEUE_TYPE = "queue.type"
CLEANUP_POLICY = "cleanup.policy"
MESSAGE_TYPE = "message.type"
RESERVE_TIME = "reserve.time"
# headrace's own: the peer ignores it in topics.json, and keeps messages beyond the limit.
RESERVE_SIZE = "reserve.size"
# headrace's own as well: whether the messages of a topic are uploaded to the tier.
TIERED = "tiered"

_LONG_MAX = 2**63 - 1
_NO_LIMIT = -1


class _Attribute(NamedTuple):
    is_changeable: bool
    expected: str
    accepts: Callable[[str], bool]


def _one_of(*values: str, is_changeable: bool) -> _Attribute:
    return _Attribute(is_changeable, " | ".join(values), frozenset(values).__contains__)


def _is_limit(value: str) -> bool:
    try:
        return int(value) == _NO_LIMIT or 0 < int(value) <= _LONG_MAX
    except ValueError:
        return False


# Only those values of the peer that this broker implements: it must not accept messages for a
# COMPACTION topic and then keep them all.
_ATTRIBUTES = {
    QUEUE_TYPE: _one_of("SimpleCQ", is_changeable=False),
    CLEANUP_POLICY: _one_of("DELETE", is_changeable=False),
    MESSAGE_TYPE: _one_of(
        "UNSPECIFIED", "NORMAL", "FIFO", "DELAY", "TRANSACTION", is_changeable=True
    ),
    RESERVE_TIME: _Attribute(True, "a number of milliseconds, or -1", _is_limit),
    RESERVE_SIZE: _Attribute(True, "a number of bytes, or -1", _is_limit),
    TIERED: _one_of("true", "false", is_changeable=True),
}


def parse_changes(text: str) -> dict[str, str]:
    """Changes by signed key: ``{"+key": "value", "-key": ""}``. Raises RequestError."""
    changes: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if key[:1] != ("+" if equals else "-"):
            raise _invalid(f"{part!r}: write +key=value to set, -key to delete")
        if any(key[1:] == known[1:] for known in changes):
            raise _invalid(f"{key[1:]!r} occurs twice in {text!r}")
        changes[key] = value
    return changes


def apply_changes(
    current: Mapping[str, str], changes: Mapping[str, str], *, is_new: bool
) -> dict[str, str]:
    """Attributes with ``changes`` (by signed key) applied; others stay. Raises RequestError."""
    attributes = dict(current)
    for signed_key, value in changes.items():
        sign, key = signed_key[:1], signed_key[1:]
        attribute = _ATTRIBUTES.get(key)
        if sign not in {"+", "-"}:
            raise _invalid(f"{signed_key!r}: the key must begin with + or -")
        if attribute is None:
            raise _invalid(f"unknown key {key!r}: known are {', '.join(_ATTRIBUTES)}")
        if not is_new and not attribute.is_changeable:
            raise _invalid(f"{key!r} can't change after a topic's creation: create another topic")
        if sign == "-":
            if is_new:
                raise _invalid(f"-{key}: a new topic has nothing to delete")
            attributes.pop(key, None)
        else:
            if not attribute.accepts(value):
                raise _invalid(f"{key}={value}: this broker accepts {attribute.expected}")
            attributes[key] = value
    return attributes


def topic_limits(topics: Iterable[TopicConfig]) -> dict[str, TopicLimit]:
    """Limits of retention by topic, for the topics that set some."""
    limits = {}
    for topic in topics:
        if topic.attributes:  # few have any
            reserved_ms = _limit(topic.attributes, RESERVE_TIME)
            reserved_bytes = _limit(topic.attributes, RESERVE_SIZE)
            if reserved_ms is not None or reserved_bytes is not None:
                limits[topic.topic_name] = TopicLimit(reserved_ms, reserved_bytes)
    return limits


def _limit(attributes: Mapping[str, str], key: str) -> int | None:
    # Another broker may have written any value to the file.
    value = attributes.get(key, "")
    return int(value) if _is_limit(value) and int(value) != _NO_LIMIT else None


def _invalid(problem: str) -> RequestError:
    return RequestError(ResponseCode.INVALID_PARAMETER, f"topic attributes: {problem}")
