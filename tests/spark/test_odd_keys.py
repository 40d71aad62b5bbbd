"""Keys that are not UTF-8, from clients that do not refuse them, stay distinct for all readers."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from headrace import blocking
from headrace.embedded import Embedded
from headrace.errors import InvalidMessage
from headrace.producer import sources
from tests.spark.test_table import read
from tests.support.batches import block
from tests.support.bulk import store_block

VALUES = {r"\xff": b"one", r"caf\xe9": b"two", r"\xfe": b"three", "é": b"four"}
RAW = [b"\xff", b"caf\xe9", b"\xfe", "é".encode()]


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"value": ["x"], "key": [b"\xff"]}, r"row 0: its key for T is not UTF-8 but b'\\xff'"),
        ({"value": ["x", "y"], "tag": [b"\xc3", b"\xa9"]}, r"row 0: its tag .* b'\\xc3'"),
        ({"value": ["x", "y"], "key": ["é", b"\xa9"]}, r"row 1: its key .* b'\\xa9'"),
        ({"value": ["", "y"], "key": [b"\xff", b"a"]}, "row 0: its key for T"),
        ({"value": ["x"], "topic": [b"\xff"]}, "not a valid topic name"),
    ],
)
def test_a_table_with_such_a_text_is_refused(columns: dict[str, list[Any]], reason: str) -> None:
    raw = {
        name: pa.array([each.encode() if isinstance(each, str) else each for each in column])
        for name, column in columns.items()
    }
    with pytest.raises(InvalidMessage, match=reason):
        list(sources.chunks(pa.table(raw), None if "topic" in columns else "T", None, None))


@pytest.fixture
def users(mq: Embedded, request: pytest.FixtureRequest) -> str:
    """A compacted topic with such keys."""
    topic = f"users-{request.node.name[5:30].strip('_')}"
    with blocking.Admin(nameserver=mq.nameserver) as admin:
        admin.create_topic(topic, queues=1, attributes={"cleanup.policy": "COMPACTION"})
    properties = [b"KEYS\x01%b\x02" % key for key in RAW]
    store_block(mq.broker, topic, block(*VALUES.values(), topic=topic, properties=properties))
    return topic


def test_a_table_in_spark_has_each(mq: Embedded, users: str) -> None:
    assert read(mq, users) == VALUES


def test_a_table_of_the_client_has_each(mq: Embedded, users: str) -> None:
    with blocking.Table(users, nameserver=mq.nameserver) as table:
        table.synced()
        assert dict(table.items()) == VALUES


def test_a_consumer_shows_each(mq: Embedded, users: str) -> None:
    with blocking.PullConsumer(nameserver=mq.nameserver) as consumer:
        (queue,) = consumer.queues(users)
        consumer.assign([queue])
        consumer.seek(queue, 0)
        batch = consumer.receive_many(timeout_ms=5000)
        assert batch is not None
        assert [message.key for message in batch] == list(VALUES)
        assert batch.to_arrow()["key"].to_pylist() == list(VALUES)


@pytest.mark.slow
def test_a_frame_has_each_and_its_copy_keeps_them_apart(
    mq: Embedded, users: str, spark: SparkSession
) -> None:
    frame = spark.read.format("headrace").option("nameserver", mq.nameserver)
    rows = frame.option("topic", users).load()
    assert [row.keys for row in rows.select("keys").collect()] == list(VALUES)
    assert rows.where(rows.keys == r"\xff").count() == 1
    with blocking.Admin(nameserver=mq.nameserver) as admin:
        admin.create_topic("users-copy", queues=1)
    writer = rows.write.format("headrace").option("nameserver", mq.nameserver)
    writer.option("topic", "users-copy").mode("append").save()
    assert read(mq, "users-copy") == VALUES
