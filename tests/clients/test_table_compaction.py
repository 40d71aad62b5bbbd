"""Tables of compacted topics, local and remote, while their queues are compacted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio

from headrace import Admin, Message, Producer, Table
from headrace.errors import KeyLookupUnsupported
from tests.support.running_brokers import Brokers, brokers
from tests.support.until import until

TOPIC = "users"
SIZES = {"compaction_mapped_file_size": 16384, "compaction_cq_mapped_file_size": 920}


@pytest.fixture
async def mq(tmp_path: Path) -> AsyncIterator[Brokers]:
    async with brokers(tmp_path, []) as running:
        for name in ("a", "b"):
            await running.start(name, **SIZES, compaction_schedule_internal=100)
        async with Admin(**running.at) as admin:
            attributes = {"cleanup.policy": "COMPACTION", "delete.retention.ms": "0"}
            await admin.create_topic(TOPIC, queues=2, attributes=attributes)
        yield running


def table(mq: Brokers, **options: Any) -> Table[str]:
    return Table(TOPIC, model=str, **mq.at, **options)


async def dropped(mq: Brokers) -> int:
    """Messages that compactions have removed."""
    async with Admin(**mq.at) as admin:
        infos = [await admin.runtime_info(broker.address) for broker in mq.brokers.values()]
    return sum(int(info["compactionDropped"]) for info in infos)


@pytest.mark.slow
async def test_every_table_is_right_while_its_queues_are_compacted(mq: Brokers) -> None:
    random, expected = Random(11), dict[str, str]()
    async with (
        table(mq) as local,
        table(mq, local=False) as remote,
        table(mq, local=False) as other,
    ):
        with trio.fail_after(60):
            number = 0
            while number < 1500 or await dropped(mq) < 500:
                number += 1
                key = f"user-{random.randrange(60)}"
                writer = random.choice([local, remote])
                if random.random() < 0.1:
                    await writer.delete(key)
                    expected.pop(key, None)
                else:
                    await writer.put(key, str(number))
                    expected[key] = str(number)
                assert await writer.get(key) == expected.get(key)
                if number % 100 == 0:
                    keys = [f"user-{index}" for index in range(70)]
                    assert await remote.get_many(keys) == expected
                    assert await other.get_many(keys) == expected
                    await local.synced()
                    assert dict(local.items()) == expected
                    async with table(mq) as loaded:
                        await loaded.synced()
                        assert dict(loaded.items()) == expected


@pytest.mark.slow
async def test_many_keys_and_large_values_by_lookup(mq: Brokers) -> None:
    expected = {f"user-{number}": str(number) * 3500 for number in range(1500)}
    async with Producer(**mq.at) as producer:
        await producer.send_many(
            Message(TOPIC, value.encode(), key=key) for key, value in expected.items()
        )
    async with table(mq, local=False) as remote:
        # Some 20 MB: several answers.
        assert await remote.get_many([*expected, "nobody"]) == expected
        assert await remote.get("nobody") is None


async def test_a_key_in_another_queue_than_the_usual_one_is_found(mq: Brokers) -> None:
    async with Producer(**mq.at) as producer:
        queues = await producer.queues(TOPIC)
        for number in range(8):
            queue = queues[number % len(queues)]
            await producer.send(Message(TOPIC, b"x", key=f"user-{number}"), queue=queue)
    async with table(mq, local=False) as remote:
        keys = [f"user-{number}" for number in range(9)]
        assert sorted(await remote.get_many(keys)) == keys[:8]


async def test_a_topic_that_is_not_compacted_needs_a_local_copy(mq: Brokers) -> None:
    async with Admin(**mq.at) as admin:
        await admin.create_topic("plain")
    async with Table("plain", local=False, **mq.at) as remote:
        with pytest.raises(KeyLookupUnsupported, match="plain is not compacted"):
            await remote.get("a")


@pytest.mark.slow
async def test_tables_outlive_a_restart_of_their_brokers(mq: Brokers) -> None:
    async with table(mq) as local, table(mq, local=False) as remote:
        expected = {f"user-{number}": str(number) for number in range(20)}
        for key, value in expected.items():
            await remote.put(key, value)
        await local.synced()
        for name in ("a", "b"):
            await mq.stop(name)
            await mq.start(name, **SIZES)
        with trio.fail_after(60):
            await local.put("user-0", "new")
            await remote.delete("user-1")
            expected["user-0"] = "new"
            del expected["user-1"]
            assert await remote.get_many([f"user-{number}" for number in range(20)]) == expected
            # Not synced(): a nameserver may still say that a broker was shut down.
            await until(lambda: dict(local.items()) == expected)
