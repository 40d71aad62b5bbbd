"""Messages that an administrator has a member process again (CONSUME_MESSAGE_DIRECTLY)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.consumer.process_queue import Limits, ProcessQueue
from headrace.received import BodyLimits, MessageBatch
from headrace.values import now_ms
from headrace_protocol.admin_headers import ConsumeDirectlyHeader
from headrace_protocol.bodies import DirectResult, MessageQueue
from headrace_protocol.codes import ResponseCode

if TYPE_CHECKING:
    from headrace.consumer.inbox import Inbox
    from headrace.consumer.process_queue import Delivery
    from headrace.received import ReceivedMessage
    from headrace_protocol.connection import RequestReceived
    from headrace_protocol.drivers.aio import AsyncConnection

_MESSAGES_MAX = 16
_ROOM = Limits(_MESSAGES_MAX, 1 << 30)


class DirectMessages:
    """Passes such messages to the program, and answers with what became of each.

    They belong to no queue of the member, so that its progress stays where it is.
    """

    def __init__(self, inbox: Inbox, limits: BodyLimits) -> None:
        self._inbox = inbox
        self._limits = limits
        self._waiting: set[_DirectQueue] = set()

    def asked(self, connection: AsyncConnection, request: RequestReceived) -> None:
        """Take a message. Raises ValueError for a malformed one."""
        from headrace_protocol.columns import RecordColumns

        header = request.command.header(ConsumeDirectlyHeader)
        columns = RecordColumns.from_records(bytes(request.body))
        if len(columns) != 1 or len(self._waiting) >= _MESSAGES_MAX:
            reason = f"one message at a time, at most {_MESSAGES_MAX} at once"
            connection.respond(request, ResponseCode.SYSTEM_ERROR, remark=reason)
            return
        stored = columns.message(0)
        queue = MessageQueue(stored.topic, header.broker_name or "", stored.queue_id)
        offset = stored.queue_offset
        batch = MessageBatch(queue, offset, offset + 1, columns, self._limits)
        direct = _DirectQueue(self, connection, request, queue, offset)
        self._waiting.add(direct)
        self._inbox.put(direct.add(batch))

    def returned(self, message: ReceivedMessage) -> None:
        """Note that the program has sent a message back."""
        for direct in self._waiting:
            if (direct.queue, direct.offset) == (message.queue, message.queue_offset):
                direct.result = "CR_LATER"

    def end(self, error: object) -> None:
        """Answer for all messages that remain: the program ends, with an error or without."""
        for direct in list(self._waiting):
            if not direct.is_handed_out:
                direct.result = "CR_LATER"
                self.done(direct, "the consumer closed before it came to the message")
                continue
            if error is not None and direct.result == "CR_SUCCESS":
                direct.result = "CR_THROW_EXCEPTION"
            self.done(direct, None if error is None else repr(error))

    def done(self, direct: _DirectQueue, remark: str | None = None) -> None:
        """Answer for a message."""
        if direct not in self._waiting:
            return
        self._waiting.discard(direct)
        body = DirectResult(
            consume_result=direct.result,
            remark=remark,
            spent_time_mills=now_ms() - direct.started_ms,
        )
        connection, request = direct.asker
        if connection.is_open:
            connection.respond(request, ResponseCode.SUCCESS, body=body.encode())


def refuse(connection: AsyncConnection, request: RequestReceived) -> None:
    """Answer for a member that pops: what it sent back would go to a topic that nobody pops."""
    connection.respond(
        request,
        ResponseCode.SYSTEM_ERROR,
        remark="this member takes messages out, and processes no others: send the message again",
    )


class _DirectQueue(ProcessQueue):
    """A queue of one message, whose end is answered."""

    def __init__(
        self,
        owner: DirectMessages,
        connection: AsyncConnection,
        request: RequestReceived,
        queue: MessageQueue,
        offset: int,
    ) -> None:
        super().__init__(queue, _ROOM, offset)
        self.asker = connection, request
        self.offset = offset
        self.result = "CR_SUCCESS"
        self.started_ms = now_ms()
        self._owner = owner

    @property
    def is_handed_out(self) -> bool:
        """True once the program has the message."""
        return any(each.handed_out_count for each in self._deliveries)

    def delivery_done(self, delivery: Delivery) -> None:
        super().delivery_done(delivery)
        self._owner.done(self)
