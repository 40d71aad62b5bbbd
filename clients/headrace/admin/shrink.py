"""Lowers a topic's number of queues without losing messages.

First the write queues: nothing more enters the other queues, and consumers keep reading them. Once
these are consumed, the read queues.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from headrace.admin.output import counted
from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.admin.groups import GroupAdmin
    from headrace_protocol.bodies import MessageQueue, TopicOffset


class Unread(NamedTuple):
    """Messages that a group has not consumed; group is None if no group has read the topic."""

    queue: MessageQueue
    group: str | None
    messages: int

    def __str__(self) -> str:
        reader = f"group {self.group} has not" if self.group else "no group has"
        messages = counted(self.messages, "message")
        queue = f"queue {self.queue.queue_id} of {self.queue.broker_name}"
        return f"{queue} holds {messages} that {reader} consumed"


class UnreadMessages(HeadraceError):
    """Queues cannot go yet because they hold messages that are not consumed."""

    def __init__(self, topic: str, unread: list[Unread], remedy: str) -> None:
        more = f" (and {len(unread) - 1} more)" if len(unread) > 1 else ""
        super().__init__(f"topic {topic}: {unread[0]}{more}; {remedy}")
        self.unread = unread


async def unread_from(
    admin: GroupAdmin,
    topic: str,
    stats: Mapping[MessageQueue, TopicOffset],
    queue_id: int,
    broker: str | None = None,
) -> list[Unread]:
    """Messages not consumed in the queues from ``queue_id`` on, by queue and group.

    stats: those of the topic, see ``Admin.topic_stats``.
    """
    ends = {
        queue: offset
        for queue, offset in stats.items()
        if queue.queue_id >= queue_id
        and broker in {None, queue.broker_name}
        and offset.max_offset > offset.min_offset
    }
    if not ends:
        return []
    groups = await admin.topic_groups(topic)
    if not groups:
        return [Unread(queue, None, at.message_count) for queue, at in ends.items()]
    unread = []
    for group in groups:
        committed = {lag.queue: lag.committed_offset for lag in await admin.lag(group, topic)}
        for queue, at in ends.items():
            messages = at.max_offset - max(committed.get(queue, 0), at.min_offset)
            if messages > 0:
                unread.append(Unread(queue, group, messages))
    return unread
