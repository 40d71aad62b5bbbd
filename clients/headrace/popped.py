"""Messages that a SimpleConsumer, or a Consumer that pops, has taken out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from headrace.errors import ConfigurationError
from headrace.processing import Processing
from headrace.received import BODY_LIMITS, BodyLimits, MessageBatch, ReceivedMessage
from headrace_protocol.pop.handle import Handle  # noqa: TC001 - msgspec reads annotations

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator, Sequence

    from headrace.telemetry import Tracing
    from headrace_protocol.bodies import MessageQueue
    from headrace_protocol.columns import RecordColumns


class Leases(Protocol):
    """Settles messages that are out; a blocking one has done so when it returns."""

    def ack(self, message: PoppedMessage) -> Awaitable[None]:
        """See ``PoppedMessage.ack``."""
        ...

    def extend(self, message: PoppedMessage, seconds: float) -> Awaitable[None]:
        """See ``PoppedMessage.extend``."""
        ...

    def retry(self, message: PoppedMessage, after: float | None) -> Awaitable[None]:
        """See ``PoppedMessage.retry``."""
        ...

    def reject(self, message: PoppedMessage) -> Awaitable[None]:
        """See ``PoppedMessage.reject``."""
        ...

    def reply(self, message: PoppedMessage, body: bytes) -> Awaitable[None]:
        """See ``ReceivedMessage.reply``."""
        ...


class PoppedMessage(ReceivedMessage):
    """A message that is out: no other member of the group gets it until its time is up.

    Acknowledge it before its time is up, or another member gets it, with a higher
    ``reconsume_times``. handle: its name at the broker; ``extend`` gives it a new one. processing:
    its span, if the program traces.
    """

    handle: Handle | None = None
    _topic: str = ""
    _leases: Leases | None = None
    _limits: BodyLimits = BODY_LIMITS
    processing: Processing | None = None
    _answer: bytes = b""
    _position: int = 0

    def __reduce__(self) -> tuple[Any, ...]:
        where = self.queue, self.queue_offset, self._body, None, 0, self._stored
        return type(self), (*where, self.handle, self._topic, None, self._limits)

    @property
    def topic(self) -> str:
        """The topic the message was sent to, even if it is redelivered through a retry topic."""
        return self._topic

    @property
    def record(self) -> bytes:
        """The bytes of the record, from the broker's answer or, if pickled since, made again."""
        if not self._answer:
            return self.stored.encode()
        return self._answer[self._position : self._position + self.stored.size]

    @property
    def body_limits(self) -> BodyLimits:
        """A body that is larger is not decompressed."""
        return self._limits

    def ack(self) -> Awaitable[None]:
        """Tell the broker that the message is processed; await it, unless blocking.

        Acks that are under way at the same time share requests. Acknowledging twice does no harm.
        Raises BrokerError, ConnectionLost, RequestTimeout; then it is not known whether the message
        comes again, and ``ack`` may be repeated.
        """
        return self._held_by().ack(self)

    def extend(self, seconds: float) -> Awaitable[None]:
        """Keep the message for this time from now on; await it, unless blocking.

        seconds: more than 0, at most 43,200.
        """
        return self._held_by().extend(self, seconds)

    def retry(self, *, after: float | None = None) -> Awaitable[None]:
        """Have the message delivered to its group again; await it, unless blocking.

        after: seconds, more than 0, at most 43,200; by default 10 s after the first delivery,
            longer after each further one, up to 2 h.
        The broker counts it as a failed attempt: after the group's ``retryMaxTimes`` it goes to the
        group's dead letters.
        """
        return self._held_by().retry(self, after)

    def reject(self) -> Awaitable[None]:
        """Store the message in its group's dead letters; await it, unless blocking."""
        return self._held_by().reject(self)

    def reply(self, body: bytes) -> Awaitable[None]:
        """Reply to the producer that waits in ``Producer.request``; await it, unless blocking.

        The message is still out then: acknowledge it, too. Raises as ``ReceivedMessage.reply``.
        """
        return self._held_by().reply(self, body)

    def _held_by(self) -> Leases:
        if self._leases is None:
            raise ConfigurationError(
                f"{self} was not taken out by a consumer of this process: settle it there"
            )
        return self._leases


def begin_processing(
    messages: Sequence[PoppedMessage], tracing: Tracing, group: str, started_ns: int
) -> None:
    """Give messages that are out the spans of their processing. started_ns: of the receive."""
    tracing.taken(messages, group, started_ns)
    for message in messages:
        message.processing = Processing(tracing.process(message, group, is_current=False))


class PoppedBatch(MessageBatch):
    """Messages of one queue that are out, in the order of their offsets.

    Its columns are built when they are first used: most loops only want the messages.
    """

    __slots__ = ("messages",)

    def __init__(
        self,
        queue: MessageQueue,
        queue_offset: int,
        next_offset: int,
        limits: BodyLimits,
        messages: Sequence[PoppedMessage],
    ) -> None:
        super().__init__(queue, queue_offset, next_offset, None, limits)
        self.messages = messages

    def __reduce__(self) -> tuple[Any, ...]:
        head = (self.queue, self.queue_offset, self.next_offset)
        return type(self), (*head, self.limits, self.messages)

    @classmethod
    def each(cls, messages: Sequence[PoppedMessage]) -> Iterator[PoppedBatch]:
        """The messages of each queue."""
        queues: dict[MessageQueue, list[PoppedMessage]] = {}
        for message in sorted(messages, key=lambda message: message.queue_offset):
            queues.setdefault(message.queue, []).append(message)
        for queue, those in queues.items():
            first, last = those[0], those[-1]
            yield cls(queue, first.queue_offset, last.queue_offset + 1, first.body_limits, those)

    @property
    def columns(self) -> RecordColumns:
        """See ``MessageBatch.columns``."""
        if self._columns is None:
            from headrace_protocol.columns import RecordColumns

            records = b"".join([message.record for message in self.messages])
            self._columns = RecordColumns.from_records(records)
        return self._columns

    @property
    def buffer_bytes(self) -> int:
        """See ``MessageBatch.buffer_bytes``."""
        return sum([message.stored.size for message in self.messages])

    def part(self, start: int, end: int) -> PoppedBatch:
        """See ``MessageBatch.part``."""
        if start <= 0 and end >= len(self):
            return self
        offsets = self.offset_at(start), self.offset_at(end)
        return PoppedBatch(self.queue, *offsets, self.limits, self.messages[start:end])

    def offset_at(self, index: int) -> int:
        """See ``MessageBatch.offset_at``."""
        if index <= 0:
            return self.queue_offset
        return self.messages[index].queue_offset if index < len(self) else self.next_offset

    def __len__(self) -> int:
        return len(self.messages)

    def __iter__(self) -> Iterator[ReceivedMessage]:
        return iter(self.messages)

    def _message(self, index: int) -> ReceivedMessage:
        return self.messages[index]
