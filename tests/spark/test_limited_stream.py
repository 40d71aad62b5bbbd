"""The streaming reader for PySpark 4.2 and later, called as Spark calls it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import pytest

from headrace import blocking
from headrace.errors import NameserverUnavailable
from headrace.spark.cluster import Cluster
from headrace.spark.errors import (
    BrokerMissing,
    CheckpointMismatch,
    DataLoss,
    OptionError,
    TopicDeleted,
    TopicNotFound,
    TopicRecreated,
)
from headrace.spark.options import read_options
from headrace.spark.read.readers import stream_reader
from headrace.spark.read.schema import source_schema
from headrace.spark.retry import READING, Patience
from headrace_protocol.admin_headers import DeleteTopicHeader
from headrace_protocol.codes import RequestCode
from headrace_protocol.drivers.blocking import BlockingConnection
from tests.spark.brokers import broker
from tests.spark.streams import offsets, q, ranges, restored, row_count

pytest.importorskip("pyspark.sql.streaming.datasource", reason="PySpark before 4.2: no limits")

from collections.abc import Iterator
from pathlib import Path

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows

from headrace.embedded import Embedded
from headrace.spark.read.limited_stream import LimitedStreamReader

EVERYTHING = ReadAllAvailable()
Readers = Callable[..., LimitedStreamReader]


@pytest.fixture
def reader(mq: Embedded) -> Iterator[Readers]:
    """Makes readers."""
    with ExitStack() as stack:

        def made(topic: str, patience: Patience = READING, **options: str) -> LimitedStreamReader:
            given = {"nameserver": mq.nameserver, "topic": topic, **options}
            chosen = replace(read_options(given), patience=patience)
            running = stream_reader(chosen, None, source_schema())
            assert isinstance(running, LimitedStreamReader)
            stack.callback(running.stop)
            return running

        yield made


# -- offsets ---------------------------------------------------------------------------------------


def test_a_stream_begins_with_what_comes_unless_told_otherwise(
    reader: Readers, producer: blocking.Producer
) -> None:
    producer.send_many([b"x"], topic="begin", queue=None)
    producer.send_many([b"x"] * 4, topic="begin", queue=q("begin", 2))
    before = offsets(reader("begin").initialOffset(), "begin")
    assert before[("broker-a", 2)] >= 4
    earliest = offsets(reader("begin", starting="earliest").initialOffset(), "begin")
    assert set(earliest.values()) == {0}
    given = '{"begin": {"broker-a": {"2": 3}}}'
    there = offsets(reader("begin", starting=given).initialOffset(), "begin")
    assert there[("broker-a", 2)] == 3
    assert there[("broker-a", 1)] == 0


def test_offsets_go_on_and_stand_still_when_there_is_nothing(
    reader: Readers, producer: blocking.Producer
) -> None:
    producer.send_many([b"x"], topic="go", queue=None)
    running = reader("go")
    start = running.initialOffset()
    assert running.latestOffset(restored(start), EVERYTHING) == start
    producer.send_many([b"x"] * 3, topic="go", queue=q("go", 1))
    end = running.latestOffset(restored(start), EVERYTHING)
    first = offsets(start, "go")[("broker-a", 1)]
    assert ranges(running, start, end) == [("broker-a", 1, first, first + 3)]
    assert ranges(reader("go"), start, end) == [("broker-a", 1, first, first + 3)]
    assert json.dumps(running.latestOffset(restored(end), EVERYTHING)) == json.dumps(end)
    assert ranges(running, end, end) == []


def test_limits_and_available_now(reader: Readers, producer: blocking.Producer) -> None:
    producer.send_many([b"x"], topic="limit", queue=None)
    producer.send_many([b"x"] * 20, topic="limit", queue=q("limit", 1))
    running = reader("limit", starting="earliest", maxRows="6")
    assert running.getDefaultReadLimit() == ReadMaxRows(6)
    assert reader("limit", maxBytes="77").getDefaultReadLimit() == ReadMaxBytes(77)
    assert isinstance(reader("limit").getDefaultReadLimit(), ReadAllAvailable)
    running.prepareForTriggerAvailableNow()

    start, rows = running.initialOffset(), []
    while (end := running.latestOffset(start, running.getDefaultReadLimit())) != start:
        rows.append(row_count(running, start, end))
        producer.send_many([b"too late"], topic="limit", queue=q("limit", 1))
        start = end
    assert rows == [6, 6, 6, 3]
    rest = reader("limit", maxRows="2")
    end = rest.latestOffset(start, EVERYTHING)
    assert row_count(rest, start, end) == len(rows)


def test_progress_tells_the_lag_of_each_queue(reader: Readers, producer: blocking.Producer) -> None:
    producer.send_many([b"x"], topic="lag", queue=None)
    running = reader("lag")
    start = running.initialOffset()
    assert running.reportLatestOffset() is None
    first = offsets(start, "lag")[("broker-a", 3)]
    producer.send_many([b"x"] * 10, topic="lag", queue=q("lag", 3))
    running.latestOffset(start, ReadMaxRows(4))
    told = restored(running.reportLatestOffset() or {})
    assert told["lagMessages"] == 10
    queue = told["topics"]["lag"]["broker-a"]["3"]
    assert 0 <= queue.pop("lagSeconds") == told["lagSeconds"] < 60
    assert queue == {"start": first, "end": first + 4, "latest": first + 10, "lagMessages": 10}
    assert told["topics"]["lag"]["broker-a"]["0"]["lagMessages"] == 0


def test_a_group_shows_what_is_processed(
    reader: Readers, producer: blocking.Producer, admin: blocking.Admin
) -> None:
    producer.send_many([b"x"], topic="shown", queue=None)
    producer.send_many([b"x"] * 9, topic="shown", queue=q("shown", 0))
    running = reader("shown", starting="earliest", group="pipeline")
    start = running.initialOffset()
    end = running.latestOffset(start, ReadMaxRows(5))

    def lag() -> int:
        return sum(each.lag for each in admin.lag("pipeline", "shown"))

    assert lag() == 10
    last = running.latestOffset(end, EVERYTHING)
    assert lag() == 5
    running.commit(last)  # as Spark does in its own time
    assert lag() == 0
    assert admin.members("pipeline") == {}


# -- changes of the cluster ------------------------------------------------------------------------


def test_new_queues_are_read_from_their_beginning(
    reader: Readers, producer: blocking.Producer, admin: blocking.Admin
) -> None:
    admin.create_topic("grows", queues=1)
    running = reader("grows")
    start = running.initialOffset()
    admin.alter_topic("grows", queues=2, read_queues=2)
    producer.send_many([b"x"] * 3, topic="grows", queue=q("grows", 1))
    end = running.latestOffset(start, ReadMaxRows(2))
    assert ranges(running, start, end) == [("broker-a", 1, 0, 2)]
    assert end["topics"]["grows"]["broker-a"]["new"] == {"1": 0}
    last = running.latestOffset(end, EVERYTHING)
    assert ranges(running, end, last) == [("broker-a", 1, 2, 3)]
    assert "new" not in last["topics"]["grows"]["broker-a"]


def test_topics_that_fit_a_pattern_appear(
    reader: Readers, producer: blocking.Producer, admin: blocking.Admin
) -> None:
    producer.send_many([b"x"], topic="day-1")
    running = reader("day-*")
    start = running.initialOffset()
    admin.create_topic("day-2", queues=1)
    producer.send_many([b"x"] * 2, topic="day-2", queue=q("day-2", 0))
    end = running.latestOffset(start, EVERYTHING)
    assert set(end["topics"]) == {"day-1", "day-2"}
    assert ranges(running, start, end) == [("broker-a", 0, 0, 2)]


def test_brokers_come_and_go_without_a_restart(
    reader: Readers,
    mq: Embedded,
    producer: blocking.Producer,
    admin: blocking.Admin,
    tmp_path: Path,
) -> None:
    admin.create_topic("spread", queues=1)
    running = reader("spread")
    start = running.initialOffset()
    with broker(mq, tmp_path, "broker-b"):
        admin.create_topic("spread", queues=1, broker="broker-b")
        with blocking.Producer(nameserver=mq.nameserver) as other:
            other.send_many([b"x"] * 2, topic="spread", queue=q("spread", 0, "broker-b"))
        end = running.latestOffset(start, EVERYTHING)
        assert ranges(running, start, end) == [("broker-b", 0, 0, 2)]
    # It is away: its queue keeps its place, and the others go on.
    producer.send_many([b"x"], topic="spread", queue=q("spread", 0))
    without = running.latestOffset(end, EVERYTHING)
    assert offsets(without, "spread") == {("broker-a", 0): 1, ("broker-b", 0): 2}
    with broker(mq, tmp_path, "broker-b"):
        with blocking.Producer(nameserver=mq.nameserver) as other:
            other.send_many([b"x"], topic="spread", queue=q("spread", 0, "broker-b"))
        again = running.latestOffset(without, EVERYTHING)
        assert ranges(running, without, again) == [("broker-b", 0, 2, 3)]


@pytest.mark.parametrize("sent_count", [1, 9])
def test_a_topic_that_was_made_anew_is_noticed(
    reader: Readers,
    mq: Embedded,
    producer: blocking.Producer,
    admin: blocking.Admin,
    sent_count: int,
) -> None:
    topic = f"anew-{sent_count}"
    admin.create_topic(topic, queues=1)
    producer.send_many([b"x"] * 5, topic=topic, queue=q(topic, 0))
    start = reader(topic).initialOffset()
    admin.delete_topic(topic)
    admin.create_topic(topic, queues=1)
    with blocking.Producer(nameserver=mq.nameserver) as other:
        other.send_many([b"y"] * sent_count, topic=topic, queue=q(topic, 0))

    with pytest.raises(TopicRecreated, match=rf"topic {topic} on broker broker-a.*incarnation"):
        reader(topic).latestOffset(start, EVERYTHING)
    going_on = reader(topic, failOnDataLoss="false")
    end = going_on.latestOffset(start, EVERYTHING)
    assert ranges(going_on, start, end) == [("broker-a", 0, 0, sent_count)]
    # Without ids, as with Apache's brokers, a queue that is shorter than it was tells it.
    start["topics"][topic]["broker-a"]["incarnation"] = None
    if sent_count < 5:
        with pytest.raises(TopicRecreated, match="queue 0 ends at 1, but the checkpoint is at 5"):
            reader(topic).latestOffset(start, EVERYTHING)


def test_a_topic_deleted_with_unread_messages_is_a_loss(
    reader: Readers,
    producer: blocking.Producer,
    admin: blocking.Admin,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for topic in ("del-stays", "del-unread", "del-drained"):
        admin.create_topic(topic, queues=1)
        producer.send_many([b"x"] * 9, topic=topic, queue=q(topic, 0))
    strict, lenient = reader("del-*"), reader("del-*", failOnDataLoss="false")
    at = strict.initialOffset()
    at["topics"]["del-unread"]["broker-a"]["queues"]["0"] = 2
    for each in (strict, lenient):
        each.latestOffset(at, ReadMaxRows(1))  # now it knows what there is to read
    planned = strict.latestOffset(at, EVERYTHING)
    admin.delete_topic("del-drained")
    assert strict.latestOffset(at, EVERYTHING) == planned
    assert caplog.messages == []

    admin.delete_topic("del-unread")
    gone = "del-unread/broker-a/0 no longer has a message at offset 2: .*deleted with 7 unread"
    with pytest.raises(DataLoss, match=f"{gone}.*failOnDataLoss=false"):
        strict.latestOffset(at, EVERYTHING)
    with pytest.raises(DataLoss, match=gone):
        strict.partitions(at, planned)
    producer.send_many([b"x"], topic="del-stays", queue=q("del-stays", 0))
    end = lenient.latestOffset(at, EVERYTHING)
    assert ranges(lenient, at, end) == [("broker-a", 0, 9, 10)]
    assert lenient.latestOffset(end, EVERYTHING) == end
    (message,) = caplog.messages
    assert re.search(gone, message)
    assert ranges(lenient, at, planned) == []
    # A new run does not know what there was.
    caplog.clear()
    assert reader("del-*").latestOffset(end, EVERYTHING) == end
    (message,) = caplog.messages
    assert re.search(r"del-drained/broker-a/0 \(at 9\), del-unread/broker-a/0 \(at 2\)", message)


def test_queues_that_can_not_be_read_any_more_are_a_loss(
    reader: Readers, producer: blocking.Producer, admin: blocking.Admin
) -> None:
    admin.create_topic("shrinks", queues=3)
    for queue_id in (1, 2):
        producer.send_many([b"x"] * 5, topic="shrinks", queue=q("shrinks", queue_id))
    at = reader("shrinks").initialOffset()
    at["topics"]["shrinks"]["broker-a"]["queues"]["1"] = 2
    admin.alter_topic("shrinks", queues=1, read_queues=1)
    gone = "shrinks/broker-a/1 no longer has a message at offset 2: .*1 read queue .* 3 unread"
    with pytest.raises(DataLoss, match=gone):
        reader("shrinks").latestOffset(at, EVERYTHING)
    assert reader("shrinks", failOnDataLoss="false").latestOffset(at, EVERYTHING) == at
    at["topics"]["shrinks"]["broker-a"]["queues"]["1"] = 5
    assert reader("shrinks").latestOffset(at, EVERYTHING) == at


def test_a_topic_deleted_on_one_of_several_brokers_is_a_loss(
    reader: Readers, mq: Embedded, admin: blocking.Admin, tmp_path: Path
) -> None:
    admin.create_topic("halved", queues=1, broker="broker-a")
    with broker(mq, tmp_path, "broker-h") as other:
        admin.create_topic("halved", queues=1, broker="broker-h")
        with blocking.Producer(nameserver=mq.nameserver) as producer:
            producer.send_many([b"x"] * 5, topic="halved", queue=q("halved", 0, "broker-h"))
        running = reader("halved", starting="earliest")
        at = running.initialOffset()
        planned = running.latestOffset(at, EVERYTHING)
        with BlockingConnection.connect(other.address) as connection:
            header = DeleteTopicHeader(topic="halved")
            code = RequestCode.DELETE_TOPIC_IN_BROKER
            connection.request(code, header, timeout_ms=5000).expect()
        with pytest.raises(DataLoss, match=r"halved/broker-h/0 .* deleted with 5 unread"):
            running.latestOffset(at, EVERYTHING)
        assert running.latestOffset(planned, EVERYTHING) == planned


def test_a_named_topic_that_was_deleted_is_not_waited_for(
    reader: Readers, producer: blocking.Producer, admin: blocking.Admin
) -> None:
    admin.create_topic("named", queues=1)
    producer.send_many([b"x"] * 5, topic="named", queue=q("named", 0))
    at = reader("named").initialOffset()
    admin.delete_topic("named")
    for options in ({}, {"failOnDataLoss": "false"}):
        with pytest.raises(TopicDeleted, match=r"topic named was deleted .*broker-a.*new checkpoi"):
            reader("named", **options).latestOffset(at, EVERYTHING)
    with pytest.raises(TopicDeleted, match="topic named was deleted"):
        reader("name?").latestOffset(at, EVERYTHING)


def test_a_broker_that_lost_its_newest_messages_is_noticed(
    reader: Readers, producer: blocking.Producer, admin: blocking.Admin
) -> None:
    admin.create_topic("cut", queues=1)
    producer.send_many([b"x"] * 5, topic="cut", queue=q("cut", 0))
    start = reader("cut").initialOffset()
    start["topics"]["cut"]["broker-a"]["queues"]["0"] = 8  # as if there had been three more
    with pytest.raises(
        DataLoss, match=r"cut/broker-a/0 no longer has a message at offset 5.*newest"
    ):
        reader("cut").latestOffset(start, EVERYTHING)
    lenient = reader("cut", failOnDataLoss="false", maxRows="1")
    end = lenient.latestOffset(start, lenient.getDefaultReadLimit())
    assert ranges(lenient, start, end) == []
    producer.send_many([b"x"] * 2, topic="cut", queue=q("cut", 0))
    last = lenient.latestOffset(end, lenient.getDefaultReadLimit())
    assert ranges(lenient, end, last) == [("broker-a", 0, 5, 6)]


def test_nameservers_may_be_away_once_they_were_asked(
    reader: Readers, producer: blocking.Producer, admin: blocking.Admin
) -> None:
    admin.create_topic("alone", queues=1)
    running = reader("alone", group="alone")
    start = running.initialOffset()
    running.stop()
    running._cluster.nameservers = ("127.0.0.1:1",)
    producer.send_many([b"x"] * 2, topic="alone", queue=q("alone", 0))
    end = running.latestOffset(start, EVERYTHING)
    assert ranges(running, start, end) == [("broker-a", 0, 0, 2)]


def test_messages_that_are_gone_are_a_loss(
    reader: Readers, producer: blocking.Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = "loses"
    producer.send_many([b"x"], topic=topic, queue=None)
    producer.send_many([b"x"] * 9, topic=topic, queue=q(topic, 2))
    running = reader(topic, starting="earliest")
    start = running.initialOffset()
    end = running.latestOffset(start, EVERYTHING)
    last = offsets(end, topic)[("broker-a", 2)]
    gone = {q(topic, n): offsets(end, topic)[("broker-a", n)] - (n == 2) for n in range(4)}
    # Only the oldest offsets are made up: it takes days until a broker deletes messages.
    monkeypatch.setattr(Cluster, "min_offsets", lambda _self, _queues: gone)
    with pytest.raises(DataLoss, match=rf"{topic}/broker-a/. no longer has a message at offset 0"):
        ranges(running, start, end)
    lenient = reader(topic, failOnDataLoss="false")
    assert ranges(lenient, start, end) == [("broker-a", 2, last - 1, last)]


# -- bad input -------------------------------------------------------------------------------------


def test_a_checkpoint_of_another_topic_is_named(
    reader: Readers, producer: blocking.Producer
) -> None:
    for topic in ("one", "two"):
        producer.send_many([b"x"], topic=topic)
    start = reader("one").initialOffset()
    wrong = "the checkpoint belongs to topic one, but the query reads two. Give the query another"
    with pytest.raises(CheckpointMismatch, match=wrong):
        reader("two").latestOffset(start, EVERYTHING)
    with pytest.raises(CheckpointMismatch, match=wrong):
        reader("two").partitions(start, start)
    with pytest.raises(CheckpointMismatch, match="another source than headrace"):
        reader("two").latestOffset({"partition-0": 17}, EVERYTHING)
    with pytest.raises(CheckpointMismatch, match="version 2, but only version 1 is supported"):
        reader("two").latestOffset({"version": 2, "topics": {}}, EVERYTHING)


def test_sql_that_a_broker_does_not_evaluate_is_refused_when_a_query_goes_on(
    reader: Readers,
    mq: Embedded,
    admin: blocking.Admin,
    producer: blocking.Producer,
    tmp_path: Path,
) -> None:
    with broker(mq, tmp_path, "no-sql", enable_property_filter=False):
        admin.create_topic("goes-on", queues=1, broker="no-sql")
        producer.send_many([b"x"] * 2, topic="goes-on")
        unfiltered = reader("goes-on", starting="earliest")
        start = unfiltered.initialOffset()
        end = unfiltered.latestOffset(start, EVERYTHING)
        filtered = reader("goes-on", filter="a > 3")
        with pytest.raises(OptionError, match="option filter='a > 3'"):
            filtered.latestOffset(start, EVERYTHING)
        with pytest.raises(OptionError, match="option filter='a > 3'"):
            filtered.partitions(start, end)


def test_a_new_query_says_at_once_what_is_wrong(reader: Readers) -> None:
    with pytest.raises(TopicNotFound, match="topic missing is on no broker"):
        reader("missing").initialOffset()


def test_a_broker_that_restarts_is_waited_for(
    reader: Readers, mq: Embedded, admin: blocking.Admin, tmp_path: Path
) -> None:
    with broker(mq, tmp_path, "broker-r") as first:
        admin.create_topic("waits", queues=1, broker="broker-r")
        with blocking.Producer(nameserver=mq.nameserver) as producer:
            producer.send_many([b"x"] * 3, topic="waits", queue=q("waits", 0, "broker-r"))
        start = reader("waits", starting="earliest").initialOffset()
        port = int(first.address.rpartition(":")[2])
    # A new run of the query, that knows of the broker by its checkpoint.
    running = reader("waits")
    running.prepareForTriggerAvailableNow()
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(running.latestOffset, start, EVERYTHING)
        with broker(mq, tmp_path, "broker-r", listen_port=port):
            end = asked.result()
            assert ranges(running, start, end) == [("broker-r", 0, 0, 3)]


def test_a_broker_that_stays_away_is_named(
    reader: Readers,
    mq: Embedded,
    admin: blocking.Admin,
    tmp_path: Path,
) -> None:
    patience = Patience(0.1, 0.25)
    with broker(mq, tmp_path, "broker-s"):
        admin.create_topic("stays", queues=1, broker="broker-s")
        start = reader("stays", starting="earliest").initialOffset()
    with pytest.raises(BrokerMissing, match=r"topic stays came back within 0.1 s \(broker-s\)"):
        reader("stays", patience).latestOffset(start, EVERYTHING)
    alone = reader("stays", patience, nameserver="127.0.0.1:1")
    with pytest.raises(NameserverUnavailable, match=r"127\.0\.0\.1:1"):
        alone.latestOffset(start, EVERYTHING)
