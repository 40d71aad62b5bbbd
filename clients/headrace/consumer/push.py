"""Consumer: the members of a group share the queues of its topics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

import anyio

from headrace.config import check_limits
from headrace.consumer.assignment import Assignment
from headrace.consumer.inbox import BatchIterator, Inbox, MessageIterator
from headrace.consumer.process_queue import Limits
from headrace.consumer.running_info import running_info
from headrace.consumer.start import Start, check_start, consume_from_where
from headrace.consumer.subscription import ALL, Subscription
from headrace.errors import ConfigurationError
from headrace.instance import ClientInstance
from headrace.messages import BodyLimits, check_group
from headrace_protocol.bodies import ConsumerData, ResetOffsetBody
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.drivers.aio import AsyncConnection, Connect, connect_tcp
from headrace_protocol.headers import ConsumerSendMsgBackHeader
from headrace_protocol.message import BATCH_BYTES_MAX, BODY_BYTES_MAX
from headrace_protocol.system_topics import RETRY_PREFIX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.messages import ReceivedMessage
    from headrace_protocol.bodies import MessageQueue
    from headrace_protocol.connection import RequestReceived

_LEAVE_S = 5.0
_RECONSUME_TIMES_MAX = 16


class Consumer:
    """Reads topics together with the other members of its group; use it in ``async with``.

    group: members with the same group share the queues and the progress. All members must
        subscribe to the same topics and tags.
    topics: a topic, or topics with tag expressions: ``{"orders": "created || paid"}``, ``"*"``
        for all. The topics must exist.
    start: where a group begins that has committed nothing yet: "first", "last", a datetime or
        milliseconds since 1970.
    ordered: take each queue's lock at the broker, so that no two members work on it at once, not
        even for a moment while queues change hands, and hand out one batch of a queue at a time.
    queue_messages_max, queue_bytes_max: how much of each queue is fetched ahead.
    body_bytes_max: compressed bodies that are larger than this are an error when they are read.
    batch_bytes_max: the same for the bodies of a batch that are read at once.

    ``async for message in consumer`` and ``async for batch in consumer.batches()`` never end; both
    may be used by several tasks at once. A message is processed when its task asks for the next
    one. What is processed is committed every 5 s and on leaving the block. Leaving it without an
    exception counts the message at hand as processed, leaving it by one does not: so a time limit
    belongs around the block, or its message may be lost. Messages can come again after a crash or
    when queues change hands.
    """

    _one_user = False

    def __init__(
        self,
        group: str,
        topics: str | Mapping[str, str],
        *,
        nameserver: str | Sequence[str] | None = None,
        start: Start = "last",
        ordered: bool = False,
        queue_messages_max: int = 100_000,
        queue_bytes_max: int = 16 * 1024 * 1024,
        body_bytes_max: int = BODY_BYTES_MAX,
        batch_bytes_max: int = BATCH_BYTES_MAX,
        connect: Connect = connect_tcp,
    ) -> None:
        check_group(group)
        check_start(start)
        check_limits(
            queue_messages_max=queue_messages_max,
            queue_bytes_max=queue_bytes_max,
            body_bytes_max=body_bytes_max,
            batch_bytes_max=batch_bytes_max,
        )
        self.group = group
        self._start = start
        self._ordered = ordered
        self._subscriptions = _subscriptions(group, topics)
        self._instance = ClientInstance(nameserver, connect=connect)
        self._inbox = Inbox(ordered=ordered, one_user=self._one_user)
        self._assignment = Assignment(
            self._instance,
            group,
            self._subscriptions,
            self._inbox,
            start=start,
            ordered=ordered,
            limits=Limits(queue_messages_max, queue_bytes_max),
            body_limits=BodyLimits(body_bytes_max, batch_bytes_max),
        )

    # -- for users ---------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._register()
        tasks = await self._instance.start()
        try:
            await self._assignment.start(tasks)
        except BaseException:
            await self._instance.stop()
            raise
        return self

    async def __aexit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        try:
            if error_type is None:
                self._inbox.count_in_hand_as_processed()
            with anyio.move_on_after(_LEAVE_S, shield=True):
                await self._assignment.give_up_all()
        finally:
            await self._instance.stop()

    def __aiter__(self) -> MessageIterator:
        self._instance.check_open("Consumer")
        return MessageIterator(self._inbox)

    def batches(self, *, max_messages: int | None = None) -> BatchIterator:
        """Iterate over batches, from one queue each, instead of single messages.

        max_messages: no more than this; without it, what one answer of a broker brought.
        """
        self._instance.check_open("Consumer")
        check_limits(max_messages=max_messages)
        return BatchIterator(self._inbox, max_messages)

    @property
    def assignment(self) -> list[MessageQueue]:
        """The queues that are this member's now."""
        return sorted(self._assignment.process_queues)

    async def commit(self) -> None:
        """Commit now, and wait for it; the message or batch at hand counts as processed."""
        self._instance.check_open("Consumer")
        self._inbox.count_in_hand_as_processed()
        await self._assignment.commit()

    async def send_back(self, message: ReceivedMessage, *, delay_level: int = 0) -> None:
        """Have a message come again later, to any member of the group.

        delay_level: as in ``Message``; 0 waits longer each time. After 16 times the message goes
        to the group's dead-letter topic instead; with -1 it does so at once.
        """
        self._instance.check_open("Consumer")
        queue = message.queue
        header = ConsumerSendMsgBackHeader(
            offset=message.stored.physical_offset,
            group=self.group,
            delay_level=delay_level,
            origin_msg_id=message.message_id,
            origin_topic=message.topic,
            max_reconsume_times=_RECONSUME_TIMES_MAX,
        )
        address = await self._instance.broker_address(queue.topic, queue.broker_name)
        response = await self._instance.request(address, RequestCode.CONSUMER_SEND_MSG_BACK, header)
        response.expect()

    # -- what brokers tell and ask -----------------------------------------------------------------

    def _register(self) -> None:
        self._instance.consumers = [
            ConsumerData(
                group_name=self.group,
                consume_from_where=consume_from_where(self._start),
                subscription_data_set=[subscription.data() for subscription in self._subscriptions],
            )
        ]
        self._instance.handlers = {
            RequestCode.NOTIFY_CONSUMER_IDS_CHANGED: self._on_group_changed,
            RequestCode.RESET_CONSUMER_CLIENT_OFFSET: self._on_reset,
            RequestCode.GET_CONSUMER_RUNNING_INFO: self._on_running_info,
        }

    def _on_group_changed(self, _connection: AsyncConnection, _request: RequestReceived) -> None:
        self._assignment.group_changed.set()

    def _on_reset(self, _connection: AsyncConnection, request: RequestReceived) -> None:
        for queue, offset in ResetOffsetBody.decode(request.body).offset_table.items():
            process_queue = self._assignment.process_queues.get(queue)
            if process_queue:
                process_queue.reset(offset)

    def _on_running_info(self, connection: AsyncConnection, request: RequestReceived) -> None:
        info = running_info(
            self._assignment.process_queues.values(), self._subscriptions, ordered=self._ordered
        )
        connection.respond(request, ResponseCode.SUCCESS, body=info)


def _subscriptions(group: str, topics: str | Mapping[str, str]) -> list[Subscription]:
    """What the group reads: its topics, and what it has sent back. Raises ConfigurationError."""
    expressions = {topics: ALL} if isinstance(topics, str) else topics
    if not isinstance(expressions, Mapping):
        raise ConfigurationError(f"topics={topics!r}: a topic, or {{topic: tags}} for some")
    if not expressions:
        raise ConfigurationError(f"group {group} subscribes to no topic")
    retry = Subscription(f"{RETRY_PREFIX}{group}")
    return [*(Subscription(topic, text) for topic, text in expressions.items()), retry]
