"""Batch reads in Spark: what comes back, and what a user is told when something is wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from headrace import blocking
from headrace.embedded import Embedded


@pytest.fixture(scope="module")
def numbers(mq: Embedded) -> Iterator[str]:
    """A topic with the texts 0 to 999, keys and tags."""
    with blocking.Producer(nameserver=mq.nameserver) as producer:
        producer.send_many(
            [b"%d" % n for n in range(1000)],
            topic="numbers",
            keys=[f"key-{n}" for n in range(1000)],
            tags=["even" if n % 2 == 0 else "odd" for n in range(1000)],
        )
        yield "numbers"


def read(spark: SparkSession, mq: Embedded, **options: str) -> DataFrame:
    return (
        spark.read.format("headrace").option("nameserver", mq.nameserver).options(**options).load()
    )


@pytest.mark.slow
def test_a_topic_is_a_table(spark: SparkSession, mq: Embedded, numbers: str) -> None:
    table = read(spark, mq, topic=numbers, splitBytes="20000")
    assert table.rdd.getNumPartitions() > 4
    rows = table.selectExpr("*", "cast(value as string) as text").collect()
    assert sorted(int(row.text) for row in rows) == list(range(1000))
    assert {row.keys for row in rows} == {f"key-{n}" for n in range(1000)}
    places = {(row.queue, row.queue_offset) for row in rows}
    ends = {n: 1 + max(offset for queue, offset in places if queue == n) for n, _ in places}
    assert places == {(queue, offset) for queue, end in ends.items() for offset in range(end)}

    odd = read(spark, mq, topic=numbers, filter="odd")
    assert odd.count() == 500
    assert odd.where("queue = 1").where("tags = 'even'").count() == 0
    ending = f'{{"{numbers}": {{"broker-a": {{"0": 9, "1": 0, "2": 0, "3": 0}}}}}}'
    nine = read(spark, mq, topic=numbers, ending=ending)
    assert sorted(row.queue_offset for row in nine.collect()) == list(range(9))
    assert read(spark, mq, topic=numbers, starting="latest").count() == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topik": "x"}, "OptionError: option topik='x': unknown.*did you mean topic?"),
        ({"topic": "nowhere"}, "TopicNotFound: topic nowhere is on no broker"),
        ({"nameserver": "127.0.0.1:1"}, "no nameserver answered: cannot connect to 127.0.0.1:1"),
        (
            {"starting": '{"numbers": {"broker-a": {"0": 99999}}}'},
            "OffsetOutOfRange: option starting: offset 99999 of numbers/broker-a/0",
        ),
        ({"maxBytes": "5"}, "OptionError: option maxBytes='5': limits a streaming trigger"),
        ({"encoding": "json"}, "OptionError: option encoding='json'.*option schema"),
    ],
)
def test_what_is_wrong_is_said_before_a_task_starts(
    spark: SparkSession, mq: Embedded, numbers: str, options: dict[str, str], message: str
) -> None:
    tracker = spark.sparkContext.statusTracker()
    jobs = len(tracker.getJobIdsForGroup())
    with pytest.raises(Exception, match=rf"(?s){message}") as raised:
        read(spark, mq, **({"topic": numbers} | options)).collect()
    assert type(raised.value).__name__ == "AnalysisException"
    assert len(tracker.getJobIdsForGroup()) == jobs


def test_a_task_needs_neither_an_event_loop_nor_the_broker(mq: Embedded, numbers: str) -> None:
    """Reads a range as a task does, in a process of its own."""
    program = """
import pickle, sys
from pyspark import cloudpickle
reader, partition = pickle.loads(sys.stdin.buffer.read())
print(sum(batch.num_rows for batch in reader.read(partition)))
print(*sorted({name.partition(".")[0] for name in sys.modules}
              & {"trio", "anyio", "headrace_broker", "headrace_nameserver", "pydantic", "click"}))
"""
    from pyspark import cloudpickle

    import pyspark_headrace

    source = pyspark_headrace.DefaultSource({"nameserver": mq.nameserver, "topic": numbers})
    reader: Any = source.reader(source.schema())
    (partition,) = reader.partitions()
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=cloudpickle.dumps((reader, partition)),
        capture_output=True,
        check=True,
    )
    assert done.stdout.decode().splitlines() == ["1000", ""]
