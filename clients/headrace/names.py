"""Names of topics and groups, and queues, as callers may give them."""

from __future__ import annotations

import re

from headrace.errors import ConfigurationError, InvalidMessage
from headrace.values import kind_of, shown
from headrace_protocol.bodies import MessageQueue
from headrace_protocol.system_topics import GROUP_PREFIXES

_TOPIC = re.compile(r"[%|a-zA-Z0-9_-]{1,127}")
_RETRY_TOPIC = re.compile(r"%(RETRY|DLQ)%[%|a-zA-Z0-9_-]{1,248}")
_GROUP = re.compile(r"[%|a-zA-Z0-9_-]{1,120}")


def check_topic(topic: str) -> str:
    """The plain name of a topic. Raises InvalidMessage unless it is a valid one."""
    if not isinstance(topic, str):
        raise InvalidMessage(f"{shown(topic)} is not a valid topic name: it must be a str")
    if not _TOPIC.fullmatch(topic) and not _RETRY_TOPIC.fullmatch(topic):
        raise InvalidMessage(
            f"{topic!r} is not a valid topic name: use 1 to 127 letters, digits, and any of % | _ -"
        )
    return str.__str__(topic)


def check_queue(queue: MessageQueue) -> MessageQueue:
    """The queue itself. Raises ConfigurationError for what is none."""
    if isinstance(queue, MessageQueue):
        return queue
    raise ConfigurationError(
        f"queue={shown(queue)} is {kind_of(queue)}: give a MessageQueue, such as one of "
        "client.queues(topic)"
    )


def takes_batches(topic: str) -> bool:
    """True if brokers accept batches for ``topic``: not for retry and dead-letter topics."""
    return not topic.startswith(GROUP_PREFIXES)


def check_group(group: str) -> str:
    """The plain name of a group. Raises ConfigurationError unless it is a valid one."""
    if not isinstance(group, str):
        raise ConfigurationError(f"group={shown(group)} is {kind_of(group)}: it must be a str")
    if not _GROUP.fullmatch(group):
        hint = f" (the first argument is the group: write nameserver={group!r})"
        raise ConfigurationError(
            f"{group!r} is not a valid group name: use 1 to 120 letters, digits, and any of % | _ -"
            + (hint if ":" in group else "")
        )
    return str.__str__(group)
