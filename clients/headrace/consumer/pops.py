"""POP requests to brokers, and the messages in their answers."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from headrace.popped import PoppedMessage
from headrace.received import BODY_LIMITS, BodyLimits
from headrace.values import now_ms
from headrace_protocol.bodies import MessageQueue
from headrace_protocol.bounds import OutOfBounds
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.message import TAGS, decode_records
from headrace_protocol.pop.batch_ack import BITS_MAX
from headrace_protocol.pop.handle import HANDLE_PROPERTY, Handle, TopicKind, parse
from headrace_protocol.pop.headers import (
    INIT_MAX,
    INIT_MIN,
    POP_MESSAGES_MAX,
    PopMessageHeader,
    PopMessageResponseHeader,
)
from headrace_protocol.pop.infos import PoppedQueue, parse_offsets

if TYPE_CHECKING:
    from headrace.consumer.subscription import Subscription
    from headrace.popped import Leases
    from headrace_protocol.drivers.aio import AsyncConnection
    from headrace_protocol.drivers.response import Response
    from headrace_protocol.message import StoredMessage

# Time for the answer once the broker's wait is over, which it may notice a little late.
_SLACK_MS = 10_000
_EMPTY = (
    ResponseCode.PULL_NOT_FOUND,
    ResponseCode.NO_MESSAGE,
    ResponseCode.POLLING_FULL,
    ResponseCode.POLLING_TIMEOUT,
)


class PopMember(NamedTuple):
    """A member that takes messages out.

    is_latest: whether a group that is new to a broker starts behind its newest message.
    """

    group: str
    is_latest: bool = False
    body_limits: BodyLimits = BODY_LIMITS


class Pop(NamedTuple):
    """Parameters of a POP of one topic at one broker.

    queue_id: ANY_QUEUE for all queues of the broker. messages_max: a broker returns at most
    POP_MESSAGES_MAX. wait_ms: how long it may wait for the first message. invisible_ms: how long
    the messages are out.
    """

    member: PopMember
    subscription: Subscription
    broker_name: str
    queue_id: int
    messages_max: int
    wait_ms: int
    invisible_ms: int

    def header(self) -> PopMessageHeader:
        """The header of the request."""
        return PopMessageHeader(
            topic=self.subscription.topic,
            queue_id=self.queue_id,
            bname=self.broker_name,
            consumer_group=self.member.group,
            max_msg_nums=min(self.messages_max, POP_MESSAGES_MAX),
            invisible_time=self.invisible_ms,
            poll_time=self.wait_ms,
            born_time=now_ms(),
            init_mode=INIT_MAX if self.member.is_latest else INIT_MIN,
            exp_type=self.subscription.kind,
            exp=self.subscription.expression,
            order=False,
        )

    async def ask(self, connection: AsyncConnection, leases: Leases) -> Popped:
        """Take messages out. Raises BrokerError, MalformedAnswer, ConnectionLost, ..."""
        response = await connection.request(
            RequestCode.POP_MESSAGE, self.header(), timeout_ms=self.wait_ms + _SLACK_MS
        )
        if response.command.code in _EMPTY:
            return Popped([], [])
        messages = self._messages(response.expect(), leases)
        tags = self.subscription.tags
        if not tags:
            return Popped(messages, [])
        is_wanted = [each.stored.properties.get(TAGS) in tags for each in messages]
        return Popped(
            [each for each, fits in zip(messages, is_wanted, strict=True) if fits],
            [each for each, fits in zip(messages, is_wanted, strict=True) if not fits],
        )

    def _messages(self, response: Response, leases: Leases) -> list[PoppedMessage]:
        answer = bytes(response.body)
        records = response.read(lambda _: decode_records(answer))
        positions = accumulate((record.size for record in records), initial=0)
        try:
            handles = _Handles(self, response)
            return [
                self._message(record, handles.of(record), leases, (answer, position))
                for record, position in zip(records, positions, strict=False)
            ]
        except OutOfBounds as error:
            raise response.malformed(error) from error

    def _message(
        self, record: StoredMessage, handle: Handle, leases: Leases, place: tuple[bytes, int]
    ) -> PoppedMessage:
        topic = self.subscription.topic
        queue = MessageQueue(
            topic=handle.topic(topic, self.member.group),
            broker_name=self.broker_name,
            queue_id=handle.queue_id,
        )
        assert handle.queue_offset is not None
        return PoppedMessage(
            queue,
            handle.queue_offset,
            None,
            None,
            0,
            record,
            handle,
            topic,
            leases,
            self.member.body_limits,
            None,
            *place,
        )


class Popped(NamedTuple):
    """Messages of one answer. others: those whose tags only have the hash of a wanted one."""

    messages: list[PoppedMessage]
    others: list[PoppedMessage]


class _Handles:
    """The handles of the messages in an answer. Raises OutOfBounds for what doesn't fit."""

    def __init__(self, pop: Pop, response: Response) -> None:
        self._pop = pop
        self._header = header = response.header(PopMessageResponseHeader)
        queues = parse_offsets(header.start_offset_info, header.msg_offset_info)
        self._queues = {(queue.kind, queue.queue_id): queue for queue in queues}

    def of(self, record: StoredMessage) -> Handle:
        """The handle of one record; those of a retry topic carry theirs."""
        text = record.properties.get(HANDLE_PROPERTY)
        handle = parse(text) if text else self._composed(record)
        offset = record.queue_offset if handle.queue_offset is None else handle.queue_offset
        if not 0 <= offset - handle.start_offset < BITS_MAX:
            raise OutOfBounds(f"offset {offset} of messages from {handle.start_offset} on")
        return handle._replace(broker_name=self._pop.broker_name, queue_offset=offset)

    def _composed(self, record: StoredMessage) -> Handle:
        pop, header = self._pop, self._header
        kind = TopicKind.of(record.topic, pop.subscription.topic, pop.member.group)
        queue = self._queues.get((kind, record.queue_id), _NO_QUEUE)
        if record.queue_offset not in queue.offsets:
            raise OutOfBounds(
                f"offset {record.queue_offset} of queue {record.queue_id} is in no msgOffsetInfo"
            )
        return Handle(
            queue.start_offset,
            header.pop_time,
            header.invisible_time,
            header.revive_qid,
            kind,
            pop.broker_name,
            record.queue_id,
            record.queue_offset,
        )


_NO_QUEUE = PoppedQueue(TopicKind.NORMAL, 0, 0, ())
