"""Messages that a SimpleConsumer has taken out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from headrace.errors import ConfigurationError
from headrace.processing import Processing
from headrace.received import BODY_LIMITS, BodyLimits, ReceivedMessage
from headrace_protocol.pop.handle import Handle  # noqa: TC001 - msgspec reads annotations

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from headrace.telemetry import Tracing


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

    handle: its name at the broker; ``extend`` gives it a new one. processing: its span, if the
    program traces. Acknowledge it before its time is
    up, or another member gets it, with a higher ``reconsume_times``.
    """

    handle: Handle | None = None
    _topic: str = ""
    _leases: Leases | None = None
    _limits: BodyLimits = BODY_LIMITS
    processing: Processing | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        where = self.queue, self.queue_offset, self._body, None, 0, self._stored
        return type(self), (*where, self.handle, self._topic, None, self._limits)

    @property
    def topic(self) -> str:
        """The topic the message was sent to, even if it is redelivered through a retry topic."""
        return self._topic

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
                f"{self} was not taken out by a SimpleConsumer of this process: settle it there"
            )
        return self._leases


def begin_processing(
    messages: Sequence[PoppedMessage], tracing: Tracing, group: str, started_ns: int
) -> None:
    """Give messages that are out the spans of their processing. started_ns: of the receive."""
    tracing.taken(messages, group, started_ns)
    for message in messages:
        message.processing = Processing(tracing.process(message, group, is_current=False))
