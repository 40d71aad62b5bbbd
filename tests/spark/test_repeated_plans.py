"""Reads that Spark repeats with one plan: a table as it is then; of others, a warning."""

from __future__ import annotations

import logging
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from headrace import blocking
from headrace.embedded import Embedded
from headrace.errors import HeadraceError
from headrace.spark.errors import SparkConnectorError
from headrace.spark.options import read_options
from headrace.spark.read import frozen
from headrace.spark.read.schema import source_schema
from headrace.spark.read.table import TableReader
from headrace.spark.retry import AT_ONCE, READING, Patience


class Plan:
    """The tasks of one plan, which run as often as wanted."""

    def __init__(self, mq: Embedded, topic: str, patience: Patience = READING) -> None:
        options = read_options({"nameserver": mq.nameserver, "topic": topic, "table": "true"})
        options = replace(options, patience=patience)
        reader = TableReader(options, None, source_schema(table=True))
        self._planned = pickle.dumps((reader, reader.partitions()))

    def rows(self) -> dict[str, bytes]:
        reader, tasks = pickle.loads(self._planned)
        batches = [batch for task in tasks for batch in reader.read(task)]
        return {row["keys"]: row["value"] for batch in batches for row in batch.to_pylist()}


def table(admin: blocking.Admin, topic: str, queues: int) -> None:
    admin.create_topic(topic, queues=queues, attributes={"cleanup.policy": "COMPACTION"})


def put(mq: Embedded, topic: str, **values: bytes) -> None:
    with blocking.Table(topic, nameserver=mq.nameserver) as running:
        for key, value in values.items():
            running.put(key, value)


def test_a_task_reads_the_table_as_it_is_when_it_runs(mq: Embedded, admin: blocking.Admin) -> None:
    table(admin, "names", 3)
    plan = Plan(mq, "names")
    assert plan.rows() == {}
    expected: dict[str, bytes] = {}
    for turn in range(3):
        expected |= {f"k{number}": b"%d" % turn for number in range(turn * 4 + 4)}
        put(mq, "names", **expected)
        assert plan.rows() == expected
    with blocking.Table("names", nameserver=mq.nameserver) as running:
        running.delete("k0")
    del expected["k0"]
    assert plan.rows() == expected


def test_more_queues_than_tasks_are_an_error(mq: Embedded, admin: blocking.Admin) -> None:
    table(admin, "grown", 1)
    plan = Plan(mq, "grown")
    admin.alter_topic("grown", queues=2, force=True)
    with pytest.raises(SparkConnectorError, match=r"had 1 queues .* has 2 now: call load\(\)"):
        plan.rows()


def test_a_deleted_table_is_an_error(mq: Embedded, admin: blocking.Admin) -> None:
    table(admin, "gone", 1)
    plan = Plan(mq, "gone", AT_ONCE)
    admin.delete_topic("gone")
    with pytest.raises(HeadraceError, match="gone"):
        plan.rows()


@pytest.mark.parametrize(
    ("runs", "count"),
    [
        ([("a", "1"), ("a", "1")], 0),
        ([("b", "1"), ("c", "2")], 0),
        ([("d", "1"), ("d", "2"), ("d", "3")], 1),
        ([("e", "1"), ("f", "1"), ("e", "2"), ("f", "3")], 2),
        ([(None, "1"), (None, "2")], 0),
        ([("g", None), ("g", None)], 0),
    ],
)
def test_a_plan_that_runs_again_is_reported_once(
    runs: list[tuple[str | None, str | None]],
    count: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "headrace.spark"):
        for plan_id, execution in runs:
            frozen.warn_if_repeated(plan_id, execution, "orders")
    assert caplog.text.count("this read of orders was planned for an earlier query") == count


@pytest.mark.slow
def test_a_stream_joins_a_table_as_it_is(
    spark: SparkSession, mq: Embedded, admin: blocking.Admin, tmp_path: Path
) -> None:
    table(admin, "people", 2)
    admin.create_topic("visits", queues=1)
    put(mq, "people", u1=b"old")
    options = {"nameserver": mq.nameserver}
    people = spark.read.format("headrace").options(topic="people", table="true", **options).load()
    people = people.selectExpr("keys AS k", "cast(value AS string) AS name")
    reader = spark.readStream.format("headrace").options(topic="visits", **options)
    visits = reader.option("starting", "earliest").load().selectExpr("cast(value AS string) AS k")
    seen: list[list[tuple[str, str]]] = []
    query = (
        visits.join(people, "k", "left")
        .writeStream.foreachBatch(lambda frame, _: seen.append([*map(tuple, frame.collect())]))
        .option("checkpointLocation", str(tmp_path))
        .start()
    )
    with blocking.Producer(nameserver=mq.nameserver) as producer:
        producer.send_many([b"u1"], topic="visits")
        query.processAllAvailable()
        put(mq, "people", u1=b"new", u2=b"second")
        producer.send_many([b"u1", b"u2"], topic="visits")
        query.processAllAvailable()
    query.stop()
    assert seen[0] == [("u1", "old")]
    assert sorted(seen[-1]) == [("u1", "new"), ("u2", "second")]
