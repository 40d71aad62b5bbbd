"""A Spark stream that appends what it reads to a folder: ``python -m tests.chaos.stream JOB``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAUSE_S = 1.0


class Stream:
    """The driver as a process of its own."""

    def __init__(self, folder: Path, nameserver: str, topics: Sequence[str]) -> None:
        self._output = folder / "spark-output"
        self._folder = folder
        self._job = {
            "nameserver": nameserver,
            "topics": ",".join(topics),
            "output": str(self._output),
            "checkpoint": str(folder / "spark-checkpoint"),
            "local": str(folder / "spark-local"),
        }
        self._driver: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self._folder / "spark.log").open("ab") as log:
            self._driver = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.stream", json.dumps(self._job)],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},  # for the workers
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self) -> None:
        """End it, and Java with it."""
        if self._driver:
            os.killpg(self._driver.pid, signal.SIGKILL)
            self._driver.wait()

    def read(self) -> set[str]:
        """The messages that committed micro-batches have written."""
        files = set()
        for log in self._output.glob("_spark_metadata/[0-9]*"):
            entries = [json.loads(line) for line in log.read_text().splitlines()[1:]]
            files |= {entry["path"].removeprefix("file://") for entry in entries}
        return {line for path in files for line in Path(path).read_text().splitlines()}


def copy(job: dict[str, str]) -> None:
    """Append until the driver is killed; a query that fails resumes from its checkpoint."""
    from pyspark.errors import StreamingQueryException

    from headrace.spark import session
    from tests.spark.conftest import SETTINGS

    own = {
        # A query that fails logs a hundred lines of Java, which say nothing of headrace.
        "spark.log.level": "OFF",
        "spark.local.dir": job["local"],
        "spark.sql.warehouse.dir": job["local"],
    }
    spark = session("chaos", master="local[2,8]", settings=SETTINGS | own)
    rows = (
        spark.readStream.format("headrace")
        .option("nameserver", job["nameserver"])
        .option("topic", job["topics"])
        .option("starting", "earliest")
        .load()
        .selectExpr("split(cast(value as string), ' ')[0] as value")
    )
    while True:
        query = (
            rows.writeStream.format("text")
            .option("path", job["output"])
            .option("checkpointLocation", job["checkpoint"])
            .trigger(processingTime="5 seconds")
            .start()
        )
        try:
            query.awaitTermination()
        except StreamingQueryException as error:
            sys.stderr.write(f"the query is started again: {str(error).splitlines()[0]}\n")
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    copy(json.loads(sys.argv[1]))
