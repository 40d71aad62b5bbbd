"""Topics that brokers make for themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_NAMES = frozenset(
    {
        "BenchmarkTest",
        "OFFSET_MOVED_EVENT",
        "SCHEDULE_TOPIC_XXXX",
        "SELF_TEST_TOPIC",
        "TBW102",
        "TRANS_CHECK_MAX_TIME_TOPIC",
    }
)
_PREFIXES = ("%RETRY%", "%DLQ%", "RMQ_SYS_", "rmq_sys_")


def user_topics(topics: Iterable[str], nodes: Iterable[str]) -> set[str]:
    """What of ``topics`` users have made.

    nodes: names of all clusters and brokers; those that brokers name topics after.
    """
    named_after = {name for node in nodes for name in (node, f"{node}_REPLY_TOPIC")}
    return {topic for topic in topics if not topic.startswith(_PREFIXES)} - _NAMES - named_after
