"""OpenTelemetry spans of the clients, as the SDK exports them."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any

import anyio
import pytest
import trio
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import headrace
from headrace import Message, PoppedMessage, Producer, PullConsumer, SimpleConsumer, blocking
from headrace.config import NAMESERVER_VARIABLE
from headrace.embedded import Embedded
from headrace.errors import BrokerError, HeadraceError
from headrace.messages import PROPERTIES_BYTES_MAX
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.serving import Reply
from tests.support.fixtures import in_memory
from tests.support.member import Apache, Member
from tests.support.popping import ACK, POP, consuming, popped
from tests.support.scripted import Scripted, close, scripted_cluster

COUNT = 1000


class Spans:
    """The spans that the clients have ended."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def around(self, name: str) -> AbstractContextManager[Any]:
        """A span of the program's own, current in the block."""
        return self.provider.get_tracer("test").start_as_current_span(name)

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Spans:
    spans = Spans()
    # A program may set it only once.
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", spans.provider)
    return spans


mq = pytest.fixture(in_memory)


def attributes(span: ReadableSpan) -> dict[str, Any]:
    assert span.attributes is not None
    return {
        name.removeprefix("messaging."): value
        for name, value in span.attributes.items()
        if name != "messaging.client.id"
    }


def trace_id(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.trace_id


def parent_id(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent else None


def span_id(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.span_id


async def test_a_message_is_traced_from_its_sender_to_its_handler(
    mq: Embedded, spans: Spans
) -> None:
    async with mq.producer() as producer:
        with spans.around("checkout"):
            result = await producer.send(Message("orders", b"coffee"))
    async with mq.consumer("baristas", "orders") as consumer:
        async for message in consumer:
            with spans.around("brew"):
                assert message.properties["traceparent"]
            break
        assert not trace.get_current_span().get_span_context().is_valid
    send, process = spans.one("send orders"), spans.one("process orders")
    place = f"{result.queue.broker_name}/{result.queue.queue_id}"
    assert parent_id(send) == span_id(spans.one("checkout"))
    assert parent_id(process) == span_id(send)
    assert parent_id(spans.one("brew")) == span_id(process)
    assert (send.kind, process.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert attributes(send) == {
        "system": "rocketmq",
        "operation.name": "send",
        "operation.type": "send",
        "destination.name": "orders",
        "destination.partition.id": place,
        "message.body.size": 6,
        "message.id": result.message_id,
    }
    assert attributes(process) == {
        "system": "rocketmq",
        "operation.name": "process",
        "operation.type": "process",
        "destination.name": "orders",
        "destination.partition.id": place,
        "consumer.group.name": "baristas",
        "message.id": result.message_id,
    }


async def send_by_pipeline(producer: Producer) -> None:
    async with producer.pipeline() as pipeline:
        await pipeline.send_all(Message("orders", b"%d" % n) for n in range(COUNT))


async def send_at_once(producer: Producer) -> None:
    await producer.send_many((b"%d" % n for n in range(COUNT)), topic="orders")


@pytest.mark.parametrize("send", [send_by_pipeline, send_at_once])
async def test_a_request_of_many_messages_is_one_span(
    mq: Embedded, spans: Spans, send: Any
) -> None:
    async with mq.producer() as producer:
        with spans.around("import"):
            await send(producer)
    sent = spans.named("send orders")
    counts = [attributes(span).get("batch.message_count", 1) for span in sent]
    assert sum(counts) == COUNT
    assert len(counts) < COUNT / 10
    assert {parent_id(span) for span in sent} == {span_id(spans.one("import"))}
    linked = set()
    async with mq.consumer("baristas", "orders") as consumer:
        received = 0
        async for batch in consumer.batches():
            received += len(batch)
            if received == COUNT:
                break
    for span in spans.named("process orders"):
        assert span.parent is None
        linked |= {link.context.span_id for link in span.links}
    assert linked == {span_id(span) for span in sent}


async def test_a_batch_received_by_hand_is_a_span_of_its_own(mq: Embedded, spans: Spans) -> None:
    async with mq.producer() as producer:
        await producer.send_many([b"1", b"2"], topic="orders")
    async with PullConsumer(nameserver=mq.nameserver, connect=mq.connect) as consumer:
        await consumer.assign(await consumer.queues("orders"))
        with spans.around("audit"):
            while not spans.named("receive orders"):
                await consumer.receive_many(timeout_ms=1000)
    receive = spans.named("receive orders")[0]
    assert receive.kind is SpanKind.CLIENT
    assert parent_id(receive) == span_id(spans.one("audit"))
    sends = {span_id(span) for span in spans.named("send orders")}
    assert sends >= {link.context.span_id for link in receive.links} != set()


async def test_a_transaction_is_traced_and_its_message_too(mq: Embedded, spans: Spans) -> None:
    async with mq.producer() as producer, producer.transaction("orders") as transaction:
        await transaction.send(Message("orders", b"7"))
    async with mq.consumer("baristas", "orders") as consumer:
        async for _ in consumer:
            break
    assert parent_id(spans.one("process orders")) == span_id(spans.one("send orders"))


async def test_a_message_sent_on_belongs_to_its_handlers_trace(mq: Embedded, spans: Spans) -> None:
    async with mq.producer() as producer:
        await producer.send(Message("orders", b"7", properties={"shop": "3"}))
        async with mq.consumer("baristas", "orders") as consumer:
            async for message in consumer:
                copy = message.copy_to("bills")
                assert copy.properties == {"shop": "3"}
                await producer.send(copy)
                break
    assert parent_id(spans.one("send bills")) == span_id(spans.one("process orders"))


async def test_a_context_that_the_program_has_set_is_kept(mq: Embedded, spans: Spans) -> None:
    own = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with mq.producer() as producer:
        await producer.send(Message("orders", b"1", properties={"traceparent": own}))
    async with mq.consumer("baristas", "orders") as consumer:
        async for message in consumer:
            assert message.properties == {"traceparent": own}
            break
    assert parent_id(spans.one("process orders")) == 0xB7AD6B7169203331


async def test_a_message_without_room_goes_without_its_context(mq: Embedded, spans: Spans) -> None:
    name = "n" * (PROPERTIES_BYTES_MAX - 100)
    async with mq.producer() as producer:
        await producer.send(Message("orders", b"1", properties={name: "12345678"}))
    async with mq.consumer("baristas", "orders") as consumer:
        async for message in consumer:
            assert message.properties == {name: "12345678"}
            break
    assert len(spans.named("process orders")) == 1


async def send_one(producer: Producer, way: str) -> None:
    if way == "send":
        await producer.send(Message("orders", b"1"))
    elif way == "send_many":
        await producer.send_many([b"1"], topic="orders")
    else:
        async with producer.pipeline() as pipeline:
            await pipeline.send(Message("orders", b"1"))


@pytest.mark.parametrize("way", ["send", "send_many", "pipeline"])
async def test_a_failed_send_is_an_error(way: str, spans: Spans) -> None:
    async with scripted_cluster() as (nameserver, (broker,), network):
        broker.answer_sends(Reply(code=ResponseCode.MESSAGE_ILLEGAL))
        async with Producer(nameserver=nameserver.address, connect=network.connect) as producer:
            with pytest.raises(HeadraceError):
                await send_one(producer, way)
    span = spans.one("send orders")
    assert span.status.status_code is StatusCode.ERROR
    assert attributes(span)["error.type"] == "BrokerError"


@pytest.mark.parametrize("way", ["send", "send_many", "pipeline"])
async def test_retries_belong_to_one_span_and_keep_its_context(
    way: str, spans: Spans, autojump_clock: object
) -> None:
    async with scripted_cluster() as (nameserver, (broker,), network):
        answer = broker.answers[RequestCode.SEND_MESSAGE_V2][0]
        broker.answer_sends(close, Reply(code=ResponseCode.SYSTEM_BUSY), answer)
        async with Producer(nameserver=nameserver.address, connect=network.connect) as producer:
            await send_one(producer, way)
    span = spans.one("send orders")
    assert span.status.status_code is StatusCode.UNSET
    assert len(contexts_of(broker)) == 3
    (context,) = set(contexts_of(broker))
    assert context.startswith(f"00-{trace_id(span):032x}-{span_id(span):016x}-")


def contexts_of(broker: Scripted) -> list[str]:
    """The traceparent of each single send."""
    texts = [dict(p.split("\x01") for p in s.ext["i"].split("\x02") if p) for s in broker.sends]
    return [text["traceparent"] for text in texts]


async def test_what_a_pipeline_abandons_is_traced(spans: Spans, autojump_clock: object) -> None:
    async with scripted_cluster() as (nameserver, (broker,), network):
        broker.answer_sends(None)
        async with Producer(nameserver=nameserver.address, connect=network.connect) as producer:
            with trio.move_on_after(1):
                async with producer.pipeline() as pipeline:
                    await pipeline.send(Message("orders", b"1"))
                    await trio.sleep_forever()
    assert attributes(spans.one("send orders"))["error.type"] == "OutcomeUnknown"


async def test_a_damaged_message_is_an_error_of_its_handler_only(spans: Spans) -> None:
    async with Member(Apache()) as member, member.consumer:
        assert await member.take(10) == list(range(10))
    assert len(spans.named("process T")) == 10


async def test_messages_that_are_taken_out_are_processed_until_they_are_settled(
    mq: Embedded, spans: Spans
) -> None:
    async with mq.producer() as producer:
        for body in (b"1", b"2", b"3", b"4"):
            await producer.send(Message("orders", body))
    async with SimpleConsumer(
        "baristas", "orders", nameserver=mq.nameserver, connect=mq.connect
    ) as consumer:
        found: list[PoppedMessage] = []
        with spans.around("shift"):
            while len(found) < 4:
                found += await consumer.receive(wait=5)
            assert not spans.named("process orders")
            await found[0].extend(60)
            assert not spans.named("process orders")
            await consumer.ack(found[:2])
            assert len(spans.named("process orders")) == 2
            await found[2].retry(after=60)
            await found[3].reject()
    processed = spans.named("process orders")
    sends = {span_id(span) for span in spans.named("send orders")}
    assert {parent_id(span) for span in processed} == sends
    assert {attributes(span)["message.id"] for span in processed} == {
        message.message_id for message in found
    }
    counts = [
        attributes(span).get("batch.message_count", 1) for span in spans.named("receive orders")
    ]
    assert sum(counts) == 4
    ack = spans.one("ack orders")
    assert attributes(ack) == {
        "system": "rocketmq",
        "operation.name": "ack",
        "operation.type": "settle",
        "destination.name": "orders",
        "consumer.group.name": "baristas",
        "batch.message_count": 2,
    }
    assert len(ack.links) == 2
    for name in ("receive", "ack", "extend", "retry", "reject"):
        for span in spans.named(f"{name} orders"):
            assert span.kind is SpanKind.CLIENT
            assert parent_id(span) == span_id(spans.one("shift"))


async def test_a_message_that_the_program_forgets_is_processed(mq: Embedded, spans: Spans) -> None:
    async with mq.producer() as producer:
        await producer.send(Message("orders", b"1"))
    at: Any = {"nameserver": mq.nameserver, "connect": mq.connect}
    async with SimpleConsumer("baristas", "orders", **at) as consumer:
        messages = await consumer.receive(wait=5)
        assert await consumer.receive(wait=0) == []
        assert len(spans.named("receive orders")) == 1
        messages.clear()
        assert spans.one("process orders")


async def test_an_ack_that_fails_is_an_error(autojump_clock: object, spans: Spans) -> None:
    async with consuming() as (consumer, [broker], _):
        broker.answer(POP, popped(0))
        broker.answer(ACK, Reply(code=ResponseCode.NO_MESSAGE))
        (message,) = await consumer.receive()
        with pytest.raises(BrokerError):
            await message.ack()
        assert not spans.named("process T")
    span = spans.one("ack T")
    assert span.status.status_code is StatusCode.ERROR
    assert attributes(span)["error.type"] == "BrokerError"


def test_the_same_in_blocking_code(spans: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    with headrace.embedded() as mq:
        monkeypatch.setenv(NAMESERVER_VARIABLE, mq.nameserver)
        with blocking.Producer() as producer, spans.around("checkout"):
            producer.send(Message("orders", b"1"))
            producer.send(Message("orders", b"2"))
        with blocking.Consumer("baristas", "orders") as consumer:
            for _ in consumer:
                with spans.around("brew"):
                    pass
                break
            assert not trace.get_current_span().get_span_context().is_valid
            assert next(consumer.batches())
        with blocking.Consumer("auditors", "orders") as consumer:
            assert consumer.receive(timeout_ms=5000)
    checkout = spans.one("checkout")
    assert [parent_id(span) for span in spans.named("send orders")] == [span_id(checkout)] * 2
    process = spans.named("process orders")[0]
    assert parent_id(spans.one("brew")) == span_id(process)
    assert trace_id(process) == trace_id(checkout)
    assert spans.named("receive orders")


def test_the_same_under_asyncio(spans: Spans) -> None:
    with headrace.embedded() as mq:

        async def main() -> None:
            async with Producer(nameserver=mq.nameserver) as producer:
                await producer.send(Message("orders", b"1"))
            async with headrace.Consumer("g", "orders", nameserver=mq.nameserver) as consumer:
                async for _ in consumer:
                    break

        anyio.run(main, backend="asyncio")
    assert parent_id(spans.one("process orders")) == span_id(spans.one("send orders"))


async def test_without_a_provider_nothing_is_traced_or_loaded(
    mq: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "headrace.spans", raising=False)
    async with mq.producer() as producer:
        await producer.send(Message("orders", b"1"))
    async with mq.consumer("baristas", "orders") as consumer:
        async for message in consumer:
            assert message.properties == {}
            break
    assert "headrace.spans" not in sys.modules
