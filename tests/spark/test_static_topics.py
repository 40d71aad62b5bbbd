"""Static topics in the source and the sink, before and after their queues move."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa
import pytest

from headrace import Message, blocking
from headrace.admin.client import Admin
from headrace.embedded import Embedded
from headrace.errors import BrokerError, NoQueue, PartialAnswer
from headrace.spark.cluster import Cluster, Topics
from headrace.spark.errors import TopicDeleted
from headrace.spark.options import Limits, read_options
from headrace.spark.plan.limits import limited
from headrace.spark.plan.ranges import Range, extent
from headrace.spark.plan.splits import read_tasks, size_curves
from headrace.spark.plan.tables import table_tasks
from headrace.spark.plan.tasks import ReadPlan
from headrace.spark.read.columns import arrow_schema
from headrace.spark.read.lag import MicroBatch
from headrace.spark.read.schema import source_schema
from headrace.spark.read.stream import StreamReader
from headrace.spark.read.table import read_table
from headrace.spark.read.task import read_range
from headrace.spark.retry import READING, Patience
from headrace.spark.source import HeadraceSource
from headrace.spark.write.sink import BatchWriter, write_options
from headrace_protocol.bodies import MessageQueue
from headrace_protocol.statictopic.plans import Mode
from tests.spark.brokers import broker

QUEUES = 2


@pytest.fixture(scope="module")
def more(mq: Embedded, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Two brokers beside ``mq``'s own."""
    with ExitStack() as stack:
        for name in ("b", "c"):
            stack.enter_context(broker(mq, tmp_path_factory.mktemp(name), name))
        yield


def change(mq: Embedded, method: str, *arguments: Any, **options: Any) -> None:
    """Change a static topic."""

    async def run() -> None:
        async with Admin(nameserver=mq.nameserver) as admin:
            await getattr(admin, method)(*arguments, **options)

    anyio.run(run)


class Topic:
    """A static topic; ``sent`` has the bodies and offsets of each queue's messages."""

    def __init__(self, mq: Embedded, producer: blocking.Producer, name: str) -> None:
        self._mq = mq
        self._producer = producer
        self.name = name
        self.sent: dict[int, list[bytes]] = {number: [] for number in range(QUEUES)}
        change(mq, "create_static_topic", name, QUEUES, brokers=["broker-a"])

    def queue(self, number: int) -> MessageQueue:
        return MessageQueue(self.name, "__syslo__global__", number)

    def send(self, count: int) -> None:
        for number, bodies in list(self.sent.items()):
            fresh = [b"%d-%d" % (number, len(bodies) + n) for n in range(count)]
            self._producer.send_many(fresh, topic=self.name, queue=self.queue(number))
            self.sent[number] = [*bodies, *fresh]

    def move(self, *brokers: str, mode: Mode = Mode.STRICT) -> None:
        change(self._mq, "remap_static_topic", self.name, brokers, mode=mode)


@pytest.fixture
def topic(
    mq: Embedded, more: None, producer: blocking.Producer, request: pytest.FixtureRequest
) -> Topic:
    name = "".join(letter for letter in request.node.name if letter.isalnum())[:100]
    return Topic(mq, producer, name)


@pytest.fixture
def cluster(mq: Embedded) -> Iterator[Cluster]:
    with Cluster((mq.nameserver,)) as running:
        yield running


def read(cluster: Cluster, ranges: dict[MessageQueue, Range], split_bytes: int = 1 << 20) -> Any:
    """By queue, offset and body of each message that the tasks for ``ranges`` read."""
    queues = cluster.queues(Topics((next(iter(ranges)).topic,)))
    schema = arrow_schema(HeadraceSource({"nameserver": "x:1", "topic": "t"}).schema(), None)
    found: dict[int, list[tuple[int, bytes]]] = {number: [] for number in range(QUEUES)}
    for task in read_tasks(cluster, queues, ranges, split_bytes):
        for part in task.ranges:
            for batch in read_range(ReadPlan(), part, schema):
                for row in batch.to_pylist():
                    found[row["queue"]].append((row["queue_offset"], row["value"]))
    return {number: sorted(rows) for number, rows in found.items()}


def whole(cluster: Cluster, topic: Topic) -> dict[MessageQueue, Range]:
    queues = cluster.queues(Topics((topic.name,)))
    has = extent(cluster, queues)
    return {queue: Range(has.min[queue], has.max[queue]) for queue in queues}


def compact(mq: Embedded, topic: str, kept: int) -> None:
    """Compact until so many messages are left."""

    async def run() -> None:
        messages = -1
        async with Admin(nameserver=mq.nameserver) as admin:
            while messages != kept:
                await admin.compact_topic(topic)
                await anyio.sleep(0.1)
                messages = sum(each.messages for each in await admin.logic_queues(topic))

    anyio.run(run)


@pytest.mark.parametrize("mode", [Mode.STRICT, Mode.AVAILABLE])
def test_a_compacted_topic_is_a_table_wherever_its_queues_are(
    mq: Embedded, more: None, producer: blocking.Producer, cluster: Cluster, mode: Mode
) -> None:
    name = f"table{mode.value}"
    change(
        mq,
        "create_static_topic",
        name,
        QUEUES,
        brokers=["b"],
        attributes={"cleanup.policy": "COMPACTION", "key.queue": "headrace"},
    )
    values: dict[str, bytes] = {}
    for round_, target in enumerate(("c", "b", "c", "b")):
        for number in range(60):
            # The keys of each round begin and end later than those before.
            key, body = f"k{round_ * 5 + number % 20}", b"%d-%d" % (round_, number)
            body = b"" if number % 20 == 7 else body
            producer.send(Message(name, body, key=key))
            values[key] = body
        compact(mq, name, 20 * (round_ + 1))
        if round_ < 3:
            change(mq, "remap_static_topic", name, [target], mode=mode)
    expected = {key: body for key, body in values.items() if body}
    queues = cluster.queues(Topics((name,)))
    schema = arrow_schema(source_schema(table=True), table=True)
    rows = [
        row
        for task in table_tasks(cluster, queues)
        for batch in read_table(ReadPlan(table=True), task, schema)
        for row in batch.to_pylist()
    ]
    assert {row["keys"]: row["value"] for row in rows} == expected
    assert len(rows) == len(expected)
    # As messages: the newest value of each key comes last.
    has = extent(cluster, queues)
    ranges = {queue: Range(0, has.max[queue]) for queue in queues}
    schema = arrow_schema(HeadraceSource({"nameserver": "x:1", "topic": "t"}).schema(), None)
    found: dict[str, bytes] = {}
    for task in read_tasks(cluster, queues, ranges, 1 << 20):
        for part in task.ranges:
            for batch in read_range(ReadPlan(), part, schema):
                found |= {row["keys"]: row["value"] for row in batch.to_pylist()}
    assert {key: body for key, body in found.items() if body} == expected


@pytest.mark.parametrize("mode", [Mode.STRICT, Mode.AVAILABLE])
def test_all_messages_are_read_wherever_they_are(
    topic: Topic, cluster: Cluster, mode: Mode
) -> None:
    topic.send(30)
    for target in ("b", "c", "broker-a"):
        topic.move(target, mode=mode)
        topic.send(20)
    ranges = whole(cluster, topic)
    assert sorted(ranges) == [topic.queue(number) for number in range(QUEUES)]
    for split_bytes in (1 << 20, 2000):
        found = read(cluster, ranges, split_bytes)
        for number, bodies in topic.sent.items():
            assert [body for _, body in found[number]] == bodies
    offsets = [offset for offset, _ in found[0]]
    assert offsets == sorted(set(offsets))
    assert (ranges[topic.queue(0)].end == 90) == (mode is Mode.STRICT)
    # A part of the range that begins or ends in any item.
    for start, end in ((0, 1), (29, 31), (30, 50), (45, 75)):
        first, last = offsets[start], offsets[end - 1] + 1
        some = read(cluster, {topic.queue(0): Range(first, last)})
        assert some[0] == found[0][start:end]


def test_jumps_are_no_messages(topic: Topic, cluster: Cluster) -> None:
    topic.send(10)
    topic.move("b", mode=Mode.AVAILABLE)
    topic.send(10)
    queues = cluster.queues(Topics((topic.name,)))
    ranges = whole(cluster, topic)
    end = ranges[topic.queue(0)].end
    assert end > 10_000
    assert [
        limited(cluster, queues, ranges, Limits(rows=rows))[topic.queue(0)]
        for rows in (8, 20, 22, 40)
    ] == [Range(0, 4), Range(0, 10), Range(0, end - 9), Range(0, end)]
    parts = cluster.parts(ranges, queues)
    curves = size_curves(cluster, [part for some in parts.values() for part in some], 1000)
    total = sum(curve.total_bytes for curve in curves.values())
    half = limited(cluster, queues, ranges, Limits(bytes=int(total * 0.75)))[topic.queue(0)]
    assert end - 10 < half.end < end
    latest = {queue: each.end for queue, each in ranges.items()}
    report = MicroBatch(queues, latest, ranges, ranges).lag(cluster, 0)
    assert report["lagMessages"] == 40
    # Behind the last message of an item, and within a jump.
    for start in (10, 11, 9_999, end - 10):
        assert [offset for offset, _ in read(cluster, {topic.queue(1): Range(start, end)})[1]] == [
            *range(end - 10, end)
        ]


def test_times_are_found_in_any_item(topic: Topic, cluster: Cluster) -> None:
    topic.send(3)
    topic.move("b")
    topic.send(3)
    queues = cluster.queues(Topics((topic.name,)))
    times = [
        cluster.store_times({topic.queue(0): offset}, queues)[topic.queue(0)] for offset in range(6)
    ]
    assert times == sorted(times)
    for offset, time_ms in enumerate(times):
        found = cluster.offsets_at(queues, time_ms)[topic.queue(0)]
        assert found <= offset
        assert times[found] == time_ms
    assert cluster.offsets_at(queues, times[-1] + 100_000)[topic.queue(0)] == 6


def reader(mq: Embedded, topic: str, patience: Patience = READING, **options: str) -> StreamReader:
    given = {"nameserver": mq.nameserver, "topic": topic, "starting": "earliest", **options}
    return StreamReader(replace(read_options(given), patience=patience), None, source_schema())


def test_a_stream_keeps_its_partitions_while_queues_move(
    mq: Embedded, topic: Topic, caplog: pytest.LogCaptureFixture
) -> None:
    running = reader(mq, topic.name, group="static-stream")
    ends, bodies = [running.initialOffset()], []
    incarnations = set()
    for target in ("b", "c", "broker-a"):
        topic.send(5)
        topic.move(target)
        ends.append(running.latestOffset())
        places = ends[-1]["topics"][topic.name]
        assert list(places) == ["__syslo__global__"]
        entry = places["__syslo__global__"]
        assert list(entry["queues"]) == ["0", "1"]
        incarnations.add(entry["incarnation"])
        for task in running.partitions(ends[-2], ends[-1]):
            for batch in running.read(task):
                bodies += batch.column("value").to_pylist()
    assert len(incarnations) == 1
    assert None not in incarnations
    assert sorted(bodies) == sorted([*topic.sent[0], *topic.sent[1]])
    assert "cannot commit" not in caplog.text
    # A repeated batch has the same messages.
    first = [
        value
        for task in running.partitions(ends[0], ends[1])
        for batch in running.read(task)
        for value in batch.column("value").to_pylist()
    ]
    assert sorted(first) == sorted([*topic.sent[0][:5], *topic.sent[1][:5]])
    running.stop()


def test_a_deleted_topic_is_reported(mq: Embedded, topic: Topic) -> None:
    topic.send(1)
    topic.move("b")
    running = reader(mq, topic.name, Patience(0.5, 0.25))
    running.latestOffset()
    change(mq, "delete_topic", topic.name)
    with pytest.raises(TopicDeleted, match=topic.name):
        running.latestOffset()
    running.stop()


def test_rows_are_written_to_the_leaders(mq: Embedded, topic: Topic, cluster: Cluster) -> None:
    topic.move("b")
    for exactly_once in ("true", "false"):
        options = write_options(
            {"nameserver": mq.nameserver, "topic": topic.name, "exactlyOnce": exactly_once}
        )
        writer = BatchWriter(options, f"job-{exactly_once}-{topic.name}"[:60])
        rows = pa.record_batch(
            {"value": [b"%d" % n for n in range(20)], "key": [f"k{n % 5}" for n in range(20)]}
        )
        writer.commit([writer.write(iter([rows]))])
    found = read(cluster, whole(cluster, topic))
    bodies = sorted(body for rows in found.values() for _, body in rows)
    assert bodies == sorted([b"%d" % n for n in range(20)] * 2)


def test_a_batch_staged_before_a_move_is_written_again(
    mq: Embedded, topic: Topic, cluster: Cluster
) -> None:
    options = write_options({"nameserver": mq.nameserver, "topic": topic.name})
    writer = BatchWriter(options, f"again-{topic.name}"[:60])
    rows = pa.record_batch({"value": [b"a", b"b"], "key": ["k", "l"]})
    written = writer.write(iter([rows]))
    topic.move("b")
    with pytest.raises(BrokerError, match=r"has moved from broker broker-a.*write the batch again"):
        writer.commit([written])
    writer.abort([written])
    writer.commit([writer.write(iter([rows]))])
    found = read(cluster, whole(cluster, topic))
    assert sorted(body for rows in found.values() for _, body in rows) == [b"a", b"b"]


@pytest.mark.parametrize("known", [set(), {"b"}], ids=["nobody", "another broker"])
def test_a_nameserver_that_has_just_started_has_deleted_no_topic(
    mq: Embedded, topic: Topic, known: set[str]
) -> None:
    class Young(Cluster):
        def masters(self) -> dict[str, str]:
            return {name: at for name, at in super().masters().items() if name in known}

    with Young([mq.nameserver]) as cluster:
        cluster.queues(Topics((topic.name,)))
        assert cluster.masters().keys() == known
        assert cluster.vanished_queues([topic.queue(0)]) == {}


# -- a broker with older messages is away ----------------------------------------------------------


@pytest.fixture
def leaving(
    mq: Embedded, admin: blocking.Admin, tmp_path: Path
) -> Iterator[AbstractContextManager[Any]]:
    """A broker d for the length of a block; another test's begins with an empty store."""
    yield broker(mq, tmp_path, "d")
    admin.forget_broker("d")


@pytest.fixture
def halves(topic: Topic, leaving: AbstractContextManager[Any]) -> Topic:
    """A topic whose first messages are on a broker that has left."""
    with leaving:
        topic.move("d")
        topic.send(5)
        topic.move("broker-a")
    topic.send(5)
    return topic


def batch(mq: Embedded, topic: str, **options: str) -> list[bytes]:
    source = HeadraceSource({"nameserver": mq.nameserver, "topic": topic, **options})
    reader: Any = source.reader(source.schema())
    return [
        value
        for task in reader.partitions()
        for rows in reader.read(task)
        for value in rows.column("value").to_pylist()
    ]


@pytest.mark.parametrize("start", ["earliest", "2020-01-01T00:00:00Z"])
def test_a_batch_read_gives_the_part_that_is_there(
    mq: Embedded, halves: Topic, caplog: pytest.LogCaptureFixture, start: str
) -> None:
    with pytest.raises(PartialAnswer, match=r"broker d .*was shut down"):
        batch(mq, halves.name)
    found = batch(mq, halves.name, failOnDataLoss="false", starting=start)
    assert sorted(found) == sorted(body for bodies in halves.sent.values() for body in bodies[5:])
    assert "broker d (queues 0 to 1) has some of their messages and is away" in caplog.text


def test_a_table_gives_the_part_that_is_there(
    mq: Embedded,
    producer: blocking.Producer,
    leaving: AbstractContextManager[Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = "halftable"
    options = {"attributes": {"cleanup.policy": "COMPACTION", "key.queue": "headrace"}}
    with leaving:
        change(mq, "create_static_topic", name, QUEUES, brokers=["d"], **options)
        for number in range(20):
            producer.send(Message(name, b"old", key=f"k{number}"))
        change(mq, "remap_static_topic", name, ["broker-a"])
    for number in range(10, 30):
        producer.send(Message(name, b"new", key=f"k{number}"))
    found = batch(mq, name, table="true", failOnDataLoss="false")
    assert found == [b"new"] * 20
    assert "broker d (queues 0 to 1) has some of their messages and is away" in caplog.text


def test_a_stream_goes_on_behind_the_part_that_is_away(mq: Embedded, halves: Topic) -> None:
    running = reader(
        mq, halves.name, Patience(0.1, 0.25), starting="latest", failOnDataLoss="false"
    )
    start = running.initialOffset()
    halves.send(2)
    end = running.latestOffset()
    found = [
        value
        for task in running.partitions(start, end)
        for rows in running.read(task)
        for value in rows.column("value").to_pylist()
    ]
    assert sorted(found) == sorted(body for bodies in halves.sent.values() for body in bodies[-2:])
    # Messages that are away are waited for, not skipped.
    for queue in start["topics"][halves.name]["__syslo__global__"]["queues"]:
        start["topics"][halves.name]["__syslo__global__"]["queues"][queue] = 0
    with pytest.raises(NoQueue, match="read on broker d"):
        running.partitions(start, end)
    running.stop()
