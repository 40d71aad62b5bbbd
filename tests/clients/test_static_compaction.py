"""Compacted static topics on running brokers: values by key, while queues move."""

from __future__ import annotations

import pytest
import trio

from headrace import Consumer, Message, Producer, Table
from headrace.admin.client import Admin
from headrace.admin.statictopic import StaticTopicError
from headrace_protocol.statictopic.plans import Mode
from tests.support.fixtures import admin_of_brokers, brokers_named
from tests.support.running_brokers import Brokers

pytestmark = pytest.mark.slow

COMPACTED = {"cleanup.policy": "COMPACTION"}
KEYS = [f"k{number}" for number in range(8)]


mq = pytest.fixture(brokers_named(["a", "b"]))
admin = pytest.fixture(admin_of_brokers)


def table(mq: Brokers, *, local: bool) -> Table[str]:
    return Table("T", model=str, local=local, **mq.at)


async def compact(admin: Admin, kept: int) -> None:
    """Compact until so many messages are left in all physical queues together.

    The compaction logs alone don't tell: messages may still be on their way to them.
    """
    found = -1
    with trio.fail_after(30):
        while found != kept:
            states = await admin.compact_topic("T")
            while any(state.is_running for state in states.values()):
                await trio.sleep(0.05)
                states = await admin.compact_topic("T", start=False)
            totals = {each.topic: each for each in await admin.topic_totals()}
            found = totals["T"].messages


async def put_all(written: Table[str], values: dict[str, str], round_: int) -> None:
    """Two values of each key but the first, of which the second stays."""
    for key in KEYS[1:]:
        await written.put(key, f"old {round_}")
        await written.put(key, values.setdefault(key, "") + str(round_))
        values[key] += str(round_)


@pytest.mark.parametrize("mode", Mode)
async def test_values_stay_while_queues_move(mq: Brokers, admin: Admin, mode: Mode) -> None:
    await admin.create_static_topic("T", 2, brokers=["a"], attributes=COMPACTED)
    values: dict[str, str] = {}
    async with table(mq, local=False) as remote, table(mq, local=True) as local:
        await remote.put(KEYS[0], "first")
        await remote.put("gone", "value")
        await put_all(remote, values, 0)
        await compact(admin, 9)
        await admin.remap_static_topic("T", ["b"], mode=mode)
        assert await remote.get_many(["gone", KEYS[0]]) == {"gone": "value", KEYS[0]: "first"}
        await remote.delete("gone")
        await put_all(remote, values, 1)
        await compact(admin, 9 + 8)
        await admin.remap_static_topic("T", ["a"], mode=mode)
        await put_all(remote, values, 2)
        await compact(admin, 9 + 8 + 7)
        expected = {KEYS[0]: "first", **values}
        assert await remote.get_many([*KEYS, "gone", "never"]) == expected
        await local.synced()
        assert dict(local.items()) == expected
    async with table(mq, local=True) as late:
        await late.synced()
        assert dict(late.items()) == expected


async def test_values_survive_restarts(mq: Brokers, admin: Admin) -> None:
    await admin.create_static_topic("T", 2, brokers=["a"], attributes=COMPACTED)
    values: dict[str, str] = {}
    async with table(mq, local=False) as remote:
        await put_all(remote, values, 0)
        await admin.remap_static_topic("T", ["b"])
        await remote.put("k1", "new")
        await remote.delete("k2")
        await compact(admin, 7 + 2)
        for name in ("a", "b"):
            await mq.stop(name)
            await mq.start(name)
        expected = {**values, "k1": "new"}
        del expected["k2"]
        assert await remote.get_many(KEYS) == expected


async def test_a_push_consumer_gets_the_newest_values(mq: Brokers, admin: Admin) -> None:
    await admin.create_static_topic("T", 2, brokers=["a"], attributes=COMPACTED)
    values: dict[str, str] = {}
    async with table(mq, local=False) as remote:
        await put_all(remote, values, 0)
        await admin.remap_static_topic("T", ["b"], mode=Mode.AVAILABLE)
        await put_all(remote, values, 1)
    await compact(admin, 14)
    seen: dict[str, list[str]] = {}
    for part in (1, 2):
        async with Consumer("g", "T", **mq.at) as consumer:
            async for message in consumer:
                seen.setdefault(message.key, []).append(message.body.decode())
                if sum(map(len, seen.values())) == 7 * part:
                    break
        assert sum(each.lag for each in await admin.lag("g")) == 14 - 7 * part
    assert {key: found[-1] for key, found in seen.items()} == values
    assert {len(found) for found in seen.values()} == {2}


async def test_a_topic_of_compacted_queues_grows_only_by_force(admin: Admin) -> None:
    await admin.create_static_topic("T", 2, brokers=["a"], attributes=COMPACTED)
    with pytest.raises(StaticTopicError, match="its keys would go to other queues"):
        await admin.create_static_topic("T", 3)
    with pytest.raises(StaticTopicError, match=r"exists with key\.queue=its default"):
        await admin.create_static_topic("T", 3, attributes={"key.queue": "java"}, force=True)
    await admin.create_static_topic("T", 3, attributes=COMPACTED, force=True)
    assert len(await admin.logic_queues("T")) == 3


async def test_a_broker_that_joins_compacts_too(mq: Brokers, admin: Admin) -> None:
    attributes = {**COMPACTED, "key.queue": "headrace"}
    await admin.create_static_topic("T", 2, attributes=attributes)
    await mq.start("c")
    await admin.remap_static_topic("T", ["c"])
    assert {config.attributes == attributes for config in (await admin.topic("T")).values()} == {
        True
    }
    async with Producer(**mq.at) as producer:
        for number in range(20):
            await producer.send(Message("T", b"x", key=f"k{number}"))


async def test_a_purged_topic_stays_compacted(mq: Brokers, admin: Admin) -> None:
    attributes = {**COMPACTED, "key.queue": "headrace"}
    await admin.create_static_topic("T", 2, attributes=attributes)
    async with table(mq, local=False) as remote:
        await remote.put("k", "value")
        await admin.alter_topic("T", attributes={"delete.retention.ms": "5000"})
        await admin.purge_topic("T")
    async with table(mq, local=False) as remote:
        assert await remote.get("k") is None
    expected = {**attributes, "delete.retention.ms": "5000"}
    assert [config.attributes for config in (await admin.topic("T")).values()] == [expected] * 2


async def test_no_leader_is_put_on_a_broker_of_apache(mq: Brokers) -> None:
    class MixedAdmin(Admin):
        """Takes broker b for one of Apache's."""

        async def _is_headrace(self, address: str) -> bool:
            return address != mq.brokers["b"].address

    async with MixedAdmin(**mq.at) as admin:
        await check_leaders(admin)


async def check_leaders(admin: Admin) -> None:
    with pytest.raises(StaticTopicError, match="broker b is not headrace's"):
        await admin.create_static_topic("T", 2, attributes=COMPACTED)
    await admin.create_static_topic("T", 2, brokers=["a"], attributes=COMPACTED)
    with pytest.raises(StaticTopicError, match="broker b is not headrace's"):
        await admin.remap_static_topic("T", ["b"], mode=Mode.AVAILABLE)
    await admin.create_static_topic("plain", 2)
