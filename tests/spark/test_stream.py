"""The streaming reader for PySpark 4.0 and 4.1, and the one of this PySpark in a query."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from headrace import blocking
from headrace.embedded import Embedded
from headrace.spark.body.ddl import parse_ddl
from headrace.spark.errors import OptionError, SchemaError
from headrace.spark.options import read_options
from headrace.spark.read.schema import source_schema
from headrace.spark.read.stream import StreamReader
from headrace.spark.source import HeadraceSource
from tests.spark.streams import q, row_count

HAS_LIMITS = find_spec("pyspark.sql.streaming.datasource") is not None


@pytest.fixture
def old_reader(mq: Embedded) -> Iterator[Callable[..., StreamReader]]:
    """Makes readers of PySpark 4.0 and 4.1."""
    with ExitStack() as stack:

        def made(topic: str, **options: str) -> StreamReader:
            given = {"nameserver": mq.nameserver, "topic": topic, **options}
            running = StreamReader(read_options(given), None, source_schema())
            stack.callback(running.stop)
            return running

        yield made


def test_older_versions_of_spark_read_all_there_is(
    old_reader: Callable[..., StreamReader],
    producer: blocking.Producer,
    admin: blocking.Admin,
) -> None:
    producer.send_many([b"x"], topic="older", queue=None)
    running = old_reader("older", group="older", starting="earliest")
    start = running.initialOffset()
    producer.send_many([b"x"] * 2, topic="older", queue=q("older", 1))
    end = running.latestOffset()
    assert row_count(running, start, end) == 3
    assert running.latestOffset() == end
    assert sum(each.lag for each in admin.lag("older", "older")) == 0
    # A new process knows nothing of the checkpoint until a batch is planned.
    again = old_reader("older")
    producer.send_many([b"x"], topic="older", queue=q("older", 1))
    last = again.latestOffset()
    assert row_count(again, end, last) == 1


def test_older_versions_of_spark_get_limits_from_the_second_batch_on(
    old_reader: Callable[..., StreamReader], producer: blocking.Producer
) -> None:
    producer.send_many([b"x"] * 7, topic="older-limits")
    running = old_reader("older-limits", starting="earliest", maxRows="3")
    # In this order, and nothing is told.
    first = running.latestOffset()
    start = running.initialOffset()
    assert row_count(running, start, first) == 7
    producer.send_many([b"x"] * 5, topic="older-limits")
    # A run from a checkpoint begins with an empty batch.
    again = old_reader("older-limits", maxRows="3")
    assert row_count(again, first, first) == 0
    ends = [first, again.latestOffset(), again.latestOffset(), again.latestOffset()]
    assert [row_count(again, *each) for each in pairwise(ends)] == [3, 2, 0]


def test_older_versions_of_spark_begin_no_later_than_the_first_batch_ends(
    old_reader: Callable[..., StreamReader], producer: blocking.Producer
) -> None:
    producer.send_many([b"x"] * 2, topic="older-race")
    running = old_reader("older-race")
    end = running.latestOffset()
    producer.send_many([b"x"] * 2, topic="older-race")
    assert row_count(running, running.initialOffset(), end) == 0
    assert row_count(running, end, running.latestOffset()) == 2


@pytest.mark.parametrize(
    ("options", "schema", "error", "message"),
    [
        (
            {"ending": "latest"},
            "value binary",
            OptionError,
            "option ending: applies to batch reads",
        ),
        ({"topik": "x"}, "value binary", OptionError, "option topik='x'.*did you mean topic"),
        ({}, "valeu binary", SchemaError, "there is no column valeu.*did you mean value"),
    ],
)
def test_a_stream_that_can_not_be_says_so_when_it_is_asked(
    options: dict[str, str], schema: str, error: type[Exception], message: str
) -> None:
    source = HeadraceSource({"nameserver": "127.0.0.1:1", "topic": "t", **options})
    running: Any = source.streamReader(parse_ddl(schema))
    with pytest.raises(error, match=message):
        running.initialOffset()
    with pytest.raises(error, match=message):
        running.latestOffset()
    with pytest.raises(error, match=message):
        running.partitions({}, {})
    running.stop()


# -- in Spark --------------------------------------------------------------------------------------


def started(spark: SparkSession, mq: Embedded, folder: Path, **options: str) -> StreamingQuery:
    source = spark.readStream.format("headrace").option("nameserver", mq.nameserver)
    return (
        source.options(**options)
        .load()
        .selectExpr("topic", "queue_offset", "cast(value as string) as value")
        .writeStream.format("parquet")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .option("path", str(folder / "out"))
        .trigger(availableNow=True)
        .start()
    )


@pytest.mark.slow
def test_a_query_goes_on_where_it_was(
    spark: SparkSession, mq: Embedded, producer: blocking.Producer, tmp_path: Path
) -> None:
    bodies = [b"%d" % n for n in range(100)]
    producer.send_many(bodies[:60], topic="goes-on")
    options = {"topic": "goes-on", "starting": "earliest", "group": "goes-on"}
    query = started(spark, mq, tmp_path, maxRows="40", **options)
    query.awaitTermination()
    batches = query.recentProgress
    assert [each.numInputRows for each in batches] == ([40, 20] if HAS_LIMITS else [60])
    if HAS_LIMITS:
        assert json.loads(batches[1].sources[0].latestOffset)["lagMessages"] == 20

    producer.send_many(bodies[60:], topic="goes-on")
    started(spark, mq, tmp_path, **options).awaitTermination()
    rows = spark.read.parquet(str(tmp_path / "out")).collect()
    assert sorted(int(row.value) for row in rows) == list(range(100))

    query = started(spark, mq, tmp_path, ending="latest", **options)
    with pytest.raises(Exception, match="option ending: applies to batch reads") as raised:
        query.awaitTermination()
    assert "UnboundLocalError" not in str(raised.value)

    producer.send_many(bodies, topic="goes-elsewhere")
    query = started(spark, mq, tmp_path, topic="goes-elsewhere")
    with pytest.raises(
        Exception, match="CheckpointMismatch: the checkpoint belongs to topic goes-on"
    ):
        query.awaitTermination()
