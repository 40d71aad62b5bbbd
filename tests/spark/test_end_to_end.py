"""Topics through Spark into topics: what must work on every PySpark, run on the oldest too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql
from pyspark.sql.streaming.listener import StreamingQueryProgress
from pyspark.sql.streaming.query import StreamingQuery

from headrace.blocking import Admin, Producer
from headrace.embedded import Embedded

pytestmark = pytest.mark.slow


def fill(mq: Embedded, topic: str, numbers: range) -> None:
    """Orders of these numbers, keyed by customer."""
    bodies = [json.dumps({"number": n, "customer": f"c{n % 7}"}).encode() for n in numbers]
    with Producer(nameserver=mq.nameserver) as producer:
        producer.send_many(bodies, topic=topic, keys=[f"c{n % 7}" for n in numbers])


def create(mq: Embedded, *topics: str) -> None:
    with Admin(nameserver=mq.nameserver) as admin:
        for topic in topics:
            admin.create_topic(topic, queues=4)


def read(spark: SparkSession, mq: Embedded, topic: str, **options: str) -> DataFrame:
    reader = spark.read.format("headrace").option("nameserver", mq.nameserver)
    return reader.options(topic=topic, **options).load()


def values(rows: DataFrame) -> list[str]:
    return sorted(row[0] for row in rows.select(rows.value.cast("string")).collect())


def test_a_batch_goes_in_and_out(spark: SparkSession, mq: Embedded) -> None:
    create(mq, "numbers")
    rows = spark.range(1000).select(
        sql.concat(sql.lit("k"), sql.col("id") % 5).alias("key"),
        sql.lit("even").alias("tags"),
        sql.col("id").cast("string").alias("value"),
    )
    rows.write.format("headrace").option("nameserver", mq.nameserver).option(
        "topic", "numbers"
    ).mode("append").save()
    back = read(spark, mq, "numbers")
    assert values(back) == sorted(map(str, range(1000)))
    first = back.where("keys = 'k3' and tags = 'even'").orderBy("queue_offset").first()
    assert first is not None
    assert (bytes(first.value), first.topic) == (b"3", "numbers")
    by_key = back.groupBy("keys").agg(sql.count_distinct("queue").alias("queues")).collect()
    assert [row.queues for row in by_key] == [1] * 5


def start(spark: SparkSession, mq: Embedded, folder: Path) -> StreamingQuery:
    """Orders in, their numbers by customer out."""
    orders = (
        spark.readStream.format("headrace")
        .option("nameserver", mq.nameserver)
        .option("topic", "orders")
        .option("group", "numbering")
        .option("starting", "earliest")
        .option("schema", "number BIGINT, customer STRING")
        .load()
    )
    out = orders.select("customer", sql.col("number").cast("string").alias("value"))
    return (
        out.withColumnRenamed("customer", "key")
        .writeStream.format("headrace")
        .option("nameserver", mq.nameserver)
        .option("topic", "ordered")
        .option("checkpointLocation", str(folder))
        .start()
    )


def run(query: StreamingQuery) -> list[StreamingQueryProgress]:
    """Let it process all there is, and stop it; its progress, batch by batch."""
    query.processAllAvailable()
    progress = query.recentProgress
    query.stop()
    return progress


def test_a_stream_goes_on_at_its_checkpoint(
    spark: SparkSession, mq: Embedded, tmp_path: Path
) -> None:
    create(mq, "orders", "ordered")
    fill(mq, "orders", range(500))
    assert sum(batch["numInputRows"] for batch in run(start(spark, mq, tmp_path))) == 500
    fill(mq, "orders", range(500, 800))
    assert sum(batch["numInputRows"] for batch in run(start(spark, mq, tmp_path))) == 300
    assert values(read(spark, mq, "ordered")) == sorted(map(str, range(800)))
