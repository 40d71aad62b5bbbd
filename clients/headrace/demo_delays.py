"""The Spark half of the demo: delays by carrier and week, from one topic into another.

A program of its own, ``python -m headrace.demo_delays NAMESERVER FOLDER``, so that the demo can
kill it: each line on its standard input lets it process all that has come, each batch and each time
it has caught up is a line of JSON on its standard output, and the end of its input ends it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import msgspec
from pyspark.sql import functions as sql
from pyspark.sql.streaming.listener import StreamingQueryListener

from headrace.demo import TOPIC
from headrace.demo_spark import DELAYS, Progress
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

GROUP = "demo-delays"
WINDOW = "7 days"
# Queues are read side by side, each in the order of time: some hours apart, hardly days.
LATEST = "14 days"
BATCH_ROWS = 60_000
# Numbers are text in the flights, and NA is none.
_BODY = "carrier STRING, time_hour STRING, dep_delay STRING, arr_delay STRING"
_SETTINGS = {
    # It lives for a minute, so most of what the second compiler does would never pay.
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
    # The demo shares its cores with the broker, and 16 carriers are one partition's work.
    "spark.sql.shuffle.partitions": "1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
}


def delays(flights: DataFrame) -> DataFrame:
    """Sums by carrier and week, once it is over, as messages."""
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


def start(spark: SparkSession, nameserver: str, folder: str) -> StreamingQuery:
    """The query, from where its checkpoint in ``folder`` ends."""
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
        .option("checkpointLocation", folder)
        .outputMode("append")
        .start()
    )


class _Reporter(StreamingQueryListener):
    """A line for each batch."""

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 - Spark's name
        pass

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        _say(Progress(event.progress.batchId, event.progress.numInputRows))

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802
        pass

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        pass


def _say(progress: Progress) -> None:
    sys.stdout.write(msgspec.json.encode(progress).decode() + "\n")
    sys.stdout.flush()


def main() -> None:
    """Run the query as the lines of standard input ask."""
    nameserver, folder = sys.argv[1:]
    spark = session("headrace demo", master="local[2]", settings=_SETTINGS)
    spark.streams.addListener(_Reporter())
    query = start(spark, nameserver, folder)
    for _ in sys.stdin:
        query.processAllAvailable()
        last = query.lastProgress
        _say(Progress(last["batchId"] if last else -1))
    query.stop()
    spark.stop()


if __name__ == "__main__":
    main()
