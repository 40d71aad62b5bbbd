"""Tables in Spark: one row per key, changes as a stream, null values as deletions."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from headrace import Message, blocking
from headrace.embedded import Embedded
from headrace.errors import InvalidMessage
from headrace.producer.selector import queue_index
from headrace.spark.cluster import Cluster, Topics
from headrace.spark.errors import KeyInTwoQueues, OptionError
from headrace.spark.options import read_options
from headrace.spark.plan.tables import table_tasks
from headrace.spark.plan.tasks import ReadPlan, TableTask
from headrace.spark.read import table as table_module
from headrace.spark.read.columns import arrow_schema
from headrace.spark.read.newest import Hasher, Hashes, HashSet, Newest
from headrace.spark.read.schema import source_schema
from headrace.spark.read.stream import StreamReader
from headrace.spark.read.table import read_table
from headrace.spark.read.task import read_slices
from headrace.spark.retry import AT_ONCE
from headrace.spark.source import HeadraceSource
from headrace.spark.write.row_encoding import check_schema, message_rows
from headrace_broker.server import Broker
from headrace_protocol.java_hash import java_hash
from headrace_protocol.message import decode_records
from headrace_protocol.message_ids import encode_host
from tests.spark.brokers import broker
from tests.support.batches import iter_batch

SCHEMA = arrow_schema(source_schema(table=True), table=True)


def read(mq: Embedded, topic: str, **plan: Any) -> dict[str, bytes]:
    """Keys and values by the tasks of a read, without Spark."""
    with Cluster([mq.nameserver]) as cluster:
        return rows_of(table_tasks(cluster, cluster.queues(Topics((topic,)))), **plan)


def rows_of(tasks: list[TableTask], **plan: Any) -> dict[str, bytes]:
    rows = [
        row
        for task in tasks
        for batch in read_table(ReadPlan(table=True, **plan), task, SCHEMA)
        for row in batch.to_pylist()
    ]
    keys = [row["keys"] for row in rows]
    assert len(set(keys)) == len(keys)
    assert not any(row["deleted"] for row in rows)
    return {row["keys"]: row["value"] for row in rows}


def fill(producer: blocking.Producer, topic: str, count: int, keys: int) -> dict[str, bytes]:
    """Random puts and deletions; returns the table."""
    random = np.random.default_rng(7)
    expected: dict[str, bytes] = {}
    for number in range(count):
        key = f"k{random.integers(keys)}"
        body = b"" if random.random() < 0.2 else b"%d" % number
        # One by one: a plain topic takes no empty body in a block.
        producer.send(Message(topic, body, key=key))
        expected[key] = body
    return {key: body for key, body in expected.items() if body}


# -- batches ---------------------------------------------------------------------------------------


def test_a_table_has_one_row_per_key(
    mq: Embedded, admin: blocking.Admin, producer: blocking.Producer
) -> None:
    admin.create_topic("rows", queues=3)
    expected = fill(producer, "rows", 400, 40)
    producer.send(Message("rows", b"without a key"))
    assert read(mq, "rows") == expected
    assert read(mq, "rows", slice_bytes=1000, rows_max=3) == expected


def test_an_empty_topic_has_no_rows(mq: Embedded, admin: blocking.Admin) -> None:
    admin.create_topic("empty", queues=3)
    assert read(mq, "empty") == {}


def test_a_key_in_two_queues_is_an_error_that_names_it(
    mq: Embedded, admin: blocking.Admin, producer: blocking.Producer
) -> None:
    admin.create_topic("twice", queues=3)
    for number in range(20):
        producer.send(Message("twice", b"x", key=f"k{number}"))
    queues = sorted(producer.queues("twice"))
    for queue in queues:
        producer.send(Message("twice", b"y", key="both"), queue=queue)
    with pytest.raises(
        KeyInTwoQueues, match=r"key 'both' has messages in twice/.*/\d and in twice"
    ):
        read(mq, "twice")


def test_keys_that_another_rule_sends_to_their_queues_are_read(
    mq: Embedded, admin: blocking.Admin, producer: blocking.Producer
) -> None:
    admin.create_topic("other_rule", queues=3)
    queues = sorted(producer.queues("other_rule"))
    expected = {f"k{number}": b"%d" % number for number in range(30)}
    for number, (key, body) in enumerate(expected.items()):
        producer.send(Message("other_rule", body, key=key), queue=queues[number % 3])
    assert read(mq, "other_rule") == expected


@pytest.mark.parametrize("rule", ["headrace", "java"])
def test_with_a_known_rule_no_task_reads_another_queue(
    rule: str,
    mq: Embedded,
    admin: blocking.Admin,
    producer: blocking.Producer,
) -> None:
    topic, expected = f"rule_{rule}", dict[str, bytes]()
    attributes = {"cleanup.policy": "COMPACTION", "key.queue": rule}
    admin.create_topic(topic, queues=3, attributes=attributes)
    queues = sorted(producer.queues(topic))
    for number in range(50):
        key = f"k{number % 20}"
        index = abs(java_hash(key)) % 3 if rule == "java" else queue_index(key, 3)
        expected[key] = b"%d" % number
        producer.send(Message(topic, expected[key], key=key), queue=queues[index])
    with Cluster([mq.nameserver]) as cluster:
        tasks = table_tasks(cluster, cluster.queues(Topics((topic,))))
    for task in tasks:
        task.others = tuple(replace(part, address="127.0.0.1:1") for part in task.others)
    assert rows_of(tasks, patience=AT_ONCE) == expected


def test_a_value_that_is_replaced_between_both_reads_is_found_behind_the_range(
    mq: Embedded,
    admin: blocking.Admin,
    producer: blocking.Producer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    admin.create_topic("race", queues=1)
    for key in ("a", "b", "c", "d"):
        producer.send(Message("race", b"old", key=key))
    reads = iter(range(10))

    def compacted(plan: ReadPlan, part: Any) -> Any:
        """Compaction: from the second read on, the old values of a, b and c are gone."""
        number = next(reads)
        if number == 1:
            producer.send(Message("race", b"newer", key="a"))
            producer.send(Message("race", b"newest", key="a"))
            producer.send(Message("race", b"", key="b"))
            producer.send(Message("race", b"other", key="e"))
        for columns in read_slices(plan, part):
            yield columns.select(columns.queue_offset >= (3 if number else 0))

    monkeypatch.setattr(table_module, "read_slices", compacted)
    assert read(mq, "race") == {"d": b"old", "a": b"newest"}


@pytest.mark.slow
def test_a_table_is_right_while_it_is_compacted(
    mq: Embedded, admin: blocking.Admin, producer: blocking.Producer, tmp_path: Path
) -> None:
    sizes: dict[str, Any] = {
        "compaction_mapped_file_size": 8192,
        "compaction_cq_mapped_file_size": 460,
    }
    random, expected = np.random.default_rng(5), dict[str, bytes]()
    with broker(mq, tmp_path, "compacting", compaction_schedule_internal=100, **sizes) as running:
        attributes = {"cleanup.policy": "COMPACTION", "delete.retention.ms": "0"}
        admin.create_topic("compacted", queues=2, attributes=attributes, broker="compacting")
        deadline_s = time.monotonic() + 60
        while not expected or not dropped(admin, running) or len(expected) < 50:
            assert time.monotonic() < deadline_s
            for _ in range(100):
                key, body = f"k{random.integers(60)}", b"%d" % random.integers(10**9)
                body = b"" if random.random() < 0.1 else body
                producer.send(Message("compacted", body, key=key))
                expected[key] = body
            live = {key: body for key, body in expected.items() if body}
            assert read(mq, "compacted") == live
        assert read(mq, "compacted") == live
        assert changes(mq, "compacted") == live


def changes(mq: Embedded, topic: str) -> dict[str, bytes]:
    """The table that the changes of a stream result in, from the first one on."""
    options = {"nameserver": mq.nameserver, "topic": topic, "table": "true"}
    given = read_options({**options, "starting": "earliest", "splitBytes": "5000"})
    reader = StreamReader(given, None, source_schema(table=True))
    start, end = reader.initialOffset(), reader.latestOffset()
    rows = [
        row
        for task in reader.partitions(start, end)
        for batch in reader.read(task)
        for row in batch.to_pylist()
    ]
    reader.stop()
    rows.sort(key=lambda row: (row["queue"], row["queue_offset"]))
    values = {row["keys"]: row["value"] for row in rows}
    return {key: value for key, value in values.items() if value is not None}


def dropped(admin: blocking.Admin, running: Broker) -> int:
    """Messages that compactions have removed."""
    return int(admin.runtime_info(running.address)["compactionDropped"])


def test_a_table_in_a_data_frame(
    spark: SparkSession, mq: Embedded, admin: blocking.Admin, producer: blocking.Producer
) -> None:
    admin.create_topic("frame", queues=2)
    producer.send(Message("frame", b'{"age": 1}', key="ada"))
    producer.send(Message("frame", b'{"age": 2}', key="bob"))
    producer.send(Message("frame", b'{"age": 36}', key="ada"))
    producer.send(Message("frame", b"", key="bob"))
    frame = (
        spark.read.format("headrace")
        .options(nameserver=mq.nameserver, topic="frame", table="true", schema="age int")
        .load()
    )
    assert frame.schema["deleted"].nullable is False
    assert frame.schema["value"].nullable is True
    assert [tuple(row) for row in frame.select("keys", "age", "deleted").collect()] == [
        ("ada", 36, False)
    ]
    assert frame.where("age > 1").count() == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("starting", "earliest"), ("ending", "latest"), ("maxRows", "5"), ("filter", "tag")],
)
def test_options_that_a_table_cannot_have(name: str, value: str) -> None:
    source = HeadraceSource({"nameserver": "x:1", "topic": "t", "table": "true", name: value})
    with pytest.raises(OptionError, match=name):
        source.reader(source.schema())


# -- streams ---------------------------------------------------------------------------------------


def test_a_stream_has_the_changes_with_a_delete_flag(
    spark: SparkSession,
    mq: Embedded,
    admin: blocking.Admin,
    producer: blocking.Producer,
    tmp_path: Path,
) -> None:
    admin.create_topic("stream", queues=1)
    for key, body in (("a", b'{"n": 1}'), ("b", b'{"n": 2}'), ("a", b""), ("c", b'{"n": 3}')):
        producer.send(Message("stream", body, key=key))
    producer.send(Message("stream", b"without a key"))
    query = (
        spark.readStream.format("headrace")
        .options(
            nameserver=mq.nameserver,
            topic="stream",
            table="true",
            starting="earliest",
            schema="n int",
        )
        .load()
        .writeStream.format("memory")
        .queryName("changes")
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(60)
    rows = spark.sql("select keys, n, value is null, deleted, _corrupt from changes").collect()
    assert [tuple(row) for row in rows] == [
        ("a", 1, False, False, None),
        ("b", 2, False, False, None),
        ("a", None, True, True, None),
        ("c", 3, False, False, None),
    ]


# -- writing ---------------------------------------------------------------------------------------


def rows(*items: tuple[str | None, bytes | None]) -> pa.RecordBatch:
    keys, values = zip(*items, strict=True)
    return pa.record_batch(
        {"key": pa.array(keys, pa.string()), "value": pa.array(values, pa.binary())}
    )


def test_null_values_are_written_as_deletions() -> None:
    written = message_rows("T", rows(("a", b"1"), ("b", None), ("c", None)))
    block = written.for_headrace("T", 1, encode_host("127.0.0.1", 1))
    messages = decode_records(block.data)
    assert [(m.properties["KEYS"], m.stored_body) for m in messages] == [
        ("a", b"1"),
        ("b", b""),
        ("c", b""),
    ]
    alone = message_rows("T", rows(("b", None)))
    assert decode_records(alone.for_headrace("T", 1, bytes(8)).data)[0].stored_body == b""
    outgoing = written.for_any_broker("T").for_any_broker(1, lambda: "id")
    assert [bytes(body) for _, body, _ in iter_batch(bytes(outgoing.body))] == [
        b"1",
        b"deleted",
        b"deleted",
    ]


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        (rows(("a", b"1"), (None, None)), "1 rows for T have a null value and no key"),
        (rows(("", None), ("a", None)), "1 rows for T have a null value and no key"),
        (rows(("a", None), ("b", b"")), "a value for T has 0 bytes"),
        (
            pa.record_batch({"value": pa.array([None], pa.binary())}),
            "1 rows for T have a null value and no key",
        ),
    ],
)
def test_other_rows_without_a_value_are_rejected(batch: pa.RecordBatch, reason: str) -> None:
    with pytest.raises(InvalidMessage, match=reason):
        message_rows("T", batch)


def test_a_table_can_be_copied_with_its_deletions() -> None:
    check_schema(source_schema(table=True), "T")


# -- hashes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("waiting_min", [1, 50, 10_000])
def test_the_newest_offset_of_each_key(waiting_min: int) -> None:
    random = np.random.default_rng(3)
    newest, hasher, expected = Newest(waiting_min), Hasher(), dict[bytes, int]()
    for start in range(0, 2000, 100):
        keys = [b"k%d" % number for number in random.integers(300, size=100)]
        offsets = np.arange(start, start + 100)
        newest.add(hasher.hashes(keys), offsets)
        expected |= dict(zip(keys, offsets.tolist(), strict=True))
    hashes, offsets = newest.result()
    assert offsets.tolist() == sorted(expected.values())
    by_offset = {offset: key for key, offset in expected.items()}
    again = hasher.hashes([by_offset[offset] for offset in offsets.tolist()])
    assert again.first.tolist() == hashes.first.tolist()
    assert again.second.tolist() == hashes.second.tolist()


def test_keys_that_share_half_of_their_hash_stay_apart() -> None:
    def hashes(*pairs: tuple[int, int]) -> Hashes:
        first, second = zip(*pairs, strict=True)
        return Hashes(np.array(first), np.array(second))

    newest = Newest()
    newest.add(hashes((1, 1), (1, 2), (2, 1), (1, 2)), np.arange(4))
    assert newest.result()[1].tolist() == [0, 2, 3]
    some = HashSet(hashes((1, 5), (1, 2), (2, 1), (1, 9)))
    asked = hashes((1, 2), (1, 9), (1, 5), (1, 3), (2, 1), (2, 2), (0, 0), (9, 9))
    assert some.holds(asked).tolist() == [True, True, True, False, True, False, False, False]


def test_hashes_of_two_readers_differ() -> None:
    keys = [b"a", b"b"]
    one, other = Hasher().hashes(keys), Hasher().hashes(keys)
    assert one.second.tolist() != other.second.tolist()
