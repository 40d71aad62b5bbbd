"""Names of the topics and groups that brokers create for themselves, in RocketMQ's spelling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

# Topics of one consumer group: the prefix, then the group's name.
RETRY_PREFIX: Final = "%RETRY%"
DLQ_PREFIX: Final = "%DLQ%"
GROUP_PREFIXES: Final = (RETRY_PREFIX, DLQ_PREFIX)

# The group in whose name headrace's clients read without one; it keeps nothing.
READER_GROUP: Final = "headrace_reader"

# Template for topics that are created by a send.
DEFAULT_TOPIC: Final = "TBW102"
SCHEDULE_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"
HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
OP_HALF_TOPIC: Final = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
ROCKSDB_HALF_TOPIC: Final = "RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC"
ROCKSDB_OP_HALF_TOPIC: Final = "RMQ_SYS_ROCKSDB_TRANS_OP_HALF_TOPIC"
CHECK_MAX_TIME_TOPIC: Final = "TRANS_CHECK_MAX_TIME_TOPIC"
TIMER_TOPIC: Final = "rmq_sys_wheel_timer"
# Ours alone: messages that waited and could not go to their topic.
UNDELIVERED_TOPIC: Final = "rmq_sys_undelivered"
SELF_TEST_TOPIC: Final = "SELF_TEST_TOPIC"
BENCHMARK_TOPIC: Final = "BenchmarkTest"
OFFSET_MOVED_TOPIC: Final = "OFFSET_MOVED_EVENT"
# Topic into which clients write their message traces.
TRACE_TOPIC: Final = "RMQ_SYS_TRACE_TOPIC"

# Further topics that no client may send to.
SYSTEM_PREFIX: Final = "rmq_sys_"
BROKER_MEMBER_PREFIX: Final = "rmq_sys_SYNC_BROKER_MEMBER_"
_REVIVE_LOG_PREFIX = "rmq_sys_REVIVE_LOG_"
_REPLY_SUFFIX = "_REPLY_TOPIC"

_NOT_OF_USERS = frozenset(
    {
        BENCHMARK_TOPIC,
        CHECK_MAX_TIME_TOPIC,
        DEFAULT_TOPIC,
        OFFSET_MOVED_TOPIC,
        SCHEDULE_TOPIC,
        SELF_TEST_TOPIC,
    }
)
_PREFIXES_NOT_OF_USERS = (*GROUP_PREFIXES, "RMQ_SYS_", SYSTEM_PREFIX)

# Groups whose progress is the broker's own, such as that of its transactions.
OWN_GROUP_PREFIX: Final = "CID_RMQ_SYS_"
TRANSACTION_GROUP: Final = f"{OWN_GROUP_PREFIX}TRANS"
# Its offsets say how much of the revive topic was read.
REVIVE_GROUP: Final = f"{OWN_GROUP_PREFIX}REVIVE_GROUP"
# Topics whose records the broker interprets.
_OWN_TOPICS = frozenset(
    {
        SCHEDULE_TOPIC,
        HALF_TOPIC,
        OP_HALF_TOPIC,
        ROCKSDB_HALF_TOPIC,
        ROCKSDB_OP_HALF_TOPIC,
        CHECK_MAX_TIME_TOPIC,
        SELF_TEST_TOPIC,
        OFFSET_MOVED_TOPIC,
    }
)
_OWN_TOPIC_PREFIXES = (SYSTEM_PREFIX, *(f"{prefix}{OWN_GROUP_PREFIX}" for prefix in GROUP_PREFIXES))


def is_own_group(group: str) -> bool:
    """True if only the broker itself may write the settings and progress of a group."""
    return group.startswith(OWN_GROUP_PREFIX)


def is_own_topic(topic: str) -> bool:
    """True if only the broker itself may write to a topic."""
    return topic in _OWN_TOPICS or topic.startswith(_OWN_TOPIC_PREFIXES)


def reply_topic(cluster: str) -> str:
    """The topic for replies to requests between clients in ``cluster``."""
    return f"{cluster}{_REPLY_SUFFIX}"


def revive_log_topic(cluster: str) -> str:
    """The topic of pop consumption's checkpoints in ``cluster``."""
    return f"{_REVIVE_LOG_PREFIX}{cluster}"


def broker_member_topic(broker: str) -> str:
    """The topic through which the members of ``broker`` coordinate."""
    return f"{BROKER_MEMBER_PREFIX}{broker}"


def user_topics(topics: Iterable[str], nodes: Iterable[str]) -> set[str]:
    """The ``topics`` created by users.

    nodes: names of all clusters and brokers, which brokers name topics after.
    """
    named_after = {name for node in nodes for name in (node, reply_topic(node))}
    made = {topic for topic in topics if not topic.startswith(_PREFIXES_NOT_OF_USERS)}
    return made - _NOT_OF_USERS - named_after
