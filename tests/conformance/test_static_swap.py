"""A store with static topics, opened in turn by our broker and by Apache's.

Its queues have been on another broker meanwhile, one of ours, which is there all the time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from headrace import Consumer, Message, Producer
from headrace.admin.client import Admin
from headrace.admin.statictopic import UnchangedTopic
from headrace_daemon.network import TcpNetwork
from tests.conformance.console import Console
from tests.conformance.lookups import once_brokers_are_known
from tests.conformance.peer import TIMEOUT_MS, Peer, quick_peer
from tests.support.running_brokers import Brokers

pytestmark = [pytest.mark.conformance, pytest.mark.slow, pytest.mark.long]

TOPIC, GROUP = "SWAPPED", "swap-follows"
# Made and deleted by Apache's broker.
THEIRS = "THEIRS"
SWAPPED, OTHER = "broker-a", "broker-other"
QUEUES, COUNT, READ_S = 3, 12, 60
# Logic queue and offset -> body.
Written = dict[tuple[int, int], bytes]


@asynccontextmanager
async def cluster(name: str, folder: Path) -> AsyncIterator[tuple[Peer, Admin]]:
    """The swapped store's broker of one kind or the other, stopped in order if it is ours."""
    with quick_peer(name, store=folder / "store", settings={}) as peer:
        async with trio.open_nursery() as nursery:
            running = Brokers(folder, TcpNetwork(), nursery)
            running.nameserver = peer.nameserver
            await running.start(OTHER)
            async with Admin(nameserver=peer.nameserver) as admin:
                yield peer, admin
            await running.stop_all()
        if name == "headrace":
            peer.daemons["broker"].stop()


async def send(nameserver: str, written: Written) -> None:
    async with Producer(nameserver=nameserver, timeout_ms=TIMEOUT_MS) as producer:
        for number in range(COUNT):
            body = b"%d" % len(written)
            sent = await producer.send(Message(TOPIC, body, key=f"k{number}"))
            place = sent.queue.queue_id, sent.queue_offset
            assert written.setdefault(place, body) == body, place


async def read(nameserver: str, group: str, count: int) -> Written:
    """The next messages of a group, which are committed."""

    async def take_all() -> Written:
        async with Consumer(group, TOPIC, nameserver=nameserver, start="earliest") as consumer:
            return await take(consumer, count)

    with trio.fail_after(READ_S):
        return await once_brokers_are_known(take_all)


async def take(consumer: Consumer, count: int) -> Written:
    found: Written = {}
    async for message in consumer:
        found[message.queue.queue_id, message.queue_offset] = bytes(message.body)
        if len(found) == count:
            return found
    raise AssertionError


async def check(peer: Peer, console: Console, written: Written) -> None:
    """Our clients and Java's read all messages at the places of their acknowledgements."""
    group = f"swap-{peer.name}-{len(written)}"
    assert await read(peer.nameserver, group, len(written)) == written
    dumped = await trio.to_thread.run_sync(console.dump, peer, [TOPIC], [group])
    rows = (line.split("\t") for line in dumped if line.startswith("message\t"))
    assert {(int(row[2]), int(row[3])) for row in rows} == written.keys()


async def follow(peer: Peer, followed: Written, written: Written) -> None:
    """Read on where the group was under the other broker.

    Apache's broker is killed, so what it committed in its last 5 s may come again.
    """
    new = Written()
    with trio.fail_after(READ_S):
        async with Consumer(GROUP, TOPIC, nameserver=peer.nameserver, start="earliest") as consumer:
            async for message in consumer:
                new[message.queue.queue_id, message.queue_offset] = bytes(message.body)
                if {**followed, **new} == written:
                    break
    assert not followed or len(new) < len(written)
    followed.update(new)


async def mqadmin(console: Console, peer: Peer, *words: str) -> str:
    printed = await trio.to_thread.run_sync(lambda: console.printed(peer, *words))
    assert "Exception" not in printed, printed
    return printed


async def test_static_topics_go_on_under_the_other_broker(console: Console, tmp_path: Path) -> None:
    written, followed = Written(), Written()
    mapping_file = tmp_path / "store" / "config" / "topicQueueMapping.json"

    async with cluster("headrace", tmp_path) as (peer, admin):
        await admin.create_static_topic(TOPIC, QUEUES, brokers=[SWAPPED])
        await send(peer.nameserver, written)
        await admin.remap_static_topic(TOPIC, [OTHER])
        await send(peer.nameserver, written)
        await admin.remap_static_topic(TOPIC, [SWAPPED], queues=[0, 1])
        await send(peer.nameserver, written)
        await follow(peer, followed, written)
    # Strict remaps leave no gap.
    assert all(offset < len(written) for _, offset in written)

    async with cluster("apache", tmp_path) as (peer, admin):
        await check(peer, console, written)
        await send(peer.nameserver, written)
        await follow(peer, followed, written)
        await mqadmin(console, peer, "remappingStaticTopic", "-t", TOPIC, "-b", OTHER)
        await send(peer.nameserver, written)
        await mqadmin(console, peer, "updateStaticTopic", "-t", THEIRS, "-qn", "2", "-b", SWAPPED)
        await mqadmin(console, peer, "updateStaticTopic", "-t", TOPIC, "-qn", "4", "-b", SWAPPED)
        await send(peer.nameserver, written)
    assert THEIRS in mapping_file.read_text()

    async with cluster("headrace", tmp_path) as (peer, admin):
        await check(peer, console, written)
        await send(peer.nameserver, written)
        await follow(peer, followed, written)
        with pytest.raises(UnchangedTopic):
            await admin.repair_static_topic(TOPIC)
        await admin.remap_static_topic(TOPIC, [SWAPPED])
        await send(peer.nameserver, written)
        queues = await admin.logic_queues(THEIRS)
        assert [queue.leader for queue in queues] == [SWAPPED] * 2

    async with cluster("apache", tmp_path) as (peer, admin):
        await check(peer, console, written)
        await follow(peer, followed, written)
        await mqadmin(console, peer, "deleteTopic", "-t", THEIRS, "-c", "DefaultCluster")

    async with cluster("headrace", tmp_path) as (peer, admin):
        await check(peer, console, written)
        # A deleted topic's name is free.
        await admin.create_static_topic(THEIRS, 1, brokers=[OTHER])
