"""The Spark source against the real Apache RocketMQ broker, called as Spark calls it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from headrace import blocking
from headrace.errors import RouteNotFound
from headrace.spark.cluster import Cluster, Topics
from headrace.spark.errors import OptionError, TopicRecreated
from headrace.spark.read.limited_stream import LimitedStreamReader
from headrace.spark.source import HeadraceSource
from tests.conformance.peer import TIMEOUT_MS
from tests.support.until import wait_until

TIMEOUT_S = 60
ROWS = 5000

pytestmark = [pytest.mark.conformance, pytest.mark.slow]


@pytest.fixture(scope="module")
def topic(nameserver: str) -> str:
    """A topic with ROWS messages, every other one with the tag odd, that can all be read."""
    with blocking.Admin(nameserver=nameserver) as admin:
        admin.create_topic("spark", queues=4)
    with blocking.Producer(nameserver=nameserver, timeout_ms=TIMEOUT_MS) as producer:
        bodies = [b"%d" % n for n in range(ROWS)]
        producer.send_many(bodies, topic="spark", tags=["odd" * (n % 2) for n in range(ROWS)])
    wait_for_route_and(lambda: sum(max_offsets(nameserver, "spark").values()) == ROWS)
    return "spark"


def deleted(admin: blocking.Admin, topic: str) -> bool:
    admin.delete_topic(topic)
    return True


def wait_for_route_and(is_so: Callable[[], bool]) -> None:
    """Until it is; meanwhile there may be no route.

    Apache's broker closes the connection to its nameserver when an answer is late, and is unknown
    to it until it registers again, which it does every 30 s.
    """

    def is_known() -> bool:
        with contextlib.suppress(RouteNotFound):
            return is_so()
        return False

    wait_until(is_known, limit_s=TIMEOUT_S)


def max_offsets(nameserver: str, topic: str) -> dict[Any, int]:
    with Cluster([nameserver]) as cluster:
        return cluster.max_offsets(cluster.queues(Topics((topic,))))


def source(nameserver: str, **options: str) -> HeadraceSource:
    return HeadraceSource({"nameserver": nameserver, **options})


def values(reader: Any, tasks: Any) -> list[int]:
    batches = itertools.chain.from_iterable(reader.read(task) for task in tasks)
    return [int(value) for batch in batches for value in batch.column("value").to_pylist()]


def test_a_batch_reads_everything_and_filters(nameserver: str, topic: str) -> None:
    everything = source(nameserver, topic=topic, splitBytes="100000")
    reader = everything.reader(everything.schema())
    tasks = reader.partitions()
    assert len(tasks) > 4
    assert sorted(values(reader, tasks)) == list(range(ROWS))

    odd = source(nameserver, topic="sp*", filter="odd")
    reader = odd.reader(odd.schema())
    assert sorted(values(reader, reader.partitions())) == list(range(1, ROWS, 2))

    sql = source(nameserver, topic=topic, filter="a > 3")
    with pytest.raises(OptionError, match=r"does not support .* SQL92"):
        sql.reader(sql.schema()).partitions()


def test_a_stream_reads_in_bounds_and_shows_its_lag(nameserver: str, topic: str) -> None:
    stream = source(nameserver, topic=topic, starting="earliest", group="spark-lag", maxRows="2000")
    reader = stream.streamReader(stream.schema())
    assert isinstance(reader, LimitedStreamReader)
    start, rows, lags = reader.initialOffset(), [], []
    while (end := reader.latestOffset(start, reader.getDefaultReadLimit())) != start:
        rows.append(values(reader, reader.partitions(start, end)))
        lags.append((reader.reportLatestOffset() or {})["lagMessages"])
        start = end
    reader.stop()
    assert [len(each) for each in rows] == [2000, 2000, 1000]
    assert sorted(itertools.chain.from_iterable(rows)) == list(range(ROWS))
    assert lags == [5000, 3000, 1000]
    with blocking.Admin(nameserver=nameserver) as admin:
        assert sum(each.lag for each in admin.lag("spark-lag", topic)) == 0
        assert admin.members("spark-lag") == {}


def test_a_shorter_queue_tells_that_a_topic_was_made_anew(nameserver: str) -> None:
    with blocking.Admin(nameserver=nameserver) as admin:
        admin.create_topic("anew", queues=1)
        with blocking.Producer(nameserver=nameserver, timeout_ms=TIMEOUT_MS) as producer:
            producer.send_many([b"x"] * 5, topic="anew")
        wait_for_route_and(lambda: sum(max_offsets(nameserver, "anew").values()) == 5)
        stream = source(nameserver, topic="anew")
        reader = stream.streamReader(stream.schema())
        assert isinstance(reader, LimitedStreamReader)
        start = reader.initialOffset()
        wait_for_route_and(partial(deleted, admin, "anew"))
        admin.create_topic("anew", queues=1)
    wait_for_route_and(lambda: sum(max_offsets(nameserver, "anew").values()) == 0)
    with pytest.raises(TopicRecreated, match="queue 0 ends at 0, but the checkpoint is at 5"):
        reader.latestOffset(start, ReadAllAvailable())
    reader.stop()
