"""Limits on data from peers, checked before any work is done for it.

Each limit is far above what Apache RocketMQ's clients, tools, brokers and nameservers send;
comments mark the numbers taken from RocketMQ. Source: docs/protocol.md "Limits".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace_protocol.codes import RequestCode, ResponseCode, code_name
from headrace_protocol.errors import RequestError
from headrace_protocol.frame import FRAME_BYTES_MAX
from headrace_protocol.system_topics import GROUP_PREFIXES

if TYPE_CHECKING:
    from collections.abc import Sized

    from headrace_protocol.frame import Buffer

_KIB = 1024
_MIB = 1024 * _KIB

# Limits on frames are in frame.py; they apply before the content is known.

# All header fields of a request, checked as soon as the length is known. Has room for 32 KiB of
# properties with every byte escaped.
HEADER_BYTES_MAX = 256 * _KIB

# -- names and texts -------------------------------------------------------------------------------

# Names of brokers, clusters and clients, and any name in a registration.
NAME_CHARS_MAX = 255
# From the peer's TopicValidator: records store a topic's length in one byte.
TOPIC_CHARS_MAX = 127
RETRY_TOPIC_CHARS_MAX = 255
GROUP_CHARS_MAX = 120
ADDRESS_CHARS_MAX = 255
# Text to compute a Java hash of: tags, or a topic with a key.
HASHED_CHARS_MAX = 64 * _KIB
SUBSCRIPTION_BYTES_MAX = 32 * _KIB
KV_VALUE_BYTES_MAX = 64 * _KIB

# -- numbers and counts ----------------------------------------------------------------------------

QUEUE_NUMS_MAX = 65_536
PERM_MAX = 15
# Entries in a list or map of a body.
ITEMS_MAX = 10_000
# Topics of one broker; each registration may list all of them.
REGISTERED_TOPICS_MAX = 65_536
# No Java type needs more, and larger integers can be crafted to have equal hashes.
INTEGER_DIGITS_MAX = 19
# Nesting depth of a group's retry policy; RocketMQ's policies have two levels.
POLICY_DEPTH_MAX = 8
# Maximum ratio of inflated to compressed size, for bodies that inflate beyond the limit for
# uncompressed ones. The most compressible bodies, registrations of similar topic names, reach 25;
# see inflated_bytes_max.
INFLATED_RATIO_MAX = 20

# -- bodies ----------------------------------------------------------------------------------------


class Body(NamedTuple):
    """Limits of a request's body.

    bytes_max: its maximum size. is_json: whether it holds JSON.
    """

    bytes_max: int
    is_json: bool


_JSON = Body(256 * _KIB, is_json=True)
_TEXT = Body(256 * _KIB, is_json=False)
# The header holds everything; a body is ignored.
_UNUSED = Body(256 * _KIB, is_json=False)
# Records or messages, whose sizes have limits of their own.
_RECORDS = Body(FRAME_BYTES_MAX, is_json=False)
# ITEMS_MAX attempts of about 150 bytes.
_ATTEMPTS = Body(2 * _MIB, is_json=True)
# ITEMS_MAX topics of about 200 bytes.
_TOPICS = Body(4 * _MIB, is_json=True)
# ITEMS_MAX acks of about 150 bytes.
_ACKS = Body(2 * _MIB, is_json=True)
# One topic's queues with about 14,000 items of 150 bytes.
_MAPPING = Body(2 * _MIB, is_json=True)
# ITEMS_MAX keys of about 400 bytes.
_KEYS = Body(4 * _MIB, is_json=False)
# All topics of a broker: about 50,000, at about 170 bytes each unless compressed.
_REGISTRATION = Body(8 * _MIB, is_json=False)

# All requests that daemons serve; a new request needs an entry.
BODIES: dict[RequestCode, Body] = {
    RequestCode.SEND_MESSAGE: _RECORDS,
    RequestCode.SEND_MESSAGE_V2: _RECORDS,
    RequestCode.SEND_BATCH_MESSAGE: _RECORDS,
    RequestCode.SEND_REPLY_MESSAGE: _RECORDS,
    RequestCode.SEND_REPLY_MESSAGE_V2: _RECORDS,
    RequestCode.BULK_SEND: _RECORDS,
    RequestCode.STAGE_SEND: _RECORDS,
    RequestCode.GET_BY_KEY: _KEYS,
    RequestCode.STAGE_DECIDE: _ATTEMPTS,
    RequestCode.STAGE_ABORT: _ATTEMPTS,
    RequestCode.BATCH_ACK_MESSAGE: _ACKS,
    RequestCode.UPDATE_AND_CREATE_TOPIC_LIST: _TOPICS,
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: _TOPICS,
    RequestCode.UPDATE_AND_CREATE_STATIC_TOPIC: _MAPPING,
    RequestCode.REGISTER_BROKER: _REGISTRATION,
    RequestCode.UPDATE_BROKER_CONFIG: _TEXT,
    RequestCode.UPDATE_NAMESRV_CONFIG: _TEXT,
    RequestCode.GET_NAMESRV_CONFIG: _UNUSED,
    **dict.fromkeys(
        (
            RequestCode.HEART_BEAT,
            RequestCode.CHECK_CLIENT_CONFIG,
            RequestCode.LOCK_BATCH_MQ,
            RequestCode.QUERY_ASSIGNMENT,
            RequestCode.SET_MESSAGE_REQUEST_MODE,
            RequestCode.UNLOCK_BATCH_MQ,
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
            RequestCode.QUERY_DATA_VERSION,
            RequestCode.REGISTER_TOPIC_IN_NAMESRV,
            RequestCode.AUTH_CREATE_USER,
            RequestCode.AUTH_UPDATE_USER,
            RequestCode.AUTH_CREATE_ACL,
            RequestCode.AUTH_UPDATE_ACL,
            RequestCode.SET_QUOTA,
        ),
        _JSON,
    ),
    **dict.fromkeys(
        (
            RequestCode.PULL_MESSAGE,
            RequestCode.LITE_PULL_MESSAGE,
            RequestCode.BULK_PULL,
            RequestCode.POP_MESSAGE,
            RequestCode.ACK_MESSAGE,
            RequestCode.PEEK_MESSAGE,
            RequestCode.CHANGE_MESSAGE_INVISIBLETIME,
            RequestCode.NOTIFICATION,
            RequestCode.POLLING_INFO,
            RequestCode.GET_ALL_MESSAGE_REQUEST_MODE,
            RequestCode.QUERY_MESSAGE,
            RequestCode.VIEW_MESSAGE_BY_ID,
            RequestCode.QUERY_CONSUMER_OFFSET,
            RequestCode.UPDATE_CONSUMER_OFFSET,
            RequestCode.SEARCH_OFFSET_BY_TIMESTAMP,
            RequestCode.GET_MAX_OFFSET,
            RequestCode.GET_MIN_OFFSET,
            RequestCode.GET_EARLIEST_MSG_STORETIME,
            RequestCode.UNREGISTER_CLIENT,
            RequestCode.CONSUMER_SEND_MSG_BACK,
            RequestCode.END_TRANSACTION,
            RequestCode.RESUME_CHECK_HALF_MESSAGE,
            RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS,
            RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER,
            RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE,
            RequestCode.QUERY_CORRECTION_OFFSET,
            RequestCode.CONSUME_MESSAGE_DIRECTLY,
            RequestCode.VIEW_BROKER_STATS_DATA,
            RequestCode.CLEAN_UNUSED_TOPIC,
            RequestCode.GET_BROKER_CONSUME_STATS,
            RequestCode.GET_ALL_PRODUCER_INFO,
            RequestCode.QUERY_TOPICS_BY_CONSUMER,
            RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER,
            RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG,
            RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN,
            RequestCode.GET_BROKER_HA_STATUS,
            RequestCode.SET_COMMITLOG_READ_MODE,
            RequestCode.SWITCH_TIMER_ENGINE,
            RequestCode.RECALL_MESSAGE,
            RequestCode.GET_TIMER_CHECK_POINT,
            RequestCode.GET_TIMER_METRICS,
            RequestCode.GET_CONSUMER_LIST_BY_GROUP,
            RequestCode.UPDATE_AND_CREATE_TOPIC,
            RequestCode.DELETE_TOPIC_IN_BROKER,
            RequestCode.GET_ALL_TOPIC_CONFIG,
            RequestCode.GET_TOPIC_CONFIG,
            RequestCode.GET_TOPIC_STATS_INFO,
            RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
            RequestCode.DELETE_SUBSCRIPTIONGROUP,
            RequestCode.GET_CONSUMER_CONNECTION_LIST,
            RequestCode.GET_CONSUMER_RUNNING_INFO,
            RequestCode.DESCRIBE_GROUP,
            RequestCode.LIST_TIMERS,
            RequestCode.LIST_TRANSACTIONS,
            RequestCode.TIER_STATUS,
            RequestCode.TIER_PLAN,
            RequestCode.TIER_RESUME,
            RequestCode.LIST_QUOTAS,
            RequestCode.TIER_FORGET,
            RequestCode.GET_PRODUCER_CONNECTION_LIST,
            RequestCode.GET_CONSUME_STATS,
            RequestCode.QUERY_TOPIC_CONSUME_BY_WHO,
            RequestCode.QUERY_CONSUME_TIME_SPAN,
            RequestCode.INVOKE_BROKER_TO_RESET_OFFSET,
            RequestCode.CLONE_GROUP_OFFSET,
            RequestCode.COMPACT_TOPIC,
            RequestCode.QUERY_CONSUME_QUEUE,
            RequestCode.GET_BROKER_RUNTIME_INFO,
            RequestCode.GET_BROKER_CONFIG,
            RequestCode.TRIGGER_DELETE_FILES,
            RequestCode.DELETE_EXPIRED_COMMITLOG,
            RequestCode.GET_ALL_CONSUMER_OFFSET,
            RequestCode.GET_ALL_DELAY_OFFSET,
            RequestCode.STAGE_SEAL,
            RequestCode.STAGE_STATE,
            RequestCode.STAGE_COMMIT,
            RequestCode.STAGE_FORGET,
            RequestCode.PUT_KV_CONFIG,
            RequestCode.GET_KV_CONFIG,
            RequestCode.DELETE_KV_CONFIG,
            RequestCode.GET_KVLIST_BY_NAMESPACE,
            RequestCode.UNREGISTER_BROKER,
            RequestCode.BROKER_HEARTBEAT,
            RequestCode.GET_ROUTEINFO_BY_TOPIC,
            RequestCode.GET_BROKER_CLUSTER_INFO,
            RequestCode.GET_BROKER_MEMBER_GROUP,
            RequestCode.WIPE_WRITE_PERM_OF_BROKER,
            RequestCode.ADD_WRITE_PERM_OF_BROKER,
            RequestCode.FORGET_BROKER,
            RequestCode.AUTH_DELETE_USER,
            RequestCode.AUTH_GET_USER,
            RequestCode.AUTH_LIST_USER,
            RequestCode.AUTH_DELETE_ACL,
            RequestCode.AUTH_GET_ACL,
            RequestCode.AUTH_LIST_ACL,
            RequestCode.AUTH_SESSION,
            RequestCode.DELETE_TOPIC_IN_NAMESRV,
            RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
            RequestCode.GET_TOPICS_BY_CLUSTER,
            RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS,
            RequestCode.GET_UNIT_TOPIC_LIST,
            RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST,
            RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST,
        ),
        _UNUSED,
    ),
}


class OutOfBounds(RequestError, ValueError):
    """A value exceeds its limit, or a name is invalid.

    Daemons answer with it like with any RequestError; elsewhere it is a ValueError.
    """

    def __init__(self, remark: str) -> None:
        super().__init__(ResponseCode.INVALID_PARAMETER, remark)

    def __str__(self) -> str:
        return self.remark


def body_of(code: int) -> Body:
    """Limits of a request's body; unknown codes are treated like requests without a body."""
    return BODIES.get(code, _UNUSED)  # type: ignore[call-overload, no-any-return]


def why_too_large(code: int, body_bytes: int) -> str | None:
    """The reason to reject a body of that size; None for one within its bound."""
    bytes_max = body_of(code).bytes_max
    if body_bytes <= bytes_max:
        return None
    return f"{code_name(code)} with a body of {body_bytes} bytes: {bytes_max} is the most"


def check_size(code: int, body_bytes: int) -> None:
    """Raise OutOfBounds for a body that is too large for its code."""
    if reason := why_too_large(code, body_bytes):
        raise OutOfBounds(reason)


def inflated_bytes_max(body_bytes: int, plain_bytes_max: int) -> int:
    """The maximum size that a compressed body may inflate to.

    plain_bytes_max: maximum size of the same body uncompressed, which is always permitted.
    """
    return max(plain_bytes_max, body_bytes * INFLATED_RATIO_MAX)


# -- checks ----------------------------------------------------------------------------------------

# Each raises OutOfBounds with a remark that names the value.

_TOPIC = re.compile(r"[%|a-zA-Z0-9_-]+")
_ADDRESS = re.compile(r"(?:[a-zA-Z0-9._-]+|\[[0-9a-fA-F:.]+(?:%[a-zA-Z0-9._-]+)?\]):([0-9]{1,5})")
_SHOWN_CHARS = 40


def check_topic(topic: str) -> None:
    """Check a topic name from a client, by the peer's rule.

    The retry topic of a group and a topic may have a plus sign between them.
    """
    is_retry = topic.startswith(GROUP_PREFIXES)
    _check_chars("topic", topic, RETRY_TOPIC_CHARS_MAX if is_retry else TOPIC_CHARS_MAX)
    _check_letters("topic", topic.replace("+", "_", 1) if is_retry else topic)


def check_group(group: str) -> None:
    """Check the name of a producer or consumer group, by the peer's rule."""
    _check_chars("group", group, GROUP_CHARS_MAX)
    _check_letters("group", group)


def check_name(what: str, name: str) -> None:
    """Check the name of a broker or cluster, or of a topic that a broker registers.

    A broker's name defaults to its host name, and is also the name of a topic.
    """
    _check_chars(what, name, NAME_CHARS_MAX)
    if not name or " " in name or not name.isprintable():
        raise OutOfBounds(f"{what} {name!r}: use printable characters without spaces, at least one")


def check_address(what: str, address: str) -> None:
    """Check ``host:port``; an IPv6 host is in brackets."""
    _check_chars(what, address, ADDRESS_CHARS_MAX)
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match[1]) < 65_536:
        raise OutOfBounds(f"{what} {address!r}: expected HOST:PORT, e.g. 192.0.2.1:10911")


def check_text(what: str, text: str, bytes_max: int) -> None:
    """Check a text's length in characters, which is at most its length in bytes."""
    if len(text) > bytes_max:
        raise OutOfBounds(f"{what} of {len(text)} characters: the maximum is {bytes_max}")


def check_items(what: str, items: Sized, count_max: int = ITEMS_MAX) -> None:
    """Check the length of a list or map in a body."""
    if len(items) > count_max:
        raise OutOfBounds(f"{len(items)} {what}: the maximum is {count_max}; send them in parts")


def check_marks(what: str, body: Buffer, mark: bytes, marks_per_item: int) -> None:
    """Check the length of a list before its body is decoded, by counting a mark of each item."""
    count = bytes(body).count(mark) // marks_per_item
    if count > ITEMS_MAX:
        raise OutOfBounds(f"about {count} {what}: the maximum is {ITEMS_MAX}; send them in parts")


def check_queue_nums(what: str, queue_nums: int) -> None:
    """Check a number of queues."""
    if not 0 <= queue_nums <= QUEUE_NUMS_MAX:
        raise OutOfBounds(f"{what} {queue_nums}, expected 0 to {QUEUE_NUMS_MAX}")


def check_perm(what: str, perm: int) -> None:
    """Check a topic's permission bits."""
    if not 0 <= perm <= PERM_MAX:
        raise OutOfBounds(f"{what} {perm}, expected 2 write, 4 read or 6 both")


def check_depth(what: str, value: Any) -> None:
    """Check the nesting depth of lists and maps, including objects as keys."""
    level = [value]
    for _ in range(POLICY_DEPTH_MAX):
        level = [item for outer in level for item in _children(outer)]
        if not level:
            return
    if any(isinstance(item, Mapping | list) for item in level):
        raise OutOfBounds(f"{what} nests more than {POLICY_DEPTH_MAX} levels deep")


def _children(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [*value, *value.values()]
    return value if isinstance(value, list) else []


def _check_chars(what: str, name: str, chars_max: int) -> None:
    if len(name) > chars_max:
        raise OutOfBounds(
            f"{what} {name[:_SHOWN_CHARS]}... has {len(name)} characters: "
            f"the maximum is {chars_max}"
        )


def _check_letters(what: str, name: str) -> None:
    if not _TOPIC.fullmatch(name):
        raise OutOfBounds(
            f"{what} {name!r}: use only letters, digits, '%', '|', '_' and '-', and at least one"
        )
