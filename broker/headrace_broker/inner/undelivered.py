"""Where messages go that can't go to their own topic: a topic of the broker's, with the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from headrace_broker.queue_directory import Elsewhere, Use
from headrace_protocol.errors import RequestError
from headrace_protocol.message import PROPERTIES_BYTES_MAX
from headrace_protocol.system_topics import UNDELIVERED_TOPIC

if TYPE_CHECKING:
    from headrace_broker.inner.writer import InnerMessage
    from headrace_broker.queue_directory import QueueDirectory
    from headrace_broker.topics.table import TopicTable

log = structlog.get_logger("headrace.broker")

REASON = "UNDELIVERED_REASON"
# A record may get a checksum of its own, and the item its end.
_CHECKSUM_ROOM = 32


class Delivery:
    """Says whether a message that waited can go to its topic."""

    def __init__(self, topics: TopicTable, directory: QueueDirectory) -> None:
        self._topics = topics
        self._directory = directory

    def why_not(self, topic: str, queue_id: int, physical_offset: int) -> str:
        """Why a message can't go to a queue, "" if it can.

        physical_offset: where it waits in the log: a topic that was made later is another one.
        """
        place = self._directory.resolve(topic, queue_id, Use.DELIVER)
        if isinstance(place, Elsewhere):
            place = place.rejection(topic, queue_id)
        if isinstance(place, RequestError):
            return place.remark
        if self._topics.incarnations.created_at(topic) > physical_offset:
            return f"topic {topic} was deleted and made anew while the message waited"
        return ""


class Undelivered:
    """Redirects messages, and counts them.

    count: how many went there since the start.
    """

    def __init__(self, topics: TopicTable) -> None:
        self.count = 0
        self._topics = topics

    def redirect(self, message: InnerMessage, reason: str) -> InnerMessage:
        """The message as it goes to the topic of undelivered ones, made on first use.

        reason: becomes a property, cut where the properties would get too long.
        """
        self._topics.create_system_topic(UNDELIVERED_TOPIC)
        self.count += 1
        log.warning(
            "message not delivered",
            topic=message.topic,
            queue_id=message.queue_id,
            kept_in=UNDELIVERED_TOPIC,
            reason=reason,
        )
        room = PROPERTIES_BYTES_MAX - len(message.properties) - _CHECKSUM_ROOM
        item = f"{REASON}\x01{_clean(reason)}".encode()[: max(room, 0)]
        properties = message.properties + item.decode(errors="ignore").encode() + b"\x02"
        is_room = len(item) > len(REASON) + 1
        return message._replace(
            topic=UNDELIVERED_TOPIC,
            queue_id=0,
            properties=properties if is_room else message.properties,
        )


def _clean(reason: str) -> str:
    return reason.replace("\x01", " ").replace("\x02", " ")
