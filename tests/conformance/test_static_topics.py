"""Static topics on both kinds of broker at once, changed by mqadmin and by our tool in turn."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import trio

from headrace import Consumer, Message, Producer
from headrace.admin.client import Admin
from headrace.admin.statictopic import StaticTopicError, UnchangedTopic
from headrace_daemon.network import TcpNetwork
from headrace_protocol.statictopic.plans import Mode
from tests.conformance.console import Console
from tests.conformance.peer import TIMEOUT_MS, Peer, quick_peer
from tests.support.running_brokers import Brokers, brokers

READ_S = 30
# Logic queue and offset -> body.
Written = dict[tuple[int, int], bytes]


@pytest.fixture(scope="module")
def apache() -> Iterator[Peer]:
    """A nameserver and broker-a; no test before has cached routes to our brokers there."""
    with quick_peer("apache") as peer:
        yield peer


@pytest.fixture
async def ours(apache: Peer, tmp_path: Path) -> AsyncIterator[Brokers]:
    """Two of our brokers at Apache's nameserver."""
    async with trio.open_nursery() as nursery:
        running = Brokers(tmp_path, TcpNetwork(), nursery)
        running.nameserver = apache.nameserver
        for name in ("ours-b", "ours-c"):
            await running.start(name)
        yield running
        await running.stop_all()


@pytest.fixture
async def admin(ours: Brokers) -> AsyncIterator[Admin]:
    async with Admin(nameserver=ours.nameserver) as admin:
        yield admin


@pytest.fixture
def mqadmin(apache: Peer, console: Console) -> Callable[..., str]:
    return lambda *words: console.printed(apache, *words)


async def leaders(admin: Admin, topic: str) -> list[str]:
    return [each.leader for each in await admin.logic_queues(topic)]


async def send(nameserver: str, topic: str, written: Written, count: int = 8) -> None:
    async with Producer(nameserver=nameserver, timeout_ms=TIMEOUT_MS) as producer:
        for number in range(count):
            body = b"%d %d" % (number, len(written))
            sent = await producer.send(Message(topic, body, key=f"k{number}"))
            assert written.setdefault((sent.queue.queue_id, sent.queue_offset), body) == body


async def read_all(nameserver: str, topic: str, count: int) -> Written:
    """The messages that a new group reads of a topic, at most ``count``."""
    read: Written = {}
    with trio.move_on_after(READ_S):
        async with Consumer(f"g-{topic}", topic, nameserver=nameserver) as consumer:
            async for message in consumer:
                read[message.queue.queue_id, message.queue_offset] = bytes(message.body)
                if len(read) == count:
                    break
    return read


@pytest.mark.slow
async def test_a_topic_moves_between_both_kinds(
    apache: Peer,
    console: Console,
    admin: Admin,
    mqadmin: Callable[..., str],
) -> None:
    server, written = apache.nameserver, Written()
    await admin.create_static_topic("MIXED", 3)
    assert sorted(await leaders(admin, "MIXED")) == ["broker-a", "ours-b", "ours-c"]
    await send(server, "MIXED", written)
    with pytest.raises(StaticTopicError, match=r"broker-a is not .*--mode available"):
        await admin.remap_static_topic("MIXED", ["ours-b"])
    await admin.remap_static_topic("MIXED", ["ours-b"], mode=Mode.AVAILABLE)
    await send(server, "MIXED", written)
    await call(mqadmin, "remappingStaticTopic", "-t", "MIXED", "-b", "ours-c,broker-a")
    await send(server, "MIXED", written)
    await admin.remap_static_topic("MIXED", ["ours-c"], mode=Mode.AVAILABLE)
    await send(server, "MIXED", written)
    await admin.remap_static_topic("MIXED", ["ours-b"])
    await send(server, "MIXED", written)
    assert await leaders(admin, "MIXED") == ["ours-b"] * 3
    with pytest.raises(UnchangedTopic):
        await admin.repair_static_topic("MIXED")
    status = await call(mqadmin, "topicStatus", "-t", "MIXED")
    ends = {int(line.split()[1]): int(line.split()[3]) for line in logic_rows(status)}
    assert ends == {
        queue: max(offset for at, offset in written if at == queue) + 1 for queue in range(3)
    }
    assert await read_all(server, "MIXED", len(written)) == written
    dumped = await trio.to_thread.run_sync(console.dump, apache, ["MIXED"], ["g-MIXED"])
    rows = (line.split("\t") for line in dumped if line.startswith("message\t"))
    assert {(int(row[2]), int(row[3])) for row in rows} == written.keys()


async def call(mqadmin: Callable[..., str], *words: str) -> str:
    return await trio.to_thread.run_sync(lambda: mqadmin(*words))


def logic_rows(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith("__syslo__global__")]


async def test_a_topic_of_mqadmin_grows_and_is_repaired(
    ours: Brokers, admin: Admin, mqadmin: Callable[..., str]
) -> None:
    await call(mqadmin, "updateStaticTopic", "-t", "THEIRS", "-qn", "4", "-c", "DefaultCluster")
    await admin.create_static_topic("THEIRS", 6)
    await call(mqadmin, "updateStaticTopic", "-t", "THEIRS", "-qn", "7", "-c", "DefaultCluster")
    assert len(await leaders(admin, "THEIRS")) == 7
    written = Written()
    await send(ours.nameserver, "THEIRS", written)
    await call(mqadmin, "remappingStaticTopic", "-t", "THEIRS", "-b", "ours-c")
    await send(ours.nameserver, "THEIRS", written)
    assert await leaders(admin, "THEIRS") == ["ours-c"] * 7
    assert await read_all(ours.nameserver, "THEIRS", len(written)) == written


async def test_mqadmin_rules_over_our_brokers_alone(console: Console, tmp_path: Path) -> None:
    async with (
        brokers(tmp_path, ["a", "b", "c"], memory=False) as mq,
        Admin(nameserver=mq.nameserver) as admin,
    ):
        peer = Peer("headrace", mq.nameserver, mq.brokers["a"].address, {}, 0)

        async def command(*words: str) -> str:
            printed = await trio.to_thread.run_sync(lambda: console.printed(peer, *words))
            assert "Exception" not in printed, printed
            return printed

        written = Written()
        await command("updateStaticTopic", "-t", "OURS", "-qn", "3", "-c", "DefaultCluster")
        assert sorted(await leaders(admin, "OURS")) == ["a", "b", "c"]
        await send(mq.nameserver, "OURS", written)
        for targets in ("b", "a,c"):
            await command("remappingStaticTopic", "-t", "OURS", "-b", targets)
            assert set(await leaders(admin, "OURS")) == set(targets.split(","))
            await send(mq.nameserver, "OURS", written)
        assert await read_all(mq.nameserver, "OURS", len(written)) == written
        with pytest.raises(UnchangedTopic):
            await admin.repair_static_topic("OURS")
        ends = {
            int(row.split()[1]): int(row.split()[3])
            for row in logic_rows(await command("topicStatus", "-t", "OURS"))
        }
        assert ends == {
            queue: max(offset for at, offset in written if at == queue) + 1 for queue in range(3)
        }
        assert '"totalQueues":3' in "".join((await command("topicRoute", "-t", "OURS")).split())
        reset = await command("resetOffsetByTime", "-g", "g-OURS", "-t", "OURS", "-s", "1000")
        assert [row.split()[2] for row in logic_rows(reset)] == ["0"] * 3
        assert await read_all(mq.nameserver, "OURS", len(written)) == written
        address = mq.brokers["a"].address
        await command("updateTopicPerm", "-b", address, "-t", "OURS", "-p", "4")
        route = "".join((await command("topicRoute", "-t", "OURS")).split())
        assert route.count('"perm":4') == 1
        await command("deleteTopic", "-t", "OURS", "-c", "DefaultCluster")
        assert not await admin.static_topics()
        assert "OURS" not in (await command("topicList")).splitlines()
