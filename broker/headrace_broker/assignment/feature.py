"""Assignment by the broker as a feature."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_broker.assignment.processor import AssignmentProcessor
from headrace_broker.assignment.request_modes import RequestModes
from headrace_broker.assignment.topic_queues import TopicQueues
from headrace_broker.feature import Feature
from headrace_protocol.bodies import MessageQueue

if TYPE_CHECKING:
    from headrace_broker.core import Core


def build(core: Core) -> Feature:
    """See ``Feature``. Raises StoreFormatError if the modes can't be read."""
    modes = RequestModes(core.file("messageRequestMode.json"), core.config)
    topics, consumers = core.tables.topics, core.clients.consumers
    name = core.config.broker_name

    def own(topic: str) -> list[MessageQueue]:
        return [MessageQueue(topic, name, n) for n in range(topics.readable_queues(topic))]

    def members(group: str) -> list[str]:
        return [member.client_id for member in consumers.members(group)]

    queues = TopicQueues(core.nameservers.find_queues, own, core.store.clock.now_ms)
    return Feature(
        processors=(AssignmentProcessor(modes, queues, members, core.changes),),
        tables=(modes.saved,),
    )
