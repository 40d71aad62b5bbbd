"""Tables on the real Apache RocketMQ broker, on a compacted and on a plain topic."""

from __future__ import annotations

import anyio
import pytest

from headrace import Admin, Message, Producer, Table
from headrace.errors import KeyLookupUnsupported
from headrace.spark.cluster import Cluster, Topics
from headrace.spark.plan.tables import table_tasks
from headrace.spark.plan.tasks import ReadPlan
from headrace.spark.read.columns import arrow_schema
from headrace.spark.read.schema import source_schema
from headrace.spark.read.table import read_table

pytestmark = [pytest.mark.conformance, pytest.mark.slow]

TIMEOUT_S = 60
SCHEMA = arrow_schema(source_schema(table=True), table=True)


async def fill(nameserver: str, topic: str) -> dict[str, str]:
    """Random-looking puts and deletions; returns the table."""
    expected: dict[str, str] = {}
    async with Table(topic, model=str, nameserver=nameserver) as table:
        changes = table.changes()
        for number in range(60):
            key = f"key-{number * 7 % 13}"
            if number % 5:
                await table.put(key, str(number))
                expected[key] = str(number)
                assert await table.get(key) == str(number)
            else:
                await table.delete(key)
                expected.pop(key, None)
                assert await table.get(key) is None
            assert (await anext(changes)).key == key
        assert dict(table.items()) == expected
    async with Producer(nameserver=nameserver) as producer:
        # Batches, which a compacted topic of RocketMQ takes as well.
        await producer.send_many([b"1", b""], topic=topic, keys=["late", "key-1"])
    del expected["key-1"]
    return expected | {"late": "1"}


@pytest.mark.parametrize("policy", ["COMPACTION", "DELETE"])
def test_a_table_needs_no_support_by_the_broker(nameserver: str, policy: str) -> None:
    topic = f"table-{policy}"

    async def run() -> dict[str, str]:
        with anyio.fail_after(TIMEOUT_S):
            async with Admin(nameserver=nameserver) as admin:
                await admin.create_topic(topic, attributes={"cleanup.policy": policy})
            expected = await fill(nameserver, topic)
            async with Table(topic, model=str, nameserver=nameserver) as table:
                await table.synced()
                assert dict(table.items()) == expected
            return expected

    expected = anyio.run(run, backend="trio")
    with Cluster([nameserver]) as cluster:
        tasks = table_tasks(cluster, cluster.queues(Topics((topic,))))
    rows = [
        row
        for task in tasks
        for batch in read_table(ReadPlan(table=True), task, SCHEMA)
        for row in batch.to_pylist()
    ]
    assert {row["keys"]: row["value"].decode() for row in rows} == expected
    assert len(rows) == len(expected)


def test_without_a_local_copy_the_broker_is_named(nameserver: str) -> None:
    async def run() -> None:
        with anyio.fail_after(TIMEOUT_S):
            async with Producer(nameserver=nameserver) as producer:
                await producer.send(Message("table-remote", b"1", key="a"))
            async with Table("table-remote", local=False, nameserver=nameserver) as table:
                with pytest.raises(KeyLookupUnsupported, match="not a headrace broker"):
                    await table.get("a")

    anyio.run(run, backend="trio")
