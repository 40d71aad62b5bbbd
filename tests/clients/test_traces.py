"""RocketMQ's message trace of our clients: what they write, and what they leave out."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
import trio
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import headrace
from headrace import Admin, Consumer, Message, SimpleConsumer, blocking
from headrace.config import ConnectOptions, resolve_trace
from headrace.embedded import Embedded
from headrace.errors import ConfigurationError, HeadraceError, RecallRejected
from headrace.traces import PENDING_BYTES_MAX, Traces
from headrace_daemon.network import TcpNetwork
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.compression import COMPRESSED, decompress
from headrace_protocol.serving import Reply
from headrace_protocol.system_topics import TRACE_TOPIC
from headrace_protocol.trace_records import (
    Code,
    EndTransaction,
    Kind,
    Pub,
    Recall,
    SubAfter,
    SubBefore,
    TraceRecord,
    decode_trace,
    encode_trace,
)
from tests.support.cli import fail, succeed
from tests.support.fixtures import in_memory
from tests.support.scripted import Scripted, open_instance, producing, scripted_cluster
from tests.support.verbs import produce
from tests.support.wire import ask, send_header

mq = pytest.fixture(in_memory)


@pytest.fixture
async def admin(mq: Embedded) -> Any:
    async with mq.admin() as admin:
        await admin.create_topic("T", queues=1)
        await admin.create_topic(TRACE_TOPIC, queues=1)
        yield admin


async def traced(admin: Admin, key: str, topic: str = TRACE_TOPIC) -> list[TraceRecord]:
    """The records about a message, by its id or key."""
    found = await admin.query_by_key(topic, key)
    records = [each for message in found for each in decode_trace(message.body.decode())]
    return [each for each in records if key in each]


async def test_a_send_and_its_delivery(mq: Embedded, admin: Admin) -> None:
    async with mq.producer(group="p", trace=True) as producer:
        sent = await producer.send(Message("T", b"body", key="k1 k2", tag="a"))
    (pub,) = await traced(admin, sent.message_id)
    assert isinstance(pub, Pub)
    assert pub == Pub(
        pub.time_ms,
        "p",
        "T",
        sent.message_id,
        "a",
        "k1 k2",
        pub.store_host,
        4,
        pub.cost_ms,
        Kind.NORMAL,
        sent.offset_message_id,
    )
    assert ":" in pub.store_host
    assert await admin.query_by_key(TRACE_TOPIC, "k2"), "it is found by each key, too"

    async with mq.consumer("g", "T", start="earliest", trace=True) as consumer:
        async for message in consumer:
            assert message.message_id == sent.message_id
            break
    _, before, after = await traced(admin, sent.message_id)
    assert isinstance(before, SubBefore)
    assert isinstance(after, SubAfter)
    assert (before.group, before.retries, before.keys) == ("g", 0, "k1 k2")
    assert (after.group, after.success, after.code) == ("g", True, Code.SUCCESS)
    assert after.request_id == before.request_id


async def test_a_message_that_is_sent_back_has_failed(mq: Embedded, admin: Admin) -> None:
    await produce(mq, 2, topic="B", queues=1)
    async with mq.consumer("g", "B", start="earliest", trace=True) as consumer:
        async for batch in consumer.batches():
            first, second = batch
            await first.retry(after=1)
            break
    outcomes = {
        after.message_id: (after.success, after.code)
        for message_id in (first.message_id, second.message_id)
        for after in await traced(admin, message_id)
        if isinstance(after, SubAfter)
    }
    assert outcomes == {
        first.message_id: (False, Code.FAILED),
        second.message_id: (True, Code.SUCCESS),
    }


async def test_messages_that_are_taken_out(mq: Embedded, admin: Admin) -> None:
    await produce(mq, 2, topic="B", queues=1)
    at: Any = {"nameserver": mq.nameserver, "connect": mq.connect}
    async with SimpleConsumer("g", "B", trace=True, **at) as consumer:
        first, second = await consumer.receive(wait=5)
        await first.ack()
        await second.retry(after=60)
    outcomes = {
        after.message_id: (after.group, after.success)
        for message in (first, second)
        for after in await traced(admin, message.message_id)
        if isinstance(after, SubAfter)
    }
    assert outcomes == {first.message_id: ("g", True), second.message_id: ("g", False)}


async def test_received_batches_have_no_end(mq: Embedded, admin: Admin) -> None:
    await produce(mq, 1, topic="B", queues=1)
    async with mq.consumer("g", "B", start="earliest", trace=True) as consumer:
        batch = await consumer.receive()
    assert batch
    (before,) = await traced(admin, batch[0].message_id)
    assert isinstance(before, SubBefore)


@pytest.mark.parametrize("way", ["many", "pipeline", "oneway"])
async def test_all_ways_of_sending(mq: Embedded, admin: Admin, way: str) -> None:
    messages = [Message("T", b"%d" % number, key=f"key{number}") for number in range(3)]
    async with mq.producer(trace=True) as producer:
        if way == "many":
            await producer.send_many(messages)
        elif way == "pipeline":
            async with producer.pipeline() as pipeline:
                for message in messages:
                    await pipeline.send(message)
        else:
            for message in messages:
                await producer.send_oneway(message)
    ids = []
    for number in range(3):
        (pub,) = await traced(admin, f"key{number}")
        assert isinstance(pub, Pub)
        assert pub.success
        ids.append(pub.message_id)
        assert (pub.offset_message_id == "") == (way == "oneway")
    with trio.fail_after(10):
        while not (stored := await admin.query_by_key("T", "key0")):
            """A one-way send has no answer."""
    assert stored[0].message_id == ids[0]


async def test_transactions_timers_and_recalls(mq: Embedded, admin: Admin) -> None:
    async with mq.producer(group="p", trace=True) as producer:
        async with producer.transaction("T") as transaction:
            half = await transaction.send(Message("T", b"half"))
        with suppress(KeyError):
            async with producer.transaction("T") as transaction:
                other = await transaction.send(Message("T", b"other"))
                raise KeyError
        timer = await producer.send(Message("T", b"later", delay=60))
        await producer.recall(timer)
        with pytest.raises(RecallRejected):
            await producer.recall(timer)
    pub, end = await traced(admin, half.message_id)
    assert isinstance(pub, Pub)
    assert isinstance(end, EndTransaction)
    assert (pub.kind, end.state, end.is_check) == (Kind.HALF, "COMMIT_MESSAGE", False)
    assert (end.group, end.topic, end.store_host) == ("p", "T", pub.store_host)
    _, end = await traced(admin, other.message_id)
    assert isinstance(end, EndTransaction)
    assert end.state == "ROLLBACK_MESSAGE"
    pub, *recalls = await traced(admin, timer.message_id)
    assert isinstance(pub, Pub)
    assert pub.kind == Kind.DELAYED
    assert [each.success for each in recalls if isinstance(each, Recall)] == [True, False]


async def test_another_topic_and_the_trace_of_the_trace(mq: Embedded, admin: Admin) -> None:
    await admin.create_topic("mine", queues=1)
    async with mq.producer(trace_topic="mine") as producer:
        sent = await producer.send(Message("T", b"body"))
        own = await producer.send(Message("mine", b"not traced"))
    assert len(await traced(admin, sent.message_id, "mine")) == 1
    assert await traced(admin, own.message_id, "mine") == []
    async with mq.consumer("g", "mine", start="earliest", trace_topic="mine") as consumer:
        async for _ in consumer:
            break
    assert await traced(admin, sent.message_id) == []
    assert len(await admin.query_by_key("mine", sent.message_id)) == 1


def records(broker: Scripted, topic: str = TRACE_TOPIC) -> list[TraceRecord]:
    return [each for body in bodies(broker, topic) for each in decode_trace(body.decode())]


def bodies(broker: Scripted, topic: str = TRACE_TOPIC) -> list[bytes]:
    sends = [asked for asked in broker.sends if asked.ext.get("b") == topic]
    return [decompress(asked.body, int(asked.ext["f"])) for asked in sends]


async def test_a_failed_send_is_traced(autojump_clock: object) -> None:
    async with producing(trace=True, delivery_timeout_ms=0) as (producer, _, (broker,)):
        broker.answer(RequestCode.SEND_MESSAGE_V2, Reply(code=ResponseCode.MESSAGE_ILLEGAL))
        with pytest.raises(HeadraceError):
            await producer.send(Message("T", b"body", key="k"))
        broker.answer(RequestCode.SEND_MESSAGE_V2, Reply(code=ResponseCode.SUCCESS))
        await trio.sleep(2)
        (pub,) = records(broker)
    assert isinstance(pub, Pub)
    assert (pub.success, pub.keys, len(pub.message_id)) == (False, "k", 32)


@contextlib.asynccontextmanager
async def scripted_traces() -> AsyncIterator[tuple[Traces, Scripted, Scripted]]:
    async with (
        scripted_cluster() as (nameserver, (broker,), network),
        open_instance(nameserver.address, network) as instance,
    ):
        yield Traces(instance, TRACE_TOPIC), nameserver, broker


async def test_what_cannot_be_written_is_counted_and_logged(
    autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with scripted_traces() as (traces, nameserver, _):
            missing = Reply(code=ResponseCode.TOPIC_NOT_EXIST)
            nameserver.answer(RequestCode.GET_ROUTEINFO_BY_TOPIC, missing)
            await traces.write()
            for number in range(3):
                traces.put(Recall(1, "g", "T", f"id{number}"), f"id{number}")
                await traces.write()
    assert traces.dropped == 3
    assert caplog.text.count("dropped 1 trace records: ") >= 1
    assert TRACE_TOPIC in caplog.text


@pytest.mark.parametrize("keys", ["\u9375" * 20_000, "a\x01b\x02c", "\u9375 " * 12_000])
async def test_no_key_stops_a_trace(autojump_clock: object, keys: str) -> None:
    async with scripted_traces() as (traces, _, broker):
        for number in range(3):
            traces.put(Recall(1, "g", "T", f"id{number}"), f"id{number}", keys)
        await traces.write()
    assert (len(records(broker)), traces.dropped) == (3, 0)


async def test_memory_is_bounded_by_bytes_of_records_and_keys(autojump_clock: object) -> None:
    async with scripted_traces() as (traces, *_):
        for _ in range(150):
            traces.put(Recall(1, "g", "T", "\u9375" * 5000), "\u9375" * 5000)
        await traces.write()
    assert 8 <= 150 - PENDING_BYTES_MAX // 30_000 <= traces.dropped <= 15


async def test_a_property_that_ends_like_a_delay_is_none(autojump_clock: object) -> None:
    async with producing(trace=True) as (producer, _, (broker,)):
        broker.answer(RequestCode.SEND_MESSAGE_V2, Reply(code=ResponseCode.SUCCESS))
        properties = {"MY_DELAY": "1", "USER_TRAN_MSG": "true"}
        with pytest.raises(HeadraceError):
            await producer.send(Message("T", b"body", properties=properties))
        await trio.sleep(2)
        (pub,) = records(broker)
    assert isinstance(pub, Pub)
    assert pub.kind == Kind.NORMAL


async def test_memory_is_bounded(autojump_clock: object, caplog: pytest.LogCaptureFixture) -> None:
    big = Recall(1, "g", "T", "x" * 30_000)
    count = PENDING_BYTES_MAX // 30_000 + 10
    with caplog.at_level(logging.WARNING):
        async with scripted_traces() as (traces, _, broker):
            for number in range(count):
                traces.put(big, f"id{number}")
            await traces.write()
    assert len(records(broker)) == count - traces.dropped
    assert 9 <= traces.dropped <= 11
    assert f"more than {PENDING_BYTES_MAX} bytes" in caplog.text
    assert 100_000 < max(map(len, bodies(broker))) <= 128_000


@pytest.mark.parametrize(
    ("options", "variable", "topic"),
    [
        ({}, "", None),
        ({}, "1", TRACE_TOPIC),
        ({"trace": False}, "1", None),
        ({"trace": True}, "", TRACE_TOPIC),
        ({"trace_topic": "mine"}, "", "mine"),
        ({"trace_topic": "mine"}, "1", "mine"),
    ],
)
def test_where_a_trace_goes(
    monkeypatch: pytest.MonkeyPatch, options: ConnectOptions, variable: str, topic: str | None
) -> None:
    monkeypatch.setenv("HEADRACE_TRACE", variable)
    assert resolve_trace(options) == topic


def test_settings_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="leave out one"):
        Consumer("g", "T", trace=False, trace_topic="mine")
    with pytest.raises(ConfigurationError, match="trace_topic: 'no topic!' is not a valid topic"):
        Consumer("g", "T", trace_topic="no topic!")
    with pytest.raises(ConfigurationError, match="trace='no' is str"):
        Consumer("g", "T", trace="no")  # type: ignore[arg-type]
    monkeypatch.setenv("HEADRACE_TRACE", "maybe")
    with pytest.raises(ConfigurationError, match="HEADRACE_TRACE=maybe: expected 1 or 0"):
        Consumer("g", "T")


async def test_without_a_trace_nothing_is_loaded(mq: Embedded, admin: Admin) -> None:
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.delitem(sys.modules, "headrace.traces", raising=False)
    try:
        async with mq.producer() as producer:
            await producer.send(Message("T", b"body"))
            assert "headrace.traces" not in sys.modules
    finally:
        monkeypatch.undo()


async def test_spans_of_opentelemetry_go_along(
    mq: Embedded, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    # A program may set it only once.
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    async with mq.producer(trace=True) as producer:
        sent = await producer.send(Message("T", b"body"))
        async with producer.pipeline() as pipeline:
            await pipeline.send(Message("T", b"body", key="k"))
    async with mq.consumer("g", "T", start="earliest", trace=True) as consumer:
        async for _ in consumer:
            break
        assert await consumer.receive()
    names = {span.name for span in exporter.get_finished_spans()}
    assert names == {"send T", "process T", "receive T"}
    kinds = [type(each) for each in await traced(admin, sent.message_id)]
    assert kinds == [Pub, SubBefore, SubAfter]
    (stored,) = await admin.query_by_id(sent.message_id, "T")
    assert "traceparent" in stored.properties


@pytest.mark.slow
def test_blocking_clients_are_traced() -> None:
    with headrace.embedded() as mq:
        at: dict[str, Any] = {"nameserver": mq.nameserver}
        with blocking.Admin(**at) as admin:
            admin.create_topic("T", queues=1)
            admin.create_topic(TRACE_TOPIC, queues=1)
            with blocking.Producer(**at, trace=True) as producer:
                sent = producer.send(Message("T", b"body"))
            with blocking.Consumer("g", "T", start="earliest", trace=True, **at) as consumer:
                for _ in consumer:
                    break
            found = admin.query_by_key(TRACE_TOPIC, sent.message_id)
        kinds = [type(each) for m in found for each in decode_trace(m.body.decode())]
    assert kinds == [Pub, SubBefore, SubAfter]


# -- headrace message trace ------------------------------------------------------------------------


async def test_a_message_is_followed_to_its_dead_letter(mq: Embedded, admin: Admin) -> None:
    async with mq.producer(group="p", trace=True) as producer:
        sent = await producer.send(Message("T", b"body", key="k"))
        later = await producer.send(Message("T", b"later", delay=60))
        async with producer.transaction("T") as transaction:
            half = await transaction.send(Message("T", b"half"))
            (waits,) = await admin.trace(half.message_id, "T")
            assert (waits.event, waits.waits_until_ms) == ("waits", None)
    async with mq.consumer("g", "T", start="earliest", trace=True) as consumer:
        seen = 0
        async for message in consumer:
            if message.message_id == sent.message_id and not message.reconsume_times:
                await message.retry(after=1)
            elif message.message_id == sent.message_id:
                await message.reject()
            seen += 1
            if seen == 3:
                break
    events = await admin.trace(sent.message_id)
    told = [(each.event, each.group, each.retries) for each in events]
    # The broker has the dead letter while its consumer is still at it.
    assert [*told[:-2], *sorted(told[-2:])] == [
        ("sent", "p", 0),
        ("stored", "", 0),
        ("delivered", "g", 0),
        ("failed", "g", 0),
        ("delivered", "g", 1),
        ("dead letter", "g", 2),
        ("failed", "g", 1),
    ]
    assert {each.client for each in events} == {"", "127.0.0.1"}
    assert events[1].detail == "T/broker-a/0 at 0"
    events = await admin.trace(half.message_id)
    assert [each.event for each in events if each.group == "p"] == ["sent", "committed"]
    _, waits = await admin.trace(later.message_id)
    assert waits.event == "waits"
    assert waits.waits_until_ms is not None


async def test_a_message_that_waits_for_its_retry(mq: Embedded, admin: Admin) -> None:
    await produce(mq, 1, topic="B", queues=1)
    async with mq.consumer("g", "B", start="earliest", trace=True) as consumer:
        async for message in consumer:
            await message.retry(after=60)
            break
    events = await admin.trace(message.message_id, "B")
    (waits,) = [each for each in events if each.event == "waits"]
    assert (waits.group, waits.retries) == ("g", 1)
    assert waits.waits_until_ms is not None


async def test_traces_of_other_clients(mq: Embedded, admin: Admin) -> None:
    recall = Recall(1, "p", "T", "ID", success=False)
    texts = [
        encode_trace(recall),
        encode_trace(EndTransaction(2, "p", "T", "ID", state="UNKNOW", is_check=True)),
        encode_trace(SubAfter("r", "ID", 3, success=False, code=Code.TIMEOUT)),
        encode_trace(SubAfter("r", "ID", 3, success=False, code=9)),
        encode_trace(Pub(5, "p", "missing", "ID", success=False)),
    ]
    async with mq.producer() as producer:
        await producer.send(Message(TRACE_TOPIC, "".join(texts).encode(), key="ID"))
        await producer.send(Message(TRACE_TOPIC, b"\xff\x01\x02", key="ID"))
    events = await admin.trace("ID")
    assert [(each.time_ms, each.event, each.detail) for each in events] == [
        (0, "failed", "after 3 ms, timeout"),
        (0, "failed", "after 3 ms, 9"),
        (1, "recall rejected", ""),
        (2, "undecided", "asked by the broker"),
        (5, "send failed", "0 bytes to a broker in 0 ms"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("good", "damaged", "reason"),
    [(1, 1, "ZLIB body does not decompress"), (1001, 0, "newest 1000 messages"), (1000, 0, "")],
)
def test_a_trace_that_is_read_in_part_says_so(
    monkeypatch: pytest.MonkeyPatch, good: int, damaged: int, reason: str
) -> None:
    command = "message", "trace", "ID", "--json"
    with headrace.embedded() as mq:
        monkeypatch.setenv("HEADRACE_NAMESERVER", mq.nameserver)
        with blocking.Producer(nameserver=mq.nameserver) as producer:
            body = encode_trace(Recall(1, "p", "T", "ID")).encode()
            producer.send_many([Message(TRACE_TOPIC, body, key="ID")] * good)
        header = send_header(topic=TRACE_TOPIC, sys_flag=COMPRESSED, properties="KEYS\x01ID\x02")
        for _ in range(damaged):
            code = RequestCode.SEND_MESSAGE_V2
            trio.run(ask, TcpNetwork(), mq.broker, code, header, b"no zlib")
        if reason:
            assert reason in fail(1, *command)
        partly = succeed(*command, "--allow-partial")
    *rows, last = partly.json()
    assert [row["event"] for row in rows] == ["recalled"] * (len(rows))
    assert len(rows) == min(good, 1001) - (not reason)
    assert (reason in partly.stderr, reason in (last.get("problem") or "")) == (True, True)


@pytest.mark.slow
def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    with headrace.embedded() as mq:
        monkeypatch.setenv("HEADRACE_NAMESERVER", mq.nameserver)
        use_the_command({"nameserver": mq.nameserver})


def use_the_command(at: dict[str, Any]) -> None:
    with blocking.Admin(**at) as admin:
        admin.create_topic("T", queues=1)
        assert "--topic finds" in fail(3, "message", "trace", "0" * 32)
        with blocking.Producer(**at) as producer:
            sent = producer.send(Message("T", b"body", delay=600))
        (waits,) = succeed("message", "trace", sent.message_id, "--topic", "T", "--json").json()
        assert waits["event"] == "waits"
        assert waits["waits_until"] > waits["time"]
        admin.create_topic("mine", queues=1)
        with blocking.Producer(**at, trace_topic="mine") as producer:
            sent = producer.send(Message("T", b"body"))
    rows = succeed("message", "trace", sent.message_id, "--trace-topic", "mine").rows()
    assert [row[1] for row in rows] == ["sent", "stored"]
    assert "nor the message in T" in fail(3, "message", "trace", "0" * 32, "--topic", "T")
