"""One Spark process: ``python -m tests.bench.spark_job JOB`` with a ``Job`` as JSON.

Runs the cases one after the other in one warm session and prints a line for each: its ``Report`` as
JSON. Needs only what a Spark driver has, so that it runs on any PySpark.
"""

from __future__ import annotations

import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.spark import session
from tests.bench.processes import cpu_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from py4j.java_gateway import JavaObject
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

SETTINGS = {
    "spark.driver.memory": "2g",
    "spark.log.level": "ERROR",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


class Case(msgspec.Struct, frozen=True):
    """A single measurement.

    work: a name in ``WORKS``. topic: read from. target: written to. rows: how many there are.
    """

    name: str
    work: str
    topic: str
    rows: int
    body_bytes: int = 0
    target: str = ""
    is_exactly_once: bool = False
    is_warm_up: bool = False


class Job(msgspec.Struct, frozen=True):
    """format: ``"headrace"`` or ``"kafka"``. address: of the nameserver or of Kafka.

    jars: what the connector needs, as a class path.
    """

    format: str
    address: str
    broker_pid: int
    master: str
    cases: list[Case]
    jars: str = ""


class Report(msgspec.Struct, frozen=True):
    """rate: rows a second. broker_cpu_us: per row."""

    name: str
    rows: int
    seconds: float
    rate: float
    broker_cpu_us: float


class Lost(Exception):
    """Other rows came out than went in."""


class Bench:
    """A session and the peer that it works with."""

    def __init__(self, job: Job) -> None:
        self._job = job
        settings = SETTINGS | ({"spark.driver.extraClassPath": job.jars} if job.jars else {})
        self.spark: SparkSession = session("bench", master=job.master, settings=settings)
        self._executions = _Executions(self.spark)

    def run(self, case: Case) -> Report:
        """Raises Lost when rows are missing, or there are too many."""
        self._executions.begin()
        with tempfile.TemporaryDirectory() as checkpoint:
            began, broker = time.perf_counter(), cpu_s([self._job.broker_pid])
            rows = WORKS[case.work](self, case, checkpoint)
            seconds = time.perf_counter() - began
            broker_cpu = cpu_s([self._job.broker_pid]) - broker
        if rows is None:
            rows = self._count(case.target)
        if rows != case.rows:
            raise Lost(f"{rows} of {case.rows} rows of {case}")
        return Report(case.name, rows, seconds, rows / seconds, broker_cpu / rows * 1e6)

    def read_batch(self, case: Case, _: str) -> int:
        """``spark.read`` into nothing."""
        self._source(self.spark.read, case).load().write.format("noop").mode("overwrite").save()
        return self._executions.rows()

    def read_stream(self, case: Case, checkpoint: str) -> int:
        """``spark.readStream`` of all there is, into nothing."""
        stream = self._source(self.spark.readStream, case).load()
        return _available_now(stream.writeStream.format("noop"), checkpoint)

    def write_batch(self, case: Case, _: str) -> None:
        """``df.write`` of rows that Spark makes."""
        self._sink(self._made_rows(case).write, case).mode("append").save()

    def _count(self, topic: str) -> int:
        """The number of rows that can be read there."""
        return self._source(self.spark.read, Case("count", "batch", topic, 0)).load().count()

    def copy_stream(self, case: Case, checkpoint: str) -> int:
        """From one topic into another, as a stream."""
        stream = self._source(self.spark.readStream, case).load().select("value")
        return _available_now(self._sink(stream.writeStream, case), checkpoint)

    def _made_rows(self, case: Case) -> DataFrame:
        body = f"cast(rpad(cast(id as string), {case.body_bytes}, 'x') as binary) as value"
        return self.spark.range(case.rows).selectExpr(body)

    def _source(self, reader: Any, case: Case) -> Any:
        job = self._job
        if job.format == "kafka":
            options = {"kafka.bootstrap.servers": job.address, "subscribe": case.topic}
            options["startingOffsets"] = "earliest"
        else:
            options = {"nameserver": job.address, "topic": case.topic, "starting": "earliest"}
        return reader.format(job.format).options(**options)

    def _sink(self, writer: Any, case: Case) -> Any:
        job = self._job
        place = "kafka.bootstrap.servers" if job.format == "kafka" else "nameserver"
        options = {place: job.address, "topic": case.target}
        if job.format == "headrace":
            options["exactlyOnce"] = str(case.is_exactly_once).lower()
        return writer.format(job.format).options(**options)


# Each returns the rows that it had; None: they are to be counted in the target.
WORKS: dict[str, Callable[[Bench, Case, str], int | None]] = {
    "batch": Bench.read_batch,
    "stream": Bench.read_stream,
    "write": Bench.write_batch,
    "copy": Bench.copy_stream,
}


def _available_now(writer: Any, checkpoint: str) -> int:
    """Rows that a query has read until it had all."""
    query: StreamingQuery = (
        writer.trigger(availableNow=True).option("checkpointLocation", checkpoint).start()
    )
    query.awaitTermination()
    return sum(progress["numInputRows"] for progress in query.recentProgress)


class _Executions:
    """Spark's own counts of the queries that it runs."""

    def __init__(self, spark: SparkSession) -> None:
        self._events: JavaObject = spark.sparkContext._jsc.sc().listenerBus()
        self._store: JavaObject = spark._jsparkSession.sharedState().statusStore()
        self._before = 0

    def begin(self) -> None:
        """Forget those so far."""
        self._before = self._store.executionsCount()

    def rows(self) -> int:
        """Rows of the node that had most, since then."""
        self._events.waitUntilEmpty()
        since = self._store.executionsList().drop(self._before).iterator()
        rows = [0]
        while since.hasNext():
            rows += self._rows_by_node(since.next())
        return max(rows)

    def _rows_by_node(self, execution: JavaObject) -> Iterator[int]:
        values = dict(_pairs(self._store.executionMetrics(execution.executionId()).iterator()))
        metrics = execution.metrics().iterator()
        while metrics.hasNext():
            metric = metrics.next()
            if metric.name() == "number of output rows":
                yield int(values.get(metric.accumulatorId(), "0").replace(",", ""))


def _pairs(iterator: JavaObject) -> Iterator[tuple[int, str]]:
    while iterator.hasNext():
        pair = iterator.next()
        yield pair._1(), pair._2()


def main() -> None:
    job = msgspec.json.decode(sys.argv[1], type=Job)
    bench = Bench(job)
    for case in job.cases:
        report = bench.run(case)
        if not case.is_warm_up:
            sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
            sys.stdout.flush()
    bench.spark.stop()


if __name__ == "__main__":
    main()
