"""An operator's view of one group: its members, topics and queues."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Self

from headrace.admin.output import queue_columns, time_text
from headrace.errors import HeadraceError, RouteNotFound
from headrace_protocol.system_topics import DLQ_PREFIX, RETRY_PREFIX

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.admin.client import Admin
    from headrace.admin.groups import QueueLag, QueueOfGroup
    from headrace.admin.requests import BrokerProblem
    from headrace_protocol.bodies import (
        ConsumerConnection,
        ConsumerRunningInfo,
        MessageQueue,
        TopicOffset,
    )

# A member's setting with the strategy; Java's clients give the object's class and hash.
_STRATEGY = "allocateMessageQueueStrategy"
_JAVA_STRATEGIES = {
    "AllocateMessageQueueAveragely": "averagely",
    "AllocateMessageQueueAveragelyByCircle": "averagely_by_circle",
    "AllocateMessageQueueByConfig": "config",
    "AllocateMessageQueueByMachineRoom": "machine_room",
    "AllocateMachineRoomNearby": "machine_room_nearby",
    "AllocateMessageQueueConsistentHash": "consistent_hash",
}


class GroupView(NamedTuple):
    """Everything that the brokers and the members report about a group.

    members: by broker name. reports: by client id, of the members that answer. queues: of
    headrace's brokers. dead_letters: number of stored ones.
    """

    members: Mapping[str, ConsumerConnection]
    reports: Mapping[str, ConsumerRunningInfo]
    queues: list[QueueOfGroup]
    conflicts: list[str]
    lags: list[QueueLag]
    retries: int
    dead_letters: int

    @classmethod
    async def of(cls, admin: Admin, group: str, problems: list[BrokerProblem]) -> Self:
        """Ask all brokers, and through them the members."""
        members = await admin.members(group, problems=problems)
        queues, conflicts = await admin.group_queues(group, problems=problems)
        lags = await admin.lag(group, problems=problems)
        retry_lags = [lag.lag for lag in lags if lag.queue.topic.startswith(RETRY_PREFIX)]
        return cls(
            members,
            {
                each.client.client_id: each.report
                for each in await admin.member_reports(group, members)
                if not isinstance(each.report, HeadraceError)
            },
            queues,
            conflicts,
            lags,
            sum(retry_lags)
            if retry_lags
            else await _message_count(admin, f"{RETRY_PREFIX}{group}", problems),
            await _message_count(admin, f"{DLQ_PREFIX}{group}", problems),
        )

    def rows(self) -> dict[str, Any]:
        """The tables, and the counts, by name."""
        return {
            "retries": self.retries,
            "dead_letters": self.dead_letters,
            "conflicts": self.conflicts,
            "members": self._member_rows(),
            "topics": self._topic_rows(),
            "queues": self._queue_rows(),
        }

    def _member_rows(self) -> list[dict[str, Any]]:
        members = {
            client.client_id: {
                "member": client.client_id,
                "address": client.client_addr,
                "language": client.language,
                "strategy": strategy_of(self.reports.get(client.client_id)),
            }
            for found in self.members.values()
            for client in found.connection_set
        }
        return [members[name] for name in sorted(members)]

    def _topic_rows(self) -> list[dict[str, Any]]:
        subscriptions = {
            topic: each.sub_string
            for found in self.members.values()
            for topic, each in found.subscription_table.items()
        }
        by_topic: dict[str, list[QueueLag]] = {topic: [] for topic in subscriptions}
        for lag in self.lags:
            by_topic.setdefault(lag.queue.topic, []).append(lag)
        return [
            {
                "topic": topic,
                "tag": subscriptions.get(topic),
                "queues": len(lags),
                "lag": sum(lag.lag for lag in lags),
                "last_consumed": time_text(max((lag.last_timestamp_ms for lag in lags), default=0)),
            }
            for topic, lags in sorted(by_topic.items())
        ]

    def _queue_rows(self) -> list[dict[str, Any]]:
        lags = {lag.queue: lag.lag for lag in self.lags}
        known = {each.queue: each for each in self.queues}
        # What a member has is all there is to know if the broker does not note pulls.
        owners = {queue: name for name, report in self.reports.items() for queue in report.mq_table}
        return [
            {
                **queue_columns(queue),
                **_owner(known.get(queue), owners.get(queue)),
                "lag": lags.get(queue),
                "alarm": _alarm(known.get(queue)),
            }
            for queue in sorted({*lags, *known, *owners})
        ]


def strategy_of(report: ConsumerRunningInfo | None) -> str | None:
    """Headrace's name of the strategy that a member uses, or its Java class; None if unknown."""
    if report is None or not (text := report.properties.get(_STRATEGY)):
        return None
    name = text.partition("@")[0].rpartition(".")[2]
    return _JAVA_STRATEGIES.get(name, name)


def _owner(known: QueueOfGroup | None, owner: str | None) -> dict[str, Any]:
    if known is None:
        return {"owner": owner, "last_pull": None, "lock": None}
    return {
        "owner": known.owner or owner,
        "last_pull": _ago(known.pulled_s_ago) if known.owner else None,
        "lock": f"{known.lock_owner} for {known.lock_s_left} s" if known.lock_owner else None,
    }


def _ago(seconds: int) -> str:
    return f"{seconds} s ago" if seconds else "now"


def _alarm(known: QueueOfGroup | None) -> str | None:
    if known is None or not known.is_idle:
        return None
    return "no pull for 30 s: restart the member that should own it, unless it is busy"


async def _message_count(admin: Admin, topic: str, problems: list[BrokerProblem]) -> int:
    stats: Mapping[MessageQueue, TopicOffset]
    try:
        stats = await admin.topic_stats(topic, problems=problems)
    except RouteNotFound:  # it is created with its first message
        return 0
    return sum(at.message_count for at in stats.values())
