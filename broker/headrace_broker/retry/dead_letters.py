"""Sends to a retry topic: most stay, those that were tried too often become dead letters.

Clients send there when a send-back fails, and orderly consumers when they give a message up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_broker.host_budget import Host
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.message import DELAY
from headrace_protocol.system_topics import RETRY_PREFIX

if TYPE_CHECKING:
    from headrace_broker.consumer.locks import QueueLocks
    from headrace_broker.consumer.subscriptions import SubscriptionGroups
    from headrace_broker.message_demands import SentMessage
    from headrace_broker.topics.table import TopicTable
    from headrace_daemon.host_log import HostLog


def unknown_group(group: str) -> RequestError:
    """The answer for a group that has neither members nor settings."""
    return RequestError(
        ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
        f"subscription group not exist, {group}: send a heartbeat first, or create the group",
    )


def is_retry_topic(topic: str) -> bool:
    """True if each message to a topic is somebody's retry."""
    return topic.startswith(RETRY_PREFIX)


class DeadLetters:
    """Decides which retries are the last, and stores those as dead letters.

    buried_count: messages that became dead letters. lost_count: messages sent back to groups
    without retry queues, which nobody gets again.
    """

    def __init__(
        self,
        topics: TopicTable,
        groups: SubscriptionGroups,
        locks: QueueLocks,
        host_log: HostLog,
    ) -> None:
        self.topics = topics
        self.groups = groups
        self._locks = locks
        self._host_log = host_log
        self.buried_count = self.lost_count = 0

    def serve(self, message: SentMessage) -> None:
        """Redirect a message that its group has given up. Raises RequestError.

        A member with locked queues consumes in order and retries by itself: what its host sends
        here is given up.
        """
        group = message.topic.removeprefix(RETRY_PREFIX)
        config = self.groups.get(group)
        if config is None:
            raise unknown_group(group)
        times_max = message.max_reconsume_times
        if times_max is None:
            times_max = config.retry_max_times
        is_ordered = self._locks.is_ordered(group, Host.of_address(message.born_host))
        if is_ordered or message.reconsume_times > times_max:
            self.bury(message, group)

    def bury(self, message: SentMessage, group: str) -> None:
        """Have a message stored as a dead letter of a group, without delay. Raises RequestError."""
        message.topic = self.topics.create_dlq_topic(group).topic_name
        message.queue_id = 0
        message.put({DELAY: "0"})
        self.buried_count += 1

    def lost(self, address: str, group: str) -> None:
        """Count and log a message that a client sent back to a group without retry queues."""
        self.lost_count += 1
        self._host_log.warning(
            address, "message sent back to a group without retry queues", group=group
        )

    def runtime_info(self) -> dict[str, str]:
        """The counts, for GET_BROKER_RUNTIME_INFO."""
        return {
            "deadLetterCount": str(self.buried_count),
            "retriesLostCount": str(self.lost_count),
        }
