"""Errors that users see without a traceback; a stream that reads fewer topics."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import SparkSession

from headrace import blocking
from headrace.embedded import Embedded
from headrace.spark.brief import brief, brief_rows
from headrace.spark.cluster import Topics
from headrace.spark.errors import CheckpointMismatch, SchemaError
from headrace.spark.options import read_options
from headrace.spark.read.checkpoint import StreamOffset
from headrace.spark.read.schema import source_schema
from headrace.spark.read.stream import StreamReader
from headrace.spark.sessions import session
from tests.spark.streams import q


@brief
def method() -> None:
    raise SchemaError("wrong")


@brief_rows
def rows() -> Iterator[int]:
    yield 1
    raise SchemaError("wrong")


@pytest.mark.parametrize("name", ["pyspark.daemon", "pyspark.sql.worker.plan_data_source_read"])
def test_a_worker_of_spark_leaves_out_its_traceback(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = SimpleNamespace(__spec__=SimpleNamespace(name=name))
    for call in (method, lambda: list(rows())):
        monkeypatch.setitem(sys.modules, "__main__", main)
        monkeypatch.delenv("SPARK_HIDE_TRACEBACK", raising=False)
        with pytest.raises(SchemaError):
            call()
        assert os.environ.pop("SPARK_HIDE_TRACEBACK") == "1"


def test_other_processes_keep_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARK_HIDE_TRACEBACK", raising=False)
    with pytest.raises(SchemaError):
        method()
    assert "SPARK_HIDE_TRACEBACK" not in os.environ


@pytest.mark.slow
def test_an_error_is_in_the_first_line(spark: SparkSession, mq: Embedded) -> None:
    reader = spark.read.format("headrace").option("nameserver", mq.nameserver)
    with pytest.raises(Exception, match="SchemaError") as raised:
        reader.options(topic="x", schema="Id int, id int").load()
    first, *others = str(raised.value).strip().splitlines()
    assert "SchemaError: the bodies' schema has Id, id, a duplicate column" in first
    assert len(others) <= 1


def test_an_active_session_of_spark_connect_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, str] = {}
    active = SimpleNamespace(conf=SimpleNamespace(set=given.__setitem__))
    monkeypatch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
    monkeypatch.setattr("pyspark.sql.SparkSession.getActiveSession", lambda: active)
    found: Any = session(settings={"spark.sql.shuffle.partitions": "2"})
    assert found is active
    assert given == {"spark.sql.shuffle.partitions": "2"}


# --- fewer topics ---------------------------------------------------------------------------------


def test_a_stream_may_drop_a_topic(
    mq: Embedded, admin: blocking.Admin, caplog: pytest.LogCaptureFixture
) -> None:
    for topic in ("kept", "dropped"):
        admin.create_topic(topic, queues=1)

    def reader(topics: str, **options: str) -> StreamReader:
        given = {"nameserver": mq.nameserver, "topic": topics, "starting": "earliest"} | options
        return StreamReader(read_options(given), None, source_schema())

    both = reader("kept,dropped")
    start = both.initialOffset()
    both.stop()
    with blocking.Producer(nameserver=mq.nameserver) as producer:
        for topic in ("kept", "dropped"):
            producer.send_many([b"x"] * 3, topic=topic)
    strict = reader("kept")
    with pytest.raises(CheckpointMismatch, match=r"stop reading dropped with .*DataLoss=false"):
        strict.partitions(start, start)
    strict.stop()
    running = reader("kept", failOnDataLoss="false")
    running.partitions(start, start)
    with caplog.at_level(logging.WARNING, "headrace.spark"):
        end = running.latestOffset()
        (task,) = running.partitions(start, end)
    running.stop()
    assert [each.topic for each in task.ranges] == ["kept"]  # type: ignore[attr-defined]
    assert set(end["topics"]) == {"kept"}


@pytest.mark.parametrize("may_drop", [True, False])
def test_a_checkpoint_of_other_topics_only_is_refused(may_drop: bool) -> None:
    text = StreamOffset({q("a", 0): 1, q("b", 0): 2}).to_json()
    with pytest.raises(CheckpointMismatch, match=r"belongs to topic a,b, .* reads c\. Give .*ion$"):
        StreamOffset.from_json(text, Topics(("c",)), may_drop=may_drop)
    if may_drop:
        kept = StreamOffset.from_json(text, Topics(("a", "c")), may_drop=True)
        assert kept.offsets == {q("a", 0): 1}
