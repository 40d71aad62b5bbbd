"""Rows to topics: once each, whatever is tried again; against a real broker and real Spark."""

from __future__ import annotations

import logging
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headrace import blocking
from headrace.embedded import Embedded
from headrace.errors import NoQueue
from headrace.received import ReceivedMessage
from headrace.spark.body.ddl import parse_ddl
from headrace.spark.cluster import Cluster
from headrace.spark.errors import OptionError, SchemaError, TopicNotFound
from headrace.spark.source import HeadraceSource
from headrace.spark.write.commits import CommitConflict, Committer
from headrace.spark.write.row_encoding import arrow_schema
from headrace.spark.write.sink import (
    RowStreamWriter,
    WriteOptions,
    _batches_of,
    batch_writer,
    stream_writer,
    write_rows,
)
from headrace_protocol.drivers.blocking import BlockingConnection
from headrace_protocol.staging import StagedAttempt


@pytest.fixture(scope="module")
def sink(spark: Any, mq: Embedded) -> str:
    """Spark with the sink, and where it writes to."""
    spark.dataSource.register(HeadraceSource)
    return mq.nameserver


def make_topic(nameserver: str, topic: str, queues: int = 2) -> None:
    with blocking.Admin(nameserver=nameserver) as admin:
        admin.create_topic(topic, queues=queues)


def read(nameserver: str, topic: str, count: int) -> dict[int, list[ReceivedMessage]]:
    """All messages of a topic, by queue id, once there are ``count``."""
    found: dict[int, list[ReceivedMessage]] = {}
    with blocking.PullConsumer(nameserver=nameserver) as consumer:
        queues = consumer.queues(topic)
        consumer.assign(queues)
        while sum(map(len, found.values())) < count:
            batch = consumer.receive_many(timeout_ms=5000)
            assert batch is not None, {queue: len(some) for queue, some in found.items()}
            found.setdefault(batch.queue.queue_id, []).extend(batch)
        assert consumer.receive_many(timeout_ms=50) is None
    return found


def bodies(nameserver: str, topic: str, count: int) -> Any:
    found = read(nameserver, topic, count)
    return Counter(message.body for some in found.values() for message in some)


def batches(*values: Any, key: str | None = None) -> list[Any]:
    columns = {"value": pa.array(values, pa.binary())}
    if key:
        columns["key"] = pa.array([key] * len(values))
    return [pa.RecordBatch.from_pydict(columns)]


def options(nameserver: str, topic: str, *, exactly_once: bool = True) -> WriteOptions:
    return WriteOptions((nameserver,), topic, exactly_once)


def parts_of(*written: Any) -> dict[str, list[StagedAttempt]]:
    parts: dict[str, list[StagedAttempt]] = {}
    for each in written:
        for broker_name, staged in each.staged.items():
            parts.setdefault(broker_name, []).append(staged)
    return parts


def commit(nameserver: str, query_id: str, batch_id: int, *written: Any) -> None:
    with Cluster((nameserver,)) as cluster:
        Committer(cluster, query_id).commit(batch_id, parts_of(*written))


# --- without Spark -------------------------------------------------------------------------


def test_only_the_attempts_that_won_are_read_and_once(mq: Embedded) -> None:
    make_topic(mq.nameserver, "Attempts")
    to = options(mq.nameserver, "Attempts")
    write_rows(to, "q1", 0, batches(b"a", b"b"))  # its worker died before it could tell
    first = write_rows(to, "q1", 0, batches(b"a", b"b"))
    speculative = write_rows(to, "q1", 0, batches(b"a", b"b"))
    second = write_rows(to, "q1", 0, batches(b"c"))
    commit(mq.nameserver, "q1", 0, first, second)
    # The driver was killed before it noted the batch: it comes again, by other attempts.
    commit(mq.nameserver, "q1", 0, write_rows(to, "q1", 0, batches(b"a", b"b", b"c")))
    commit(mq.nameserver, "q1", 0, speculative)
    commit(mq.nameserver, "q1", 1, write_rows(to, "q1", 1, batches(b"d")))
    commit(mq.nameserver, "q1", 0, write_rows(to, "q1", 0, batches(b"a", b"b", b"c")))
    assert bodies(mq.nameserver, "Attempts", 4) == Counter([b"a", b"b", b"c", b"d"])


def test_a_copied_checkpoint_with_another_topic_is_refused(mq: Embedded) -> None:
    for topic in ("Original", "Copy"):
        make_topic(mq.nameserver, topic)
    original, copy = (options(mq.nameserver, topic) for topic in ("Original", "Copy"))
    for batch_id in (0, 1):
        commit(mq.nameserver, "q7", batch_id, write_rows(original, "q7", batch_id, batches(b"a")))
    # The batch that was committed last, and one before it.
    for batch_id in (1, 0):
        written = write_rows(copy, "q7", batch_id, batches(b"b"))
        said = f"batch {batch_id} of query q7 .*to another topic.*Give each query its own"
        with pytest.raises(CommitConflict, match=said):
            commit(mq.nameserver, "q7", batch_id, written)
    # From here on it is the topic that changes.
    commit(mq.nameserver, "q7", 2, write_rows(copy, "q7", 2, batches(b"c")))
    assert bodies(mq.nameserver, "Original", 2) == Counter({b"a": 2})
    assert bodies(mq.nameserver, "Copy", 1) == Counter([b"c"])


def test_rows_that_are_dropped_are_logged(mq: Embedded, caplog: pytest.LogCaptureFixture) -> None:
    make_topic(mq.nameserver, "Dropped")
    to = options(mq.nameserver, "Dropped")
    with caplog.at_level(logging.WARNING, "headrace.spark"):
        first = write_rows(to, "q8", 0, batches(b"a"))
        commit(mq.nameserver, "q8", 0, first)
        commit(mq.nameserver, "q8", 0, first)
        commit(mq.nameserver, "q8", 1, write_rows(to, "q8", 1, batches(b"b")))
        assert caplog.messages == []
        for batch_id in (1, 0):
            commit(mq.nameserver, "q8", batch_id, write_rows(to, "q8", batch_id, batches(b"a")))
    for batch_id, message in zip((1, 0), caplog.messages, strict=True):
        assert f"batch {batch_id} of query q8 was already committed" in message
        assert "copy of another query's" in message


def test_an_abort_does_not_undo_a_commit(mq: Embedded) -> None:
    make_topic(mq.nameserver, "Aborted")
    to = options(mq.nameserver, "Aborted")
    with Cluster((mq.nameserver,)) as cluster:
        committer = Committer(cluster, "q2")
        given_up = write_rows(to, "q2", 0, batches(b"a"))
        committer.abort(0, parts_of(given_up))
        with pytest.raises(Exception, match="discarded"):
            committer.commit(0, parts_of(given_up))
        won = write_rows(to, "q2", 0, batches(b"a"))
        committer.commit(0, parts_of(won))
        committer.abort(0, parts_of(won))
    assert bodies(mq.nameserver, "Aborted", 1) == Counter([b"a"])


def test_two_drivers_at_once_are_told(mq: Embedded, monkeypatch: pytest.MonkeyPatch) -> None:
    make_topic(mq.nameserver, "Twice")
    to = options(mq.nameserver, "Twice")
    mine = write_rows(to, "q3", 0, batches(b"a"))
    other = write_rows(to, "q3", 0, batches(b"a"))
    decide = Committer._decide

    def too_late(committer: Committer, *arguments: Any) -> None:
        monkeypatch.undo()
        commit(mq.nameserver, "q3", 0, other)
        decide(committer, *arguments)

    monkeypatch.setattr(Committer, "_decide", too_late)
    with pytest.raises(CommitConflict, match="run twice"):
        commit(mq.nameserver, "q3", 0, mine)
    commit(mq.nameserver, "q3", 0, mine)
    assert bodies(mq.nameserver, "Twice", 1) == Counter([b"a"])


def test_rows_with_a_key_go_where_the_clients_send_them(mq: Embedded) -> None:
    make_topic(mq.nameserver, "Keys", queues=8)
    with blocking.Producer(nameserver=mq.nameserver) as producer:
        results = producer.send_many([b"1", b"2"], topic="Keys", keys=["hall", "roof"])
        places = {result.queue.queue_id for result in results}
    to = options(mq.nameserver, "Keys")
    written = [write_rows(to, "q4", 0, batches(b"3", key=key)) for key in ("hall", "roof")]
    commit(mq.nameserver, "q4", 0, *written)
    found = read(mq.nameserver, "Keys", 4)
    assert set(found) == places
    assert all({m.key for m in some} in ({"hall"}, {"roof"}) for some in found.values())


def test_at_least_once_is_readable_at_once(mq: Embedded) -> None:
    make_topic(mq.nameserver, "AtLeast")
    to = options(mq.nameserver, "AtLeast", exactly_once=False)
    assert write_rows(to, "q5", 0, batches(b"a")).staged == {}
    write_rows(to, "q5", 0, batches(b"a"))
    assert bodies(mq.nameserver, "AtLeast", 2) == Counter({b"a": 2})


def test_a_broker_of_another_kind_gets_ordinary_sends_and_the_log_says_so(
    mq: Embedded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_topic(mq.nameserver, "Apache")
    monkeypatch.setattr(BlockingConnection, "peer_is_headrace", False)
    with caplog.at_level(logging.WARNING, "headrace.spark"):
        written = write_rows(options(mq.nameserver, "Apache"), "q6", 0, batches(b"a", b"b"))
        assert written.staged == {}
        write_rows(options(mq.nameserver, "Apache"), "q6", 0, batches(b"c"))
    commit(mq.nameserver, "q6", 0, written)
    assert len([record for record in caplog.records if "at least once" in record.message]) == 1
    monkeypatch.undo()
    found = [m for some in read(mq.nameserver, "Apache", 3).values() for m in some]
    assert sorted(message.body for message in found) == [b"a", b"b", b"c"]
    assert len({message.message_id for message in found}) == 3


def test_what_can_not_be_written_is_said_at_plan_time(mq: Embedded) -> None:
    schema = parse_ddl("value STRING")
    place = {"nameserver": mq.nameserver}
    with pytest.raises(TopicNotFound, match="NoSuchTopic"):
        batch_writer(place | {"topic": "NoSuchTopic"}, schema, overwrite=False)
    with pytest.raises(OptionError, match="a topic is append-only"):
        batch_writer(place | {"topic": "T"}, schema, overwrite=True)
    with pytest.raises(OptionError, match="outputMode='complete': a topic is append-only"):
        stream_writer(place | {"topic": "T"}, schema, overwrite=True)
    with pytest.raises(OptionError, match=r"path='T': load\(\), save\(\) .* take no topic"):
        batch_writer(place | {"path": "T"}, schema, overwrite=False)
    with pytest.raises(OptionError, match="did you mean topic"):
        stream_writer(place | {"topics": "T"}, schema, overwrite=False)
    with pytest.raises(OptionError, match="true or false"):
        stream_writer(place | {"topic": "T", "exactlyOnce": "1"}, schema, overwrite=False)
    with pytest.raises(OptionError, match="a b"):
        stream_writer(place | {"topic": "a b"}, schema, overwrite=False)
    delayed = parse_ddl("value STRING, deliver_at TIMESTAMP")
    with pytest.raises(SchemaError, match="the sink writes no delayed messages"):
        batch_writer(place | {"topic": "T"}, delayed, overwrite=False)
    with blocking.Admin(nameserver=mq.nameserver) as admin:
        admin.create_topic("ReadOnly", queues=1, perm=4)
    with pytest.raises(NoQueue, match="ReadOnly"):
        batch_writer(place | {"topic": "ReadOnly"}, schema, overwrite=False)


def test_a_stream_that_has_run_waits_for_its_topic(mq: Embedded, tmp_path: Path) -> None:
    schema = parse_ddl("value STRING")
    given = {"nameserver": mq.nameserver, "topic": "ComesBack"}
    given["checkpointlocation"] = tmp_path.as_uri()  # as Spark spells it here
    with pytest.raises(TopicNotFound, match="ComesBack"):
        stream_writer(given, schema, overwrite=False)
    (tmp_path / "commits").mkdir()
    (tmp_path / "commits" / "0").touch()
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(stream_writer, given, schema, overwrite=False)
        make_topic(mq.nameserver, "ComesBack")
        assert asked.result()


def test_spark_40_gives_rows() -> None:
    schema = parse_ddl("key STRING, properties MAP<STRING, STRING>, value BINARY")
    rows: list[Any] = [("k", {"a": "1", "b": "2"}, bytearray(b"x")), (None, None, b"y")] * 5000
    found = list(_batches_of(iter(rows), arrow_schema(schema)))
    assert sum(map(len, found)) == 10_000
    assert len(found) == 2
    assert found[0].slice(0, 2).to_pylist() == [
        {"key": "k", "properties": [("a", "1"), ("b", "2")], "value": b"x"},
        {"key": None, "properties": None, "value": b"y"},
    ]
    RowStreamWriter(options("127.0.0.1:1", "T"), arrow_schema(schema))


# --- with Spark ----------------------------------------------------------------------------


@pytest.mark.slow
def test_rows_of_a_batch_write_become_messages(spark: Any, sink: str) -> None:
    make_topic(sink, "Batch")
    rows = spark.sql(
        "SELECT 'Batch' AS topic, CAST(id % 3 AS STRING) AS key, 'red' AS tags, "
        "map('n', CAST(id AS STRING)) AS properties, "
        "CAST(CAST(id AS STRING) AS BINARY) AS value FROM range(0, 1000, 1, 2)"
    )
    rows.write.format("headrace").mode("append").option("nameserver", sink).save()
    messages = [message for some in read(sink, "Batch", 1000).values() for message in some]
    assert sorted(int(message.body) for message in messages) == list(range(1000))
    for message in messages:
        number = int(message.body)
        assert (message.key, message.tag) == (str(number % 3), "red")
        assert message.properties["n"] == str(number)


@pytest.mark.slow
def test_a_stream_that_repeats_its_last_batch_writes_it_once(
    spark: Any, sink: str, tmp_path: Path
) -> None:
    make_topic(sink, "Stream")
    source, checkpoint = tmp_path / "source", tmp_path / "checkpoint"
    source.mkdir()
    for number in range(3):
        lines = [f"{number}-{line}" for line in range(50)]
        (source / f"{number}.txt").write_text("\n".join(lines))

    def run() -> None:
        query = (
            spark.readStream.format("text")
            .option("maxFilesPerTrigger", 1)
            .load(str(source))
            .repartition(2)
            .writeStream.format("headrace")
            .option("nameserver", sink)
            .option("topic", "Stream")
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    run()
    # As if the driver had been killed after the commit at the broker, before its own note of it.
    for path in (checkpoint / "commits").glob("*2*"):
        path.unlink()
    run()
    assert (checkpoint / "commits" / "2").exists()
    expected = Counter(b"%d-%d" % (n, line) for n in range(3) for line in range(50))
    assert bodies(sink, "Stream", 150) == expected
