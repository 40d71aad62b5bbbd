"""Our clients, and Spark, on a static topic of Apache's broker and one of ours, by turns."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from headrace import Consumer, Message, Producer
from headrace.admin.client import Admin
from headrace.spark.cluster import Cluster, Topics
from headrace.spark.options import Limits
from headrace.spark.plan.limits import limited
from headrace.spark.plan.ranges import Range, extent
from headrace.spark.plan.splits import read_tasks
from headrace.spark.plan.tasks import ReadPlan
from headrace.spark.read.columns import arrow_schema
from headrace.spark.read.task import read_range
from headrace.spark.source import HeadraceSource
from headrace_broker.config import BrokerConfig
from headrace_broker.server import Broker
from headrace_protocol.statictopic.plans import Mode
from tests.conformance.lookups import once_brokers_are_known
from tests.conformance.peer import TIMEOUT_MS

pytestmark = [pytest.mark.conformance, pytest.mark.slow]

TOPIC = "StaticByTurns"
APACHES, OURS = "broker-a", "broker-ours"
# Queue, offset and body.
Found = tuple[int, int, bytes]


@asynccontextmanager
async def our_broker(nameserver: str, folder: Path) -> AsyncIterator[None]:
    config = BrokerConfig(
        broker_name=OURS,
        bind_address="127.0.0.1",
        listen_port=0,
        namesrv_addr=nameserver,
        store_path_root_dir=folder,
        mapped_file_size_commit_log=1024 * 1024,
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(Broker(config).run)
        yield
        nursery.cancel_scope.cancel()


async def send(nameserver: str, count: int, sent: list[Found]) -> None:
    async with Producer(nameserver=nameserver, timeout_ms=TIMEOUT_MS) as producer:
        for _ in range(count):
            body = b"%d" % len(sent)
            result = await producer.send(Message(TOPIC, body, key=f"k{len(sent) % 7}"))
            assert result.queue.broker_name == "__syslo__global__"
            sent.append((result.queue.queue_id, result.queue_offset, body))


async def receive(nameserver: str, group: str, count: int) -> list[Found]:
    found: list[Found] = []
    async with Consumer(group, TOPIC, nameserver=nameserver, start="earliest") as consumer:
        async for message in consumer:
            found.append((message.queue.queue_id, message.queue_offset, message.body))
            if len(found) == count:
                return found
    raise AssertionError


def rows(nameserver: str) -> list[Found]:
    """All messages, as Spark's tasks read them; maxRows counts messages, not offsets."""
    schema = arrow_schema(HeadraceSource({"nameserver": "x:1", "topic": "t"}).schema(), None)
    found: list[Found] = []
    with Cluster((nameserver,)) as cluster:
        queues = cluster.queues(Topics((TOPIC,)))
        has = extent(cluster, queues)
        ranges = {queue: Range(has.min[queue], has.max[queue]) for queue in queues}
        for task in read_tasks(cluster, queues, ranges, 2000):
            for part in task.ranges:
                for batch in read_range(ReadPlan(), part, schema):
                    found += map(_found, batch.to_pylist())
        half = limited(cluster, queues, ranges, Limits(rows=len(found) // 2))
        parts = cluster.parts(half, queues)
        counted = sum(part.message_count for some in parts.values() for part in some)
        assert counted == len(found) // 2
    return found


def _found(row: dict[str, Any]) -> Found:
    return row["queue"], row["queue_offset"], row["value"]


async def test_messages_are_read_wherever_their_queue_was(nameserver: str, tmp_path: Path) -> None:
    sent: list[Found] = []
    followed: list[Found] = []

    async def follow() -> None:
        followed.extend(await receive(nameserver, "static-follows", 80))

    async with our_broker(nameserver, tmp_path), Admin(nameserver=nameserver) as admin:
        await admin.create_static_topic(TOPIC, 3, brokers=[APACHES])
        await send(nameserver, 20, sent)
        with trio.fail_after(120):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(follow)
                for target in (OURS, APACHES, OURS):
                    await admin.remap_static_topic(TOPIC, [target], mode=Mode.AVAILABLE)
                    await send(nameserver, 20, sent)
            assert sorted(followed) == sorted(sent)
            for queue in range(3):
                offsets = [offset for each, offset, _ in followed if each == queue]
                assert offsets == sorted(offsets)
            # Who comes later reads Apache's items through our leader.
            assert sorted(await receive(nameserver, "static-late", 80)) == sorted(sent)
            assert sum(each.lag for each in await admin.lag("static-follows", TOPIC)) == 0
            assert sorted(await trio.to_thread.run_sync(rows, nameserver)) == sorted(sent)
            await admin.remap_static_topic(TOPIC, [APACHES], mode=Mode.AVAILABLE)
            # And ours through Apache's.
            last = partial(receive, nameserver, "static-last", 80)
            assert sorted(await once_brokers_are_known(last)) == sorted(sent)
