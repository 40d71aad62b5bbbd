"""Places of topics that are kept for Apache RocketMQ: sends and reads are rejected.

Source: docs/store-format.md "Stores of Apache RocketMQ"; tests/broker/topics/test_peer_topics.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_broker.queue_directory import Use
from headrace_broker.topics.peer import kind_of

if TYPE_CHECKING:
    from headrace_broker.queue_directory import Lookup, QueueDirectory
    from headrace_protocol.errors import RequestError


def peer_place(_directory: QueueDirectory, lookup: Lookup) -> RequestError | None:
    """A rejection of requests that only Apache's broker can serve."""
    kind, name = kind_of(lookup.topic), lookup.topic.topic_name
    if kind is None:
        return None
    if lookup.use is Use.SEND:
        return kind.rejection(name, "a message that is stored here would not reach its readers")
    return kind.rejection(name, "its batch queues are not read here")
