"""Observers of a client's messages: OpenTelemetry and RocketMQ's message trace.

Does not load either.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from headrace.messages import SendResult
    from headrace.producer.block import Block
    from headrace.received import MessageBatch, ReceivedMessage
    from headrace.settlement import Settlement
    from headrace_protocol.headers import EndTransactionHeader


class SendSpan(Protocol):
    """A request that sends, with its retries."""

    def add_to(self, block: Block) -> None:
        """Give the messages of a block what they carry to their consumers."""

    def end(self, outcome: SendResult | BaseException | None) -> None:
        """End it with the outcome of the last attempt; None if there is none."""


class ProcessSpan(Protocol):
    """The processing of a message or batch."""

    def end(self) -> None:
        """The program is done with it."""


class Tracing(Protocol):
    """Observes the messages of a client; see ``spans.Tracing``."""

    def of_block(self) -> Tracing:
        """The same for a block of the program."""
        ...

    def send(self, block: Block) -> SendSpan | None:
        """Start the span of a request; None for one that is not observed."""
        ...

    def received(self, batch: MessageBatch, group: str | None, started_ns: int) -> None:
        """Record a receive that began at ``started_ns``."""

    def process(
        self, what: ReceivedMessage | MessageBatch, group: str, *, is_current: bool = True
    ) -> ProcessSpan:
        """Start the span of processing a message or a batch; see ``spans.Tracing``."""
        ...

    def taken(self, messages: Sequence[ReceivedMessage], group: str, started_ns: int) -> None:
        """Record a receive of messages that are out, which began at ``started_ns``."""

    def settled(self, settlement: Settlement) -> None:
        """Record an end, or a longer time, of messages that are out."""


class MessageTraces(Tracing, Protocol):
    """RocketMQ's message trace of a client; see ``traces.Traces``."""

    def returned(self, message: ReceivedMessage) -> None:
        """Note that a consumer has sent a message back."""

    def transaction_ended(self, end: EndTransactionHeader, address: str) -> None:
        """Trace the decision on a message at a broker."""

    def recalled(self, topic: str, message_id: str, *, success: bool) -> None:
        """Trace a recall."""

    async def write(self) -> None:
        """Write all that waits."""


def tracing(client_id: str) -> Tracing | None:
    """The spans of a client; None unless the program has set a tracer provider.

    A program that has set one has loaded OpenTelemetry's API.
    """
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    unset = trace.ProxyTracerProvider | trace.NoOpTracerProvider
    if isinstance(trace.get_tracer_provider(), unset):
        return None
    from headrace.spans import Tracing

    return Tracing(client_id)


async def ended(span: SendSpan | None, sending: Awaitable[SendResult]) -> SendResult:
    """The result of ``sending``; its outcome ends the span."""
    if span is None:
        return await sending
    try:
        result = await sending
    except BaseException as error:
        span.end(error)
        raise
    span.end(result)
    return result
