"""Computes delays by carrier and week, from one topic into another.

A separate program, ``python -m examples.flights.delays NAMESERVER DIRECTORY``, so that it
can be killed. Each line on standard input makes it process all messages that have arrived; the
first one also starts the query, so that the session can start before there is a topic to read. It
writes a line of JSON to standard output for each micro-batch and whenever it has caught up. It
exits at the end of its input.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import msgspec
from pyspark.sql import functions as sql
from pyspark.sql.streaming.listener import StreamingQueryListener

from examples.flights.ledger import TOPIC
from examples.flights.stream import DELAYS, Progress
from headrace.spark.sessions import session

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
    )
    from pyspark.sql.streaming.query import StreamingQuery

GROUP = "flight-delays"
WINDOW = "7 days"
# Queues are read in parallel, each in order of time: they diverge by hours, rarely by days.
LATEST = "14 days"
BATCH_ROWS = 60_000
# In the flights, numbers are text and NA stands for null.
_BODY = "carrier STRING, time_hour STRING, dep_delay STRING, arr_delay STRING"
_SETTINGS = {
    # The program runs for a minute, too short for most C2 compilations to pay off.
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
    # The program shares its cores with the broker, and 16 carriers fit one partition.
    "spark.sql.shuffle.partitions": "1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
}


def delays(flights: DataFrame) -> DataFrame:
    """Messages with the sums by carrier and week, each produced once its week is over."""
    departure, arrival = sql.col("dep_delay").try_cast("int"), sql.col("arr_delay").try_cast("int")
    sums = (
        flights.withColumn("time", sql.to_timestamp("time_hour"))
        .withWatermark("time", LATEST)
        .groupBy(sql.window("time", WINDOW), "carrier")
        .agg(
            sql.count("*").alias("flights"),
            sql.count(departure).alias("departed"),
            _sum(departure).alias("departure_minutes"),
            sql.count(arrival).alias("arrived"),
            _sum(arrival).alias("arrival_minutes"),
        )
    )
    week = sql.date_format("window.start", "yyyy-MM-dd").alias("week")
    return sums.select(
        sql.concat_ws("/", "carrier", week).alias("key"),
        sql.col("carrier").alias("tags"),
        sql.to_json(
            sql.struct(
                "carrier",
                week,
                "flights",
                "departed",
                "departure_minutes",
                "arrived",
                "arrival_minutes",
            )
        ).alias("value"),
    )


def _sum(minutes: Column) -> Column:
    return sql.coalesce(sql.sum(minutes), sql.lit(0))


def start(spark: SparkSession, nameserver: str, directory: str) -> StreamingQuery:
    """Start the query from its checkpoint in ``directory``."""
    flights = (
        spark.readStream.format("headrace")
        .option("nameserver", nameserver)
        .option("topic", TOPIC)
        .option("group", GROUP)
        .option("starting", "earliest")
        .option("maxRows", str(BATCH_ROWS))
        .option("schema", _BODY)
        .load()
    )
    return (
        delays(flights)
        .writeStream.format("headrace")
        .option("nameserver", nameserver)
        .option("topic", DELAYS)
        .option("checkpointLocation", directory)
        .outputMode("append")
        .start()
    )


class _Reporter(StreamingQueryListener):
    """Writes a line for each micro-batch."""

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 - Spark's name
        pass

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        _write(Progress(event.progress.batchId, event.progress.numInputRows))

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802
        pass

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        pass


def _write(progress: Progress) -> None:
    sys.stdout.write(msgspec.json.encode(progress).decode() + "\n")
    sys.stdout.flush()


def main() -> None:
    """Process all available messages for each line of standard input."""
    nameserver, directory = sys.argv[1:]
    spark = session("headrace flights", master="local[2]", settings=_SETTINGS)
    spark.streams.addListener(_Reporter())
    query = None
    for _ in sys.stdin:
        query = query or start(spark, nameserver, directory)
        query.processAllAvailable()
        last = query.lastProgress
        _write(Progress(last["batchId"] if last else -1))
    if query:
        query.stop()
    spark.stop()


if __name__ == "__main__":
    main()
