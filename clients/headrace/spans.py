"""OpenTelemetry spans of sends, receives and processing: one for each request or batch.

Names and attributes are those of the semantic conventions for messaging. The context of a send
travels in the properties ``traceparent`` and ``tracestate`` of its messages (W3C Trace Context),
as with OpenTelemetry's instrumentation of the Java client.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.trace import Link, Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from headrace.received import MessageBatch, ReceivedMessage
from headrace_protocol import __version__
from headrace_protocol.errors import CorruptRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from opentelemetry.context import Context

    from headrace.messages import SendResult
    from headrace.producer.block import Block
    from headrace.settlement import Settlement
    from headrace_protocol.bodies import MessageQueue

Received = ReceivedMessage | MessageBatch

# A tracer keeps no more by default.
_LINKS_MAX = 128
_PARENT = re.compile(rb"(?:^|\x02)traceparent\x01([^\x02]*)")
_STATE = re.compile(rb"(?:^|\x02)tracestate\x01([^\x02]*)")
_PROPAGATOR = TraceContextTextMapPropagator()


class Tracing:
    """Starts the spans of one client."""

    def __init__(self, client_id: str, parent: Context | None = None) -> None:
        """parent: of the sends; None for what is current at each."""
        self._tracer = trace.get_tracer("headrace", __version__)
        self._client_id = client_id
        self._parent = parent

    def of_block(self) -> Tracing:
        """The same for a block of the program: its sends are children of the span around it."""
        return Tracing(self._client_id, contexts.get_current())

    def send(self, block: Block) -> SendSpan:
        """Start the span of a request; its messages carry the span's context."""
        attributes = self._attributes("send", block.topic, len(block))
        if len(block) == 1:
            attributes["messaging.message.body.size"] = block.sizes[0]
        name = f"send {block.topic}"
        span = self._tracer.start_span(name, self._parent, SpanKind.PRODUCER, attributes)
        sent = SendSpan(span)
        sent.add_to(block)
        return sent

    def taken(self, messages: Sequence[ReceivedMessage], group: str, started_ns: int) -> None:
        """Record a receive of messages that are out, which began at ``started_ns``."""
        for span in self._of_topics("receive", "receive", messages, group, started_ns):
            span.end()

    def settled(self, settlement: Settlement) -> None:
        """Record an end, or a longer time, of messages that are out."""
        how, messages, group, started_ns, error = settlement
        for span in self._of_topics(how, "settle", messages, group, started_ns):
            if error is not None:
                _fail(span, error)
            span.end()

    def _of_topics(
        self,
        name: str,
        kind: str,
        messages: Sequence[ReceivedMessage],
        group: str,
        started_ns: int,
    ) -> Iterator[Span]:
        """A span for the messages of each topic, with links to their sends."""
        topics: dict[str, list[ReceivedMessage]] = {}
        for message in messages:
            topics.setdefault(message.topic, []).append(message)
        for topic, those in topics.items():
            attributes = self._attributes(name, topic, len(those), kind)
            attributes["messaging.consumer.group.name"] = group
            yield self._tracer.start_span(
                f"{name} {topic}",
                kind=SpanKind.CLIENT,
                attributes=attributes,
                links=_links(message.stored.raw_properties for message in those),
                start_time=started_ns,
            )

    def received(self, batch: MessageBatch, group: str | None, started_ns: int) -> None:
        """Record a receive that began at ``started_ns``."""
        attributes = self._attributes("receive", batch.queue.topic, len(batch))
        _add_queue(attributes, batch.queue, group)
        self._tracer.start_span(
            f"receive {batch.queue.topic}",
            kind=SpanKind.CLIENT,
            attributes=attributes,
            links=_links_of(batch),
            start_time=started_ns,
        ).end()

    def process(self, what: Received, group: str, *, is_current: bool = True) -> ProcessSpan:
        """Start the span of processing a message or a batch.

        A message's span is a child of its send; a batch's has links to the sends. is_current:
        whether it becomes the current span; not if many messages are processed at once.
        """
        parent, links, topic, count, message_id = None, None, what.queue.topic, 1, ""
        if isinstance(what, MessageBatch):
            links, count = _links_of(what), len(what)
        else:
            # Reading a damaged message raises an error where its handler can catch it.
            with suppress(CorruptRecord):
                parent = _PROPAGATOR.extract(what.stored.properties)
                topic, message_id = what.topic, what.message_id
        attributes = self._attributes("process", topic, count)
        _add_queue(attributes, what.queue, group)
        if message_id:
            attributes["messaging.message.id"] = message_id
        name = f"process {topic}"
        span = self._tracer.start_span(name, parent, SpanKind.CONSUMER, attributes, links)
        return ProcessSpan(span, is_current=is_current)

    def _attributes(self, name: str, topic: str, count: int, kind: str = "") -> dict[str, Any]:
        """kind: of operation, if it is not its name."""
        attributes: dict[str, Any] = {
            "messaging.system": "rocketmq",
            "messaging.operation.name": name,
            "messaging.operation.type": kind or name,
            "messaging.destination.name": topic,
            "messaging.client.id": self._client_id,
        }
        if count > 1:
            attributes["messaging.batch.message_count"] = count
        return attributes


class SendSpan:
    """The span of a request that sends, with its retries."""

    __slots__ = ("_properties", "_span")

    def __init__(self, span: Span) -> None:
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, trace.set_span_in_context(span))
        self._span = span
        self._properties = "".join(f"{k}\x01{v}\x02" for k, v in carrier.items()).encode()

    def add_to(self, block: Block) -> None:
        """Give the span's context to the messages that have none."""
        block.add_properties(self._properties, unless=_PARENT)

    def end(self, outcome: SendResult | BaseException | None) -> None:
        """End the span with the outcome of the last attempt; None if there is none."""
        if isinstance(outcome, BaseException):
            _fail(self._span, outcome)
        elif outcome is not None:
            self._span.set_attribute(
                "messaging.destination.partition.id", _queue_text(outcome.queue)
            )
            if len(outcome.message_ids) == 1:
                self._span.set_attribute("messaging.message.id", outcome.message_id)
        self._span.end()


class ProcessSpan:
    """The span of a message or batch at hand, maybe the current span until ``end``."""

    __slots__ = ("_before", "_span")

    def __init__(self, span: Span, *, is_current: bool) -> None:
        self._span = span
        self._before = contexts.get_current()
        if is_current:
            contexts.attach(trace.set_span_in_context(span))

    def end(self) -> None:
        """End the span; it may have been replaced as the current one, or be another task's."""
        if trace.get_current_span() is self._span:
            contexts.attach(self._before)
        self._span.end()


def _add_queue(attributes: dict[str, Any], queue: MessageQueue, group: str | None) -> None:
    attributes["messaging.destination.partition.id"] = _queue_text(queue)
    if group:
        attributes["messaging.consumer.group.name"] = group


def _queue_text(queue: MessageQueue) -> str:
    return f"{queue.broker_name}/{queue.queue_id}"


def _fail(span: Span, error: BaseException) -> None:
    span.set_attribute("error.type", type(error).__name__)
    span.set_status(StatusCode.ERROR, str(error))


def _links_of(batch: MessageBatch) -> list[Link]:
    """Links to the sends of a batch."""
    shared = batch.columns.shared_properties()
    return _links(batch.columns.properties() if shared is None else [shared])


def _links(properties: Iterable[bytes]) -> list[Link]:
    """Links to the sends of messages, which usually share few."""
    found: dict[bytes, bytes] = {}
    for raw in properties:
        parent = _PARENT.search(raw)
        if parent and parent[1] not in found:
            state = _STATE.search(raw)
            found[parent[1]] = state[1] if state else b""
            if len(found) == _LINKS_MAX:
                break
    spans = (_remote_span(parent, state) for parent, state in found.items())
    return [Link(span.get_span_context()) for span in spans]


def _remote_span(parent: bytes, state: bytes) -> Span:
    # Anyone may have written them.
    carrier = {"traceparent": parent.decode("latin-1"), "tracestate": state.decode("latin-1")}
    return trace.get_current_span(_PROPAGATOR.extract(carrier, contexts.Context()))
