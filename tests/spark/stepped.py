"""The source and sink of headrace, told apart by steps, at each of which somebody may be killed.

``format("stepped")`` is ``format("headrace")``, but says every step, and the process that is at
it, to a socket and waits for the answer. ``python -m tests.spark.stepped JOB`` is a driver that
copies a topic until it is killed.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSourceStreamReader, DataSourceStreamWriter
from pyspark.sql.types import StructType

from headrace.spark import session
from headrace.spark.source import HeadraceSource
from tests.spark.conftest import SETTINGS

SOCKET = "HEADRACE_STEPS"
PLANNING = ("latest", "partitions", "source-commit")
TASK = ("read", "reading", "was-read", "write", "written")
COMMIT = ("commit", "committed")
STEPS = (*PLANNING, *TASK, *COMMIT)
# The query failed because somebody was killed, who needs a moment to come back.
_PAUSE_S = 0.2


def step(name: str) -> None:
    """Say it, and wait until it may go on."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[SOCKET])
        connection.sendall(json.dumps({"step": name, "pid": os.getpid()}).encode() + b"\n")
        connection.recv(1)


class SteppedSource(HeadraceSource):
    """Readers and writers that say their steps."""

    @classmethod
    def name(cls) -> str:
        return "stepped"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        reader = super().streamReader(schema)
        reader.__class__ = _stepped_reader(type(reader))
        return reader

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        writer = super().streamWriter(schema, overwrite)
        writer.__class__ = _stepped_writer(type(writer))
        return writer


def _stepped_reader(base: Any) -> Any:
    class SteppedReader(base):
        def latestOffset(self, *arguments: Any) -> Any:  # noqa: N802
            step("latest")
            return base.latestOffset(self, *arguments)

        def partitions(self, *arguments: Any) -> Any:
            step("partitions")
            return base.partitions(self, *arguments)

        def read(self, partition: Any) -> Iterator[Any]:
            step("read")
            for number, batch in enumerate(base.read(self, partition)):
                yield batch
                if number == 0:
                    step("reading")
            step("was-read")

        def commit(self, end: Any) -> None:
            step("source-commit")
            base.commit(self, end)

    return SteppedReader


def _stepped_writer(base: Any) -> Any:
    class SteppedWriter(base):
        def write(self, iterator: Any) -> Any:
            step("write")
            message = base.write(self, iterator)
            step("written")
            return message

        def commit(self, messages: Any, batchId: int) -> None:  # noqa: N803
            step("commit")
            base.commit(self, messages, batchId)
            step("committed")

    return SteppedWriter


def copy(spark: SparkSession, job: dict[str, str]) -> None:
    """From one topic into the other, until it fails."""
    (
        spark.readStream.format("stepped")
        .option("nameserver", job["nameserver"])
        .option("topic", job["source"])
        .option("group", "copying")
        .option("starting", "earliest")
        .load()
        .selectExpr("keys as key", "value")
        .writeStream.format("stepped")
        .option("nameserver", job["nameserver"])
        .option("topic", job["target"])
        .option("checkpointLocation", job["checkpoint"])
        .start()
        .awaitTermination()
    )


def main() -> None:
    # Tasks may fail: their workers are killed.
    spark = session("kills", master="local[2,8]", settings=SETTINGS)
    spark.dataSource.register(SteppedSource)
    while True:
        try:
            copy(spark, json.loads(sys.argv[1]))
        except StreamingQueryException as error:
            sys.stderr.write(f"the query is started again: {error}\n")
            time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main()
