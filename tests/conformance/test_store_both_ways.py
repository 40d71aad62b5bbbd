"""Whole stores of one broker under the other: every kind of message, crashes, record checksums."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import trio
from anyio import run

from headrace import Admin, Message, Producer
from headrace_daemon.network import TcpNetwork
from tests.conformance.console import Console
from tests.conformance.peer import TIMEOUT_MS, Peer, quick_peer
from tests.conformance.probe import wait_for_route
from tests.support.golden import golden_store, manifest
from tests.support.inner_batches import send_batch
from tests.support.until import wait_until

pytestmark = [pytest.mark.conformance, pytest.mark.slow]

# As tests/golden/README.md says, and nothing expires while we look.
GOLDEN_SETTINGS = {
    "mappedFileSizeCommitLog": "262144",
    "mappedFileSizeConsumeQueue": "2000",
    "maxHashSlotNum": "100",
    "maxIndexNum": "300",
    "mappedFileSizeTimerLog": "1048576",
    "compactionMappedFileSize": "262144",
    "compactionCqMappedFileSize": "4600",
    "fileReservedTime": "100000",
}
TOPICS = [
    *("G_PLAIN", "G_TAGS", "G_UTF8", "G_BIG", "G_BATCH", "G_ONEWAY", "G_SHARD", "G_ORDER"),
    *("G_RETRY", "G_TX", "%RETRY%g_retry", "%DLQ%g_retry"),
]
# To which both brokers write more.
STATIC = "G_STATIC"
# Here Apache's broker goes on by itself: what is due is delivered, what is undecided asked for.
BUSY_TOPICS = [
    *("G_DELAY", "G_TIMER", "SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer"),
    *("RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC"),
]
# With batch queues: both brokers write batches to it that are one record.
BATCHED = "G_BCQ"
GROUPS = ["g_push", "g_retry", "g_orderly", "g_lite"]
# What mqadmin prints the same of both brokers.
TABLES = [
    ("topicStatus", "-t", "G_TAGS"),
    ("consumerProgress", "-g", "g_push"),
    ("queryMsgByKey", "-t", "H_NEW", "-k", "one-7"),
]
TIMEOUT_S = 120
NEW = "H_NEW"
WRITTEN = 2051
BATCHED_MORE = 15


def of_kind(lines: set[str], *kinds: str) -> set[str]:
    return {line for line in lines if line.partition("\t")[0] in kinds}


def quiet(lines: set[str]) -> set[str]:
    """Those of topics that nobody writes to.

    A group without an offset is given 0 of an empty queue by ours, and none by Apache's broker.
    """
    return {
        line.removesuffix("\t-1") + "\t0" if line.endswith("\t-1") else line
        for line in lines
        if not any(f"\t{topic}\t" in line for topic in BUSY_TOPICS)
    }


async def write(nameserver: str) -> None:
    """One message by one, many at once, one that gets compressed."""
    async with Admin(nameserver=nameserver) as admin:
        await admin.create_topic(NEW, queues=2, if_not_exists=True)
    async with Producer(nameserver=nameserver, timeout_ms=TIMEOUT_MS) as producer:
        for number in range(50):
            message = Message(NEW, b"one %d" % number, key=f"one-{number}", tag="t")
            await producer.send(message)
        await producer.send_many(
            [Message(NEW, b"many %d" % number, key=f"many-{number}") for number in range(2000)]
        )
        await producer.send(Message(NEW, b"large " * 20_000, key="large"))


async def write_static(nameserver: str) -> None:
    async with Producer(nameserver=nameserver, timeout_ms=TIMEOUT_MS) as producer:
        for number in range(20):
            sent = await producer.send(Message(STATIC, b"static %d" % number, key=f"s-{number}"))
            assert sent.queue.broker_name == "__syslo__global__"


def write_batches(console: Console, peer: Peer, topic: str) -> set[str]:
    """Write batches of 1 to 5 messages; returns all messages of the topic."""

    async def send() -> None:
        for count in range(1, 6):
            sent = await send_batch(TcpNetwork().connect, peer.broker, 100 * count, count, topic)
            assert sent.batch_uniq_id == f"B{100 * count}"

    before = of_kind(console.dump(peer, [topic], GROUPS), "message")
    trio.run(send)
    found = of_kind(console.dump(peer, [topic], GROUPS), "message")
    assert before < found
    assert len(found) == len(before) + BATCHED_MORE
    return found


@pytest.mark.parametrize("ending", ["clean", pytest.param("kill9", marks=pytest.mark.long)])
def test_a_store_with_every_kind_of_message(ending: str, console: Console, tmp_path: Path) -> None:
    """Written by Apache's broker, opened by ours, by Apache's, which is killed, and by ours."""
    store = tmp_path / "store"
    shutil.copytree(golden_store(ending), store)
    written = manifest(ending)
    topics = [*TOPICS, NEW, *(["G_STREAM"] if "acked" in written else [])]
    with quick_peer("headrace", store=store, settings=GOLDEN_SETTINGS) as peer:
        run(write, peer.nameserver)
        # What was to come an hour after the store was made.
        read = Counter(message["topic"] for message in written["messages"])
        wait_until(
            lambda: by_topic(console.dump(peer, ["G_TIMER"], GROUPS))["G_TIMER"] > read["G_TIMER"],
            "no timer fired",
        )
        ours = console.dump(peer, [*topics, *BUSY_TOPICS], GROUPS)
        before = console.dump(peer, [STATIC], GROUPS)
        assert places(before) == places_of(written, STATIC)
        run(write_static, peer.nameserver)
        static = console.dump(peer, [STATIC], GROUPS)
        assert of_kind(before, "message") < of_kind(static, "message")
        before = console.dump(peer, [BATCHED], GROUPS)
        assert places(before) == places_of(written, BATCHED)
        batched = write_batches(console, peer, BATCHED)
        tables = [console.mqadmin(peer, *command) for command in TABLES]
        peer.daemons["broker"].stop()
    found = by_topic(ours)
    assert found[NEW] == WRITTEN
    assert {topic: found[topic] for topic in TOPICS} == {topic: read[topic] for topic in TOPICS}
    assert all(found[topic] >= read[topic] > 0 for topic in BUSY_TOPICS)
    assert found["G_STREAM"] >= len(written.get("acked", ()))
    assert all(tables)

    with quick_peer("apache", store=store, settings=GOLDEN_SETTINGS) as peer:
        assert of_kind(console.dump(peer, [BATCHED], GROUPS), "message") == batched
        batched = write_batches(console, peer, BATCHED)
        theirs = console.dump(peer, [*topics, *BUSY_TOPICS], GROUPS)
        assert quiet(theirs) == quiet(ours)
        assert quiet(console.dump(peer, [STATIC], GROUPS)) == quiet(static)
        run(write_static, peer.nameserver)
        more = of_kind(console.dump(peer, [STATIC], GROUPS), "message")
        assert by_topic(more)[STATIC] == by_topic(static)[STATIC] + 20
        assert of_kind(ours, "message") <= theirs
        wait_until(
            lambda: [console.mqadmin(peer, *command) for command in TABLES] == tables,
            "the tables differ",
        )
        # Nothing that came there comes here again.
        assert by_topic(console.dump(peer, ["G_TIMER"], GROUPS))["G_TIMER"] == found["G_TIMER"]

    with quick_peer("headrace", store=store, settings=GOLDEN_SETTINGS) as peer:
        again = console.dump(peer, topics, GROUPS)
        assert of_kind(again, "message", "offset") == of_kind(quiet(ours), "message", "offset")
        assert of_kind(console.dump(peer, [STATIC], GROUPS), "message") == more
        assert of_kind(console.dump(peer, [BATCHED], GROUPS), "message") == batched


def places(lines: set[str]) -> list[tuple[str, ...]]:
    """Topic, queue, queue offset and physical offset of each message."""
    return sorted(tuple(line.split("\t")[1:5]) for line in of_kind(lines, "message"))


def places_of(written: dict[str, Any], *topics: str) -> list[tuple[str, ...]]:
    """The same of what Apache's client read before."""
    fields = ("topic", "queueId", "queueOffset", "physicalOffset")
    messages = [message for message in written["messages"] if message["topic"] in topics]
    return sorted(tuple(str(message[field]) for field in fields) for message in messages)


# Made by Apache's broker, from what mqadmin is told.
K_TOPICS = {
    "K_COMPACT": (
        *("updateTopic", "-c", "DefaultCluster", "-r", "2", "-w", "2", "-t", "K_COMPACT"),
        *("-a", "+cleanup.policy=COMPACTION"),
    ),
    "K_BCQ": (
        *("updateTopic", "-c", "DefaultCluster", "-r", "2", "-w", "2", "-t", "K_BCQ"),
        *("-a", "+queue.type=BatchCQ"),
    ),
}
K_MESSAGES = 40


async def write_to_kept(nameserver: str) -> None:
    async with Producer(nameserver=nameserver, timeout_ms=TIMEOUT_MS) as producer:
        for topic in K_TOPICS:
            for number in range(K_MESSAGES // 2):
                await producer.send(Message(topic, b"one %d" % number, key=f"key-{number}"))
            many = [Message(topic, b"many", key=f"k-{n}") for n in range(K_MESSAGES // 2)]
            await producer.send_many(many)


@pytest.mark.long
def test_topics_of_other_kinds(console: Console, tmp_path: Path) -> None:
    """Made by Apache's broker in a store of ours, which it opens again after ours; with kills."""
    store = tmp_path / "store"
    with quick_peer("headrace", store=store, settings={}) as peer:
        run(write, peer.nameserver)
        peer.daemons["broker"].stop()
    with quick_peer("apache", store=store, settings={}) as peer:
        for topic, command in K_TOPICS.items():
            console.mqadmin(peer, *command)
            wait_for_route(peer.nameserver, TIMEOUT_S, topic)
        run(write_to_kept, peer.nameserver)
        theirs = console.dump(peer, [NEW, *K_TOPICS], GROUPS)
    counts = dict.fromkeys(K_TOPICS, K_MESSAGES)
    assert by_topic(theirs) == {NEW: WRITTEN, **counts}

    with quick_peer("headrace", store=store, settings={}) as peer:
        ours = console.dump(peer, [NEW, *K_TOPICS], GROUPS)
        assert by_topic(ours) == {NEW: WRITTEN, **counts}
        assert {line for line in of_kind(ours, "message") if "\tK_COMPACT\t" not in line} <= theirs
        run(write, peer.nameserver)
        batched = write_batches(console, peer, "K_BCQ")

    with quick_peer("apache", store=store, settings={}) as peer:
        again = of_kind(console.dump(peer, K_TOPICS, GROUPS), "message")
        compacted = {line for line in of_kind(theirs, "message") if "\tK_COMPACT\t" in line}
        assert again == compacted | batched
        run(write_to_kept, peer.nameserver)
        found = by_topic(console.dump(peer, [NEW, *K_TOPICS], GROUPS))
        more = {"K_COMPACT": 2 * K_MESSAGES, "K_BCQ": 2 * K_MESSAGES + BATCHED_MORE}
        assert found == {NEW: 2 * WRITTEN, **more}


def by_topic(lines: set[str]) -> Counter[str]:
    """The number of messages of each topic."""
    return Counter(line.split("\t")[1] for line in of_kind(lines, "message"))


@pytest.mark.long
def test_records_with_checksums_of_their_own(console: Console, tmp_path: Path) -> None:
    """Both write them, and both check them when they start after a kill."""
    store = tmp_path / "store"
    settings = {
        "enabledAppendPropCRC": "true",
        "forceVerifyPropCRC": "true",
        "mappedFileSizeCommitLog": "1048576",
    }
    wanted: set[str] = set()
    for name in ("headrace", "apache"):
        with quick_peer(name, store=store, settings=settings) as peer:
            run(write, peer.nameserver)
            found = of_kind(console.dump(peer, [NEW], GROUPS), "message")
            assert wanted <= found
            wanted = found
    assert len(wanted) == 2 * WRITTEN
    assert all("__CRC32#" in line for line in wanted)
    with quick_peer("headrace", store=store, settings=settings) as peer:
        assert of_kind(console.dump(peer, [NEW], GROUPS), "message") == wanted
