"""One small Spark session for all tests of a worker, a broker for each module, and its clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import headrace
from headrace import blocking
from headrace.embedded import Embedded
from headrace.spark.sessions import session

# Small and quick to start: the tests share two cores with everything else.
SETTINGS = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.log.level": "ERROR",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The session; whoever starts a query stops it."""
    folder: Path = tmp_path_factory.mktemp("spark")
    places = {
        "spark.local.dir": str(folder / "local"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    running = session("tests", master="local[2]", settings=SETTINGS | places)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def mq() -> Iterator[Embedded]:
    """A broker of the module's own, on real sockets, as tasks are processes of their own."""
    with headrace.embedded() as running:
        yield running


@pytest.fixture
def producer(mq: Embedded) -> Iterator[blocking.Producer]:
    with blocking.Producer(nameserver=mq.nameserver) as running:
        yield running


@pytest.fixture
def admin(mq: Embedded) -> Iterator[blocking.Admin]:
    with blocking.Admin(nameserver=mq.nameserver) as running:
        yield running
