"""Many messages at once into a real broker: bytes, Arrow tables, cut connections."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
import trio
from anyio import BrokenResourceError
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace
from headrace import Message, Producer, blocking
from headrace.embedded import Embedded
from headrace.errors import HeadraceError, InvalidMessage
from headrace.producer.arrow import chunks_of_table
from headrace.producer.block import Block
from headrace.received import ReceivedMessage
from headrace_protocol.bodies import MessageQueue
from headrace_protocol.drivers.aio import connect_tcp


async def make_topic(mq: Embedded, topic: str, queues: int = 4) -> None:
    async with headrace.Admin(nameserver=mq.nameserver) as admin:
        await admin.create_topic(topic, queues=queues)


async def everything_in(mq: Embedded, topic: str) -> dict[MessageQueue, list[ReceivedMessage]]:
    """All messages of a topic, by queue."""
    found: dict[MessageQueue, list[ReceivedMessage]] = {}
    async with headrace.PullConsumer(nameserver=mq.nameserver) as consumer:
        for queue in await consumer.queues(topic):
            messages = found[queue] = []
            await consumer.assign([queue])
            consumer.seek(queue, 0)
            while len(messages) < await consumer.max_offset(queue):
                messages += await consumer.receive_many(timeout_ms=5000) or ()
    return found


async def test_bytes_are_stored_with_keys_and_tags(mq: Embedded) -> None:
    await make_topic(mq, "Bytes")
    bodies = [b"%d" % n for n in range(30_000)]
    keys = [f"k{n % 100}" if n % 3 else None for n in range(30_000)]
    async with Producer(nameserver=mq.nameserver) as producer:
        results = await producer.send_many(bodies, topic="Bytes", keys=keys, tags=["t"] * 30_000)
        queues = await producer.queues("Bytes")
    found = await everything_in(mq, "Bytes")
    messages = [message for messages in found.values() for message in messages]
    assert sorted(int(message.body) for message in messages) == list(range(30_000))
    assert all(message.tag == "t" for message in messages)
    assert all(message.key == (keys[int(message.body)] or "") for message in messages)
    for number, queue in enumerate(queues):
        with_key = [int(m.body) for m in found[queue] if m.key]
        assert with_key == sorted(with_key), "in the order in which they were given"
        assert all(queue_of(m.key, 4) == number for m in found[queue] if m.key)
    assert sum(result.message_count for result in results) == 30_000


def queue_of(key: str, count: int) -> int:
    return headrace.producer.selector.queue_index(key, count)


async def test_results_lead_to_each_message(mq: Embedded) -> None:
    await make_topic(mq, "Ids")
    bodies = [b"%d" % n * (n % 50 + 1) for n in range(1000)]
    async with (
        Producer(nameserver=mq.nameserver) as producer,
        headrace.Admin(nameserver=mq.nameserver) as admin,
    ):
        (result,) = await producer.send_many(bodies, topic="Ids")
        each = list(result.of_each())
        for n in (0, 1, 500, 999):
            message = await admin.message(result.message_ids[n])
            assert message is not None
            assert message.body == bodies[n]
            assert (message.queue, message.queue_offset) == (each[n].queue, each[n].queue_offset)
            assert each[n].message_id == result.message_ids[n] == message.message_id
    assert (len(each), result.message_count) == (1000, 1000)
    assert "OffsetMessageIds of 1000" in repr(result)


async def test_a_pipeline_s_results_lead_to_each_message(mq: Embedded) -> None:
    await make_topic(mq, "PipelineIds")
    outcomes = []
    async with (
        Producer(nameserver=mq.nameserver) as producer,
        headrace.Admin(nameserver=mq.nameserver) as admin,
    ):
        async with producer.pipeline(on_result=lambda *outcome: outcomes.append(outcome)) as p:
            await p.send_all(Message("PipelineIds", b"%d" % n) for n in range(1000))
        for sent, result in outcomes[::100]:
            message = await admin.message(result.offset_message_id)
            assert message is not None
            assert message.body == sent.body
            assert (message.queue, message.queue_offset) == (result.queue, result.queue_offset)


def test_asyncio_sends_the_same_way(mq: Embedded) -> None:
    async def main() -> None:
        await make_topic(mq, "Asyncio")
        async with Producer(nameserver=mq.nameserver) as producer:
            await producer.send_many([b"%d" % n for n in range(5000)], topic="Asyncio")
            async with producer.pipeline() as pipeline:
                await pipeline.send_all(Message("Asyncio", b"%d" % n) for n in range(5000, 9000))
        found = await everything_in(mq, "Asyncio")
        numbers = sorted(int(message.body) for messages in found.values() for message in messages)
        assert numbers == list(range(9000))

    asyncio.run(main())


def test_blocking_code_sends_the_same_way(mq: Embedded) -> None:
    with blocking.Producer(nameserver=mq.nameserver) as producer:
        table = pa.table({"value": [b"a", b"b"], "key": ["k", "k"]})
        (first,) = producer.send_many(table, topic="Blocking")[:1]
        (second,) = producer.send_many([b"c", b"d"], topic="Blocking", queue=first.queue)
        assert second.queue == first.queue
        with producer.pipeline() as pipeline:
            pipeline.send_all(Message("Blocking", b"%d" % n, key="k") for n in range(3000))
    with blocking.PullConsumer(nameserver=mq.nameserver) as consumer:
        consumer.assign([first.queue])
        consumer.seek(first.queue, 0)
        bodies: list[bytes] = []
        while len(bodies) < consumer.max_offset(first.queue):
            bodies += [message.body for message in consumer.receive_many() or ()]
    assert bodies[-3000:] == [b"%d" % n for n in range(3000)]


# -- Arrow -----------------------------------------------------------------------------------------


def rows(table: Any, topic: str | None = None) -> list[tuple[str, bytes, bytes]]:
    """The contents of chunks, row by row."""
    return [
        (chunk.block.topic, body, properties)
        for chunk in chunks_of_table(table, topic)
        for body, properties in zip(chunk.block.bodies, all_properties(chunk.block), strict=True)
    ]


def all_properties(block: Block) -> list[bytes]:
    raw = block.properties
    return [raw] * len(block) if isinstance(raw, bytes) else list(raw)


@pytest.mark.parametrize(
    "kind",
    [
        pa.binary(),
        pa.large_binary(),
        pa.binary_view(),
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.dictionary(pa.int32(), pa.string()),
    ],
    ids=str,
)
def test_every_kind_of_bytes_and_text_column(kind: Any) -> None:
    texts = ["a", "bc", "a", "def"]
    column = (
        pa.array(texts).cast(kind)
        if pa.types.is_dictionary(kind)
        else pa.array([text.encode() for text in texts] if "binary" in str(kind) else texts, kind)
    )
    expected = [("T", text.encode(), b"") for text in texts]
    assert rows(pa.table({"value": column}), "T") == expected
    assert rows(pa.record_batch({"value": column}), "T") == expected
    assert rows(column, "T") == expected
    assert rows(pa.chunked_array([column[:1], column[1:]]), "T") == expected


def test_bodies_of_fixed_size() -> None:
    values = [bytes([n] * 16) for n in range(100)]
    table = pa.table({"value": pa.array(values, pa.binary(16))})
    assert [body for _, body, _ in rows(table.slice(10, 50), "T")] == values[10:60]


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["T", "U"]),
            st.none() | st.text("ab", max_size=2),
            st.none() | st.text("xü", max_size=2),
            st.binary(min_size=1, max_size=3),
        ),
        min_size=1,
    ),
    st.data(),
)
def test_tables_hold_what_went_in(items: list[Any], data: Any) -> None:
    start = data.draw(st.integers(0, len(items) - 1))
    topics, keys, tags, values = zip(*items, strict=True)
    table = pa.table(
        {
            "topic": topics,
            "key": pa.array(keys, pa.string()),
            "tag": pa.array(tags, pa.string()),
            "value": values,
        }
    )
    found = rows(table.slice(start))
    assert Counter(found) == Counter(
        (topic, value, property_text("KEYS", key) + property_text("TAGS", tag))
        for topic, key, tag, value in items[start:]
    )
    for name in set(topics[start:]):
        of_it = [body for topic, body, _ in found if topic == name]
        assert of_it == [item[3] for item in items[start:] if item[0] == name]


def property_text(name: str, value: str | None) -> bytes:
    return f"{name}\x01{value}\x02".encode() if value else b""


@pytest.mark.parametrize(
    ("columns", "topic", "reason"),
    [
        ({"body": [b"x"]}, "T", "it needs value"),
        ({"value": [b"x"], "colour": ["red"]}, "T", "colour"),
        ({"value": [b"x"]}, None, "where to"),
        ({"value": [b"x"], "topic": ["T"]}, "T", "not both"),
        ({"value": [1]}, "T", "int64, not bytes or text"),
        ({"value": [b"x"], "key": [1]}, "T", "the column key holds int64"),
        ({"value": [b"x", None]}, "T", "row 1: its value is null"),
        ({"value": [b"x"] * 40_000 + [b""]}, "T", "row 40000: a body of 0 bytes"),
        ({"value": [b"x"] * 40_000 + [None]}, "T", "row 40000: its value is null"),
        ({"value": [b"x"], "topic": ["bad topic"]}, None, "not a valid topic name"),
        (
            {"value": [b"x"], "topic": pa.array([None], pa.string())},
            None,
            "row 0: its topic is null",
        ),
    ],
)
def test_bad_tables_are_refused(columns: dict[Any, Any], topic: str | None, reason: str) -> None:
    with pytest.raises(InvalidMessage, match=reason):
        rows(pa.table(columns), topic)


async def test_keys_of_a_table_have_a_column_of_their_own(mq: Embedded) -> None:
    async with Producer(nameserver=mq.nameserver) as producer:
        with pytest.raises(InvalidMessage, match="columns named key"):
            await producer.send_many(pa.table({"value": [b"x"]}), topic="T", keys=["k"])


async def test_a_table_is_stored(mq: Embedded) -> None:
    await make_topic(mq, "Table")
    table = pa.table(
        {
            "topic": pa.array(["Table"] * 20_000).dictionary_encode(),
            "key": [f"k{n % 10}" for n in range(20_000)],
            "value": [b"%d" % n for n in range(20_000)],
        }
    )
    async with Producer(nameserver=mq.nameserver) as producer:
        await producer.send_many(table)
    found = await everything_in(mq, "Table")
    for messages in found.values():
        numbers = [int(message.body) for message in messages]
        assert numbers == sorted(numbers)
        assert all(m.key == f"k{int(m.body) % 10}" for m in messages)
    assert sum(map(len, found.values())) == 20_000


# -- cut connections -------------------------------------------------------------------------------


class Cut:
    """A way to the broker that breaks now and then, in the middle of what it carries."""

    def __init__(self, every_bytes: int) -> None:
        self.every_bytes = every_bytes
        self.count = 0
        self.is_on = False

    async def connect(self, address: str) -> Any:
        stream: Any = await connect_tcp(address)
        send, left = stream.send, self.every_bytes

        async def send_or_break(data: bytes) -> None:
            nonlocal left
            if self.is_on:
                left -= len(data)
            if left < 0:
                self.count += 1
                await send(bytes(data[: len(data) // 2]))
                await stream.aclose()
                raise BrokenResourceError
            await send(data)

        stream.send = send_or_break
        return stream


@pytest.mark.slow
@pytest.mark.parametrize("keyed", [True, False])
async def test_a_pipeline_over_a_breaking_connection_loses_nothing_silently(
    mq: Embedded, keyed: bool
) -> None:
    topic = f"CutPipeline{keyed}"
    await make_topic(mq, topic)
    cut, outcomes = Cut(every_bytes=150_000), []
    # No request larger than what a connection carries gets through, so some are finally lost.
    options: dict[str, Any] = {"connect": cut.connect, "delivery_timeout_ms": 500}
    async with Producer(nameserver=mq.nameserver, **options) as producer:
        pipeline = producer.pipeline(on_result=lambda *outcome: outcomes.append(outcome))
        async with pipeline:
            for n in range(20_000):
                key = f"k{n % 20}" if keyed else ""
                await pipeline.send(Message(topic, b"%05d" % n, key=key))
                cut.is_on = n > 1000
        cut.is_on = False
    assert cut.count >= 3
    assert len(outcomes) == 20_000
    lost = {message.body for message, result in outcomes if isinstance(result, HeadraceError)}
    await check_stored(mq, topic, lost, 20_000, keyed=keyed)


@pytest.mark.slow
async def test_a_batch_over_a_breaking_connection_is_stored(mq: Embedded) -> None:
    await make_topic(mq, "CutMany")
    cut = Cut(every_bytes=2_000_000)
    async with Producer(nameserver=mq.nameserver, connect=cut.connect) as producer:
        await producer.queues("CutMany")
        cut.is_on = True
        bodies = [b"%05d" % n for n in range(50_000)]
        results = await producer.send_many(
            bodies, topic="CutMany", keys=[f"k{n % 20}" for n in range(50_000)]
        )
        cut.is_on = False
    assert cut.count >= 2
    assert sum(result.message_count for result in results) == 50_000
    await check_stored(mq, "CutMany", set(), 50_000, keyed=True)


async def check_stored(
    mq: Embedded, topic: str, lost: set[bytes], count: int, *, keyed: bool
) -> None:
    """Each is there, more than once perhaps; the first ones of a queue are in order."""
    found = await everything_in(mq, topic)
    stored = {message.body for messages in found.values() for message in messages}
    assert stored | lost == {b"%05d" % n for n in range(count)}
    if keyed:
        for messages in found.values():
            first = list(dict.fromkeys(message.body for message in messages))
            assert first == sorted(first)


async def test_cancelling_a_batch_leaves_a_whole_prefix_of_each_queue(mq: Embedded) -> None:
    await make_topic(mq, "Cancelled", queues=2)
    async with Producer(nameserver=mq.nameserver) as producer:
        with trio.move_on_after(0.02):
            while True:
                keys = [f"k{n % 20}" for n in range(20_000)]
                await producer.send_many(
                    [b"%05d" % n for n in range(20_000)], topic="Cancelled", keys=keys
                )
        await producer.send_many([b"end", b"end"], topic="Cancelled")
    found = await everything_in(mq, "Cancelled")
    assert sum(message.body == b"end" for messages in found.values() for message in messages) == 2
