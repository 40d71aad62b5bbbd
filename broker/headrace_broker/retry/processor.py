"""CONSUMER_SEND_MSG_BACK (36): a consumer wants a message again later, or gives it up.

Source: docs/protocol.md "Retries"; tests/broker/retry/test_retry.py.
"""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING, Final

from headrace_broker.inner.writer import InnerMessage
from headrace_broker.message_demands import SentMessage
from headrace_broker.processors.send_answers import rejection
from headrace_broker.retry.dead_letters import unknown_group
from headrace_broker.store.errors import StoreError
from headrace_broker.store.log.record_checksum import without_checksum
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.headers import ConsumerSendMsgBackHeader
from headrace_protocol.inner_batch import unwrap_messages
from headrace_protocol.java_hash import tags_code_of
from headrace_protocol.message import (
    DELAY,
    INNER_BATCH,
    ORIGIN_MESSAGE_ID,
    RETRY_TOPIC,
    WAIT,
    decode_record,
)
from headrace_protocol.pop.handle import original_topic
from headrace_protocol.rights.late import READ, real_topic
from headrace_protocol.rights.rules import Kind
from headrace_protocol.serving import Reply
from headrace_protocol.waiting import ready

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_broker.inner.writer import InnerWriter
    from headrace_broker.processors.send import SendProcessor
    from headrace_broker.retry.dead_letters import DeadLetters
    from headrace_broker.store.message_store import MessageStore
    from headrace_protocol.bodies import SubscriptionGroupConfig, TopicConfig
    from headrace_protocol.message import StoredMessage
    from headrace_protocol.serving import Registry, Request

# Of a client's frames: V3_4_9. Older ones say nothing about how often a message is tried.
_SAYS_TIMES: Final = 121
_FIRST_LEVEL: Final = 3
_TIMES_MAX: Final = 2**31 - 1


class SendBackProcessor:
    """Stores messages that are sent back, in the retry topic of their group."""

    def __init__(
        self,
        store: MessageStore,
        writer: InnerWriter,
        dead_letters: DeadLetters,
        delay: Callable[[SentMessage], None],
        sends: SendProcessor,
        count: Callable[[str, str, int], None],
    ) -> None:
        """delay: has a message wait for its DELAY. count: of a group, a topic, and body's bytes."""
        self._store = store
        self._writer = writer
        self._topics = dead_letters.topics
        self._groups = dead_letters.groups
        self._dead_letters = dead_letters
        self._delay = delay
        self._sends = sends
        self._count = count

    def register(self, registry: Registry) -> None:
        """Serve the code."""
        registry.route(RequestCode.CONSUMER_SEND_MSG_BACK, self.send_back)

    async def send_back(self, request: Request) -> Reply | None:
        """CONSUMER_SEND_MSG_BACK: store the message again; the one that was consumed stays."""
        header = request.header(ConsumerSendMsgBackHeader)
        group = self._groups.get(header.group)
        if group is None:
            raise unknown_group(header.group)
        self._topics.check_broker_writable()
        if group.retry_queue_nums <= 0:
            self._dead_letters.lost(request.channel.address, header.group)
            return Reply()
        retry_topic = self._topics.create_retry_topic(header.group, group.retry_queue_nums)
        self._topics.check_deliverable(retry_topic)
        stored = await ready(partial(self._find, header))
        request.check(Kind.TOPIC, real_topic(stored), *READ)
        message = self._again(stored, retry_topic, header.group)
        if header.delay_level < 0 or stored.reconsume_times >= _times_max(request, header, group):
            self._dead_letters.bury(message, header.group)
        else:
            level = header.delay_level or _FIRST_LEVEL + stored.reconsume_times
            message.put({DELAY: str(level)})
            self._delay(message)
        try:
            self._append(stored, message)
        except StoreError as error:
            raise rejection(error, message.topic) from None
        topic = stored.properties.get(RETRY_TOPIC, stored.topic)
        if self._topics.get(topic) is not None:  # a client may write any name
            self._count(header.group, topic, len(stored.stored_body))
        return self._sends.reply_confirmed(request, Reply())

    def _find(self, header: ConsumerSendMsgBackHeader) -> StoredMessage:
        """The message at an offset in the log. Raises RequestError, NotReady.

        A consumer names the topic that the message was first sent to, without its namespace.
        """
        record = self._store.message_at(header.offset)
        stored = _one_of(decode_record(record), header) if record is not None else None
        if stored is not None:
            wanted = header.origin_topic
            first = original_topic(stored.topic, header.group)
            names = (stored.topic, stored.properties.get(RETRY_TOPIC, first))
            if not wanted or any(_is_topic(name, wanted) for name in names):
                return stored
        raise RequestError(
            ResponseCode.SYSTEM_ERROR,
            f"look message by offset failed, {header.offset}: no message of "
            f"{header.origin_topic or 'any topic'} begins there; it is kept where it was consumed",
        )

    def _again(self, stored: StoredMessage, retry_topic: TopicConfig, group: str) -> SentMessage:
        """The message as the retry topic gets it, in a queue that consumers read."""
        queue_nums = min(retry_topic.read_queue_nums, retry_topic.write_queue_nums)
        if not queue_nums:
            raise RequestError(
                ResponseCode.NO_PERMISSION,
                f"topic {retry_topic.topic_name} has no queue that is both read and written: give "
                f"it some with `headrace topic create {retry_topic.topic_name} --queues N`",
            )
        message = SentMessage(
            retry_topic.topic_name,
            random.randrange(queue_nums),
            SentMessage.property_items(without_checksum(stored.raw_properties)),
            tags_code_of(stored.raw_properties),
            stored.sys_flag,
            min(stored.reconsume_times + 1, _TIMES_MAX),
        )
        topic = original_topic(stored.topic, group)
        first = {RETRY_TOPIC: topic, ORIGIN_MESSAGE_ID: stored.offset_message_id}
        missing = {name: value for name, value in first.items() if name not in stored.properties}
        message.put({**missing, WAIT: "false"})
        return message

    def _append(self, stored: StoredMessage, message: SentMessage) -> None:
        self._writer.append_now(
            InnerMessage(
                message.topic,
                message.queue_id,
                stored.stored_body,
                message.raw_properties,
                message.tags_code,
                stored.flag,
                message.sys_flag,
                stored.born_timestamp,
                message.reconsume_times,
                stored.born_host,
            )
        )


def _one_of(stored: StoredMessage, header: ConsumerSendMsgBackHeader) -> StoredMessage | None:
    """The message of a record that a consumer means: of a batch the one with its id."""
    if not stored.sys_flag & INNER_BATCH:
        return stored
    wanted = header.origin_msg_id
    return next((each for each in unwrap_messages([stored]) if each.message_id == wanted), None)


def _times_max(
    request: Request, header: ConsumerSendMsgBackHeader, group: SubscriptionGroupConfig
) -> int:
    said = header.max_reconsume_times
    if said is not None and request.command.version >= _SAYS_TIMES:
        return said
    return group.retry_max_times


def _is_topic(name: str, wanted: str) -> bool:
    return name == wanted or name.endswith(f"%{wanted}")
