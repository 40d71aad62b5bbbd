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
# headrace's own; the peer ignores these in topics.json. It keeps messages beyond the limit.
RESERVE_SIZE = "reserve.size"
DELETE_RETENTION = "delete.retention.ms"
MIN_COMPACTION_LAG = "min.compaction.lag.ms"
MAX_COMPACTION_LAG = "max.compaction.lag.ms"
KEY_QUEUE = "key.queue"
# headrace's own as well: whether the messages of a topic are uploaded to the tier.
TIERED = "tiered"

COMPACTED = "COMPACTION"
BATCHED = "BatchCQ"

_LONG_MAX = 2**63 - 1
_HOUR_MS = 3_600_000
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


def _is_span(value: str) -> bool:
    try:
        return 0 <= int(value) <= _LONG_MAX
    except ValueError:
        return False


_SPAN = _Attribute(True, f"a number of milliseconds from 0 to {_LONG_MAX}", _is_span)

# Only those values of the peer that this broker implements.
_ATTRIBUTES = {
    QUEUE_TYPE: _one_of("SimpleCQ", BATCHED, is_changeable=False),
    CLEANUP_POLICY: _one_of("DELETE", COMPACTED, is_changeable=False),
    MESSAGE_TYPE: _one_of(
        "UNSPECIFIED", "NORMAL", "FIFO", "DELAY", "TRANSACTION", "MIXED", is_changeable=True
    ),
    RESERVE_TIME: _Attribute(True, "a number of hours from 1 on, or -1", _is_limit),
    RESERVE_SIZE: _Attribute(True, "a number of bytes from 1 on, or -1", _is_limit),
    DELETE_RETENTION: _SPAN,
    MIN_COMPACTION_LAG: _SPAN,
    MAX_COMPACTION_LAG: _SPAN,
    KEY_QUEUE: _one_of("any", "java", "headrace", is_changeable=True),
    TIERED: _one_of("true", "false", is_changeable=True),
}
_OF_COMPACTED = (DELETE_RETENTION, MIN_COMPACTION_LAG, MAX_COMPACTION_LAG, KEY_QUEUE)
_OF_DELETED = (RESERVE_TIME, RESERVE_SIZE)


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
    _check_policy(attributes, changes)
    _check_queue_type(attributes)
    _check_lags(attributes)
    return attributes


def _check_policy(attributes: Mapping[str, str], changes: Mapping[str, str]) -> None:
    """Raise RequestError if a change sets what only the other clean-up policy has."""
    is_compacted = attributes.get(CLEANUP_POLICY) == COMPACTED
    for key in _OF_DELETED if is_compacted else _OF_COMPACTED:
        if f"+{key}" in changes:
            policy = "DELETE" if is_compacted else COMPACTED
            raise _invalid(f"{key!r} is for topics with {CLEANUP_POLICY}={policy}")


def _check_queue_type(attributes: Mapping[str, str]) -> None:
    """Raise RequestError for what batch queues don't have."""
    if attributes.get(QUEUE_TYPE) != BATCHED:
        return
    for key, value in ((CLEANUP_POLICY, COMPACTED), (TIERED, "true")):
        if attributes.get(key) == value:
            raise _invalid(
                f"{key}={value} needs a record for each message, and {QUEUE_TYPE}={BATCHED} stores "
                "batches as one: leave one of them out"
            )


def _check_lags(attributes: Mapping[str, str]) -> None:
    """Raise RequestError if a message may have to be compacted while it is too young for that."""
    default = CompactionPolicy()
    least = _span(attributes, MIN_COMPACTION_LAG, default.min_lag_ms)
    most = _span(attributes, MAX_COMPACTION_LAG, default.max_lag_ms)
    if least > most:
        origin = "" if MAX_COMPACTION_LAG in attributes else ", its default"
        raise _invalid(
            f"{MIN_COMPACTION_LAG}={least} is more than {MAX_COMPACTION_LAG}={most}{origin}: "
            "lower the first or raise the second"
        )


class CompactionPolicy(NamedTuple):
    """Settings of a topic's compaction; the times are in milliseconds.

    delete_retention_ms: how long a delete marker stays after the first run that contained it.
    min_lag_ms: younger messages are not compacted. max_lag_ms: age of the oldest message that no
    run has seen, from which on the newest file is compacted as well.
    key_queue: which queue the messages of a key must be sent to.
    """

    delete_retention_ms: int = 24 * _HOUR_MS
    min_lag_ms: int = 0
    max_lag_ms: int = _HOUR_MS
    key_queue: str = "any"

    @classmethod
    def of(cls, topic: TopicConfig) -> CompactionPolicy | None:
        """The policy of a topic; None if it is not compacted."""
        attributes = topic.attributes
        if not is_compacted(topic):
            return None
        default = cls()
        min_lag_ms = _span(attributes, MIN_COMPACTION_LAG, default.min_lag_ms)
        return cls(
            _span(attributes, DELETE_RETENTION, default.delete_retention_ms),
            min_lag_ms,
            max(_span(attributes, MAX_COMPACTION_LAG, default.max_lag_ms), min_lag_ms),
            attributes.get(KEY_QUEUE, default.key_queue),
        )


def is_compacted(topic: TopicConfig) -> bool:
    """True if a topic keeps the newest message of each key."""
    return bool(topic.attributes) and topic.attributes.get(CLEANUP_POLICY) == COMPACTED


def is_batched(topic: TopicConfig) -> bool:
    """True if a topic has batch queues, which store a batch as one record."""
    return bool(topic.attributes) and topic.attributes.get(QUEUE_TYPE) == BATCHED


def check_queue_nums_of_keys(known: TopicConfig | None, new: TopicConfig) -> None:
    """Raise RequestError if a change would send keys of a compacted topic to other queues."""
    if known is None or not is_compacted(known):
        return
    before, after = known.write_queue_nums, new.write_queue_nums
    if before != after:
        raise RequestError(
            ResponseCode.INVALID_PARAMETER,
            f"topic {new.topic_name} is compacted and has {before} queues: with {after} its keys "
            "would go to other queues, and their old values would stay in the old ones. Create "
            "another topic, or force the change (`headrace topic alter --force`)",
        )


def _span(attributes: Mapping[str, str], key: str, default: int) -> int:
    # Another broker may have written any value to the file.
    value = attributes.get(key, "")
    return int(value) if _is_span(value) else default


def topic_limits(topics: Iterable[TopicConfig]) -> dict[str, TopicLimit]:
    """Limits of retention by topic, for the topics that set some; compacted ones have none."""
    limits = {}
    for topic in topics:
        if topic.attributes and not is_compacted(topic):  # few have any
            reserved_hours = _limit(topic.attributes, RESERVE_TIME)
            reserved_bytes = _limit(topic.attributes, RESERVE_SIZE)
            reserved_ms = None if reserved_hours is None else reserved_hours * _HOUR_MS
            if reserved_ms is not None or reserved_bytes is not None:
                limits[topic.topic_name] = TopicLimit(reserved_ms, reserved_bytes)
    return limits


def _limit(attributes: Mapping[str, str], key: str) -> int | None:
    # Another broker may have written any value to the file.
    value = attributes.get(key, "")
    return int(value) if _is_limit(value) and int(value) != _NO_LIMIT else None


def _invalid(problem: str) -> RequestError:
    return RequestError(ResponseCode.INVALID_PARAMETER, f"topic attributes: {problem}")
