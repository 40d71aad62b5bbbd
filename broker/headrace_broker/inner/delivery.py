"""Targets of messages that have waited: their topic, or one of the broker's with the reason."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from headrace_broker.inner.delivered import source_of
from headrace_broker.inner.layouts import Layouts
from headrace_broker.inner.writer import InnerMessage
from headrace_broker.queue_directory import Elsewhere, Use
from headrace_broker.store.log.record_checksum import SLOT_BYTES
from headrace_broker.topics.attributes import is_compacted
from headrace_protocol.errors import RequestError
from headrace_protocol.java_hash import tags_code_of
from headrace_protocol.message import (
    PROPERTIES_BYTES_MAX,
    property_number,
    property_value,
    with_properties,
)
from headrace_protocol.system_topics import UNDELIVERED_TOPIC

if TYPE_CHECKING:
    from collections.abc import Collection

    from headrace_broker.inner.waiting import Waiting
    from headrace_broker.queue_directory import QueueDirectory
    from headrace_broker.topics.table import TopicTable
    from headrace_daemon.host_log import HostLog

REASON = "UNDELIVERED_REASON"
_TARGETS_MAX = 10_000
# A record may get a checksum of its own.
INNER_PROPERTIES_MAX = PROPERTIES_BYTES_MAX - SLOT_BYTES


class Route(NamedTuple):
    """The delivery of a message that waited, as its properties have it.

    topic, queue_id: where it goes. tags_code: of its unit there. parts: of the properties that it
    gets, between the values of UNIQ_KEY.
    """

    topic: str
    queue_id: int
    tags_code: int
    parts: tuple[bytes, ...]


class Routes:
    """Reads the properties of messages that waited; a layout that is known costs no scan."""

    def __init__(self, dropped: Collection[bytes] = ()) -> None:
        """dropped: names of the properties that delivered messages do not keep."""
        self._dropped = dropped
        self._layouts = Layouts(self._route, [b"UNIQ_KEY"])

    def __len__(self) -> int:
        return len(self._layouts)

    def read(self, properties: bytes) -> tuple[Route, bytes]:
        """The route of a message and the properties that it gets, each ended by a separator.

        properties: those it waited with, without the record's checksum.
        """
        route, keys, mark = self._layouts.read(properties)
        return route, keys + mark.join(route.parts)

    def _route(self, properties: bytes, mark: bytes) -> Route:
        return Route(
            property_value(properties, b"REAL_TOPIC").decode(errors="replace"),
            property_number(properties, b"REAL_QID", -1),
            tags_code_of(properties),
            tuple(with_properties(properties, {}, self._dropped).split(mark)),
        )


class Delivery:
    """Decides where a message goes that has waited.

    undelivered: number of messages stored in the topic of undelivered ones since the start.
    """

    def __init__(self, topics: TopicTable, directory: QueueDirectory, host_log: HostLog) -> None:
        self.undelivered = 0
        self._topics = topics
        self._directory = directory
        self._host_log = host_log
        # Until topics change: the queue that gets the messages of one, and where its topic begins
        # in the log.
        self._targets: dict[tuple[str, int], tuple[int, int]] = {}
        self._targets_change = -1

    def find(self, topic: str, queue_id: int, physical_offset: int) -> tuple[int, str]:
        """The queue that gets a message for a queue, and why it can't go there, "" if it can.

        physical_offset: where it waits in the log: a topic that was made later is another one.
        """
        if self._targets_change != self._topics.change_count or len(self._targets) >= _TARGETS_MAX:
            self._targets.clear()
            self._targets_change = self._topics.change_count
        known = self._targets.get((topic, queue_id))
        if known is None or known[1] > physical_offset:
            return self._look_up(topic, queue_id, physical_offset)
        return known[0], ""

    def _look_up(self, topic: str, wanted_id: int, physical_offset: int) -> tuple[int, str]:
        queue_id = self._remaining(topic, wanted_id)
        place = self._directory.resolve(topic, queue_id, Use.DELIVER)
        if isinstance(place, Elsewhere):
            place = place.rejection(topic, queue_id)
        if isinstance(place, RequestError):
            return queue_id, place.remark
        created_at = self._topics.incarnations.created_at(topic)
        if created_at > physical_offset:
            return queue_id, f"topic {topic} was deleted and made anew while the message waited"
        self._targets[topic, wanted_id] = queue_id, created_at
        return queue_id, ""

    def _remaining(self, topic: str, queue_id: int) -> int:
        """A queue, or another one in its place if its topic has fewer queues by now.

        Not in a compacted topic, where the queue of a key must stay.
        """
        config = self._topics.get(topic)
        if config is None or is_compacted(config):
            return queue_id
        counts = config.read_queue_nums, config.write_queue_nums
        count = min(counts) or max(counts)
        return queue_id % count if count and queue_id >= max(counts) else queue_id

    def message(self, waiting: Waiting, route: Route, properties: bytes) -> InnerMessage:
        """The message as its topic gets it, or the topic of undelivered ones.

        properties: those of the delivered record.
        """
        topic, queue_id, tags_code, _ = route
        queue_id, reason = self.find(topic, queue_id, waiting.physical_offset)
        message = stored_again(waiting, topic, queue_id, properties, tags_code)
        return self.redirect(message, reason) if reason else message

    def redirect(self, message: InnerMessage, reason: str) -> InnerMessage:
        """The message as the topic of undelivered ones gets it, which is created on first use.

        reason: becomes a property, cut where the properties would get too long.
        """
        self._topics.create_system_topic(UNDELIVERED_TOPIC)
        return message._replace(
            topic=UNDELIVERED_TOPIC,
            queue_id=0,
            properties=_with_reason(message.properties, reason),
            on_appended=partial(self._note_undelivered, message, reason),
        )

    def _note_undelivered(self, message: InnerMessage, reason: str) -> None:
        self.undelivered += 1
        self._host_log.warning(
            message.client,
            "message not delivered",
            topic=message.topic,
            queue_id=message.queue_id,
            kept_in=UNDELIVERED_TOPIC,
            reason=reason,
        )

    def runtime_info(self) -> dict[str, str]:
        """The count, for GET_BROKER_RUNTIME_INFO."""
        return {"messagesUndelivered": str(self.undelivered)}


def stored_again(
    waiting: Waiting, topic: str, queue_id: int, properties: bytes, tags_code: int
) -> InnerMessage:
    """A message that waited, as the record that takes its place."""
    return InnerMessage(
        topic,
        queue_id,
        waiting.body,
        properties,
        tags_code,
        waiting.flag,
        waiting.sys_flag,
        waiting.born_timestamp,
        waiting.reconsume_times,
        waiting.born_host,
        source_of(waiting),
    )


def _with_reason(properties: bytes, reason: str) -> bytes:
    room = INNER_PROPERTIES_MAX - len(with_properties(properties, {REASON.encode(): b""}))
    text = reason.replace("\x01", " ").replace("\x02", " ").encode()[: max(room, 0)]
    whole = text.decode(errors="ignore").encode()  # without half a character at the end
    return with_properties(properties, {REASON.encode(): whole}) if whole else properties
