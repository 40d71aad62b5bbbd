"""Whole stores of one broker under the other: every kind of message, crashes, record checksums."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from anyio import run

from headrace import Admin, HeadraceError, Message, Producer
from tests.conformance.peer import TIMEOUT_MS, driver_command, java_build, running
from tests.conformance.probe import wait_for_route
from tests.support.golden import golden_store, manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from tests.conformance.peer import Peer

pytestmark = [
    pytest.mark.conformance,
    pytest.mark.slow,
    pytest.mark.xdist_group("conformance"),
]

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
# Here Apache's broker goes on by itself: what is due is delivered, what is undecided asked for.
BUSY_TOPICS = [
    *("G_DELAY", "G_TIMER", "SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer"),
    *("RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC"),
]
# Static, compacted and inner-batch topics, which headrace keeps for Apache's broker.
KEPT_TOPICS = ["G_STATIC", "G_COMPACT", "G_BCQ"]
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


def dump(peer: Peer, home: Path, topics: Iterable[str]) -> set[str]:
    """What Apache's own client reads there; see Dump.java."""
    command = driver_command("conformance.Dump", home=home)
    command += [peer.nameserver, ",".join(topics), ",".join(GROUPS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return {line for line in done.stdout.splitlines() if re.match("message|index|offset", line)}


def of_kind(lines: set[str], *kinds: str) -> set[str]:
    return {line for line in lines if line.partition("\t")[0] in kinds}


def quiet(lines: set[str]) -> set[str]:
    """Those of topics that nobody writes to."""
    return {line for line in lines if not any(f"\t{topic}\t" in line for topic in BUSY_TOPICS)}


def mqadmin(peer: Peer, home: Path, *arguments: str) -> list[str]:
    """The lines of its table: they name the broker, or begin with a message id."""
    command = ["java", f"-Duser.home={home}", "-cp", f"{java_build() / 'lib'}/*"]
    command += ["org.apache.rocketmq.tools.command.MQAdminStartup", *arguments]
    done = subprocess.run(
        [*command, "-n", peer.nameserver],
        capture_output=True,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
    )
    lines = done.stdout.splitlines()
    return sorted(line for line in lines if "broker-a" in line or re.match("[0-9A-F]{32} ", line))


async def write(nameserver: str) -> None:
    """One message by one, many at once, one that gets compressed."""
    async with Admin(nameserver=nameserver) as admin:
        await admin.create_topic(NEW, queues=2)
    async with Producer(nameserver=nameserver, timeout_ms=TIMEOUT_MS) as producer:
        for number in range(50):
            message = Message(NEW, b"one %d" % number, key=f"one-{number}", tag="t")
            await producer.send(message)
        await producer.send_many(
            [Message(NEW, b"many %d" % number, key=f"many-{number}") for number in range(2000)]
        )
        await producer.send(Message(NEW, b"large " * 20_000, key="large"))


async def be_refused(nameserver: str, topics: Iterable[str]) -> None:
    """Neither sends nor deletions get through to topics that only Apache's broker serves."""
    refusal = "which this broker keeps for Apache RocketMQ"
    async with Producer(nameserver=nameserver) as producer, Admin(nameserver=nameserver) as admin:
        for topic in topics:
            with pytest.raises(HeadraceError, match=refusal):
                await producer.send(Message(topic, b"new", key="new"))
            with pytest.raises(HeadraceError, match=refusal):
                await admin.delete_topic(topic)


@pytest.mark.parametrize("ending", ["clean", "kill9"])
def test_a_store_with_every_kind_of_message(ending: str, tmp_path: Path) -> None:
    """Written by Apache's broker, opened by ours, by Apache's, which is killed, and by ours."""
    store = tmp_path / "store"
    shutil.copytree(golden_store(ending), store)
    written = manifest(ending)
    topics = [*TOPICS, NEW, *(["G_STREAM"] if "acked" in written else [])]
    with running("headrace", store=store, settings=GOLDEN_SETTINGS) as peer:
        run(write, peer.nameserver)
        run(be_refused, peer.nameserver, KEPT_TOPICS)
        ours = dump(peer, tmp_path, [*topics, *BUSY_TOPICS])
        static = dump(peer, tmp_path, ["G_STATIC"])
        assert places(static) == places_of(written, "G_STATIC")
        tables = [mqadmin(peer, tmp_path, *command) for command in TABLES]
        peer.daemons["broker"].stop()
    read = Counter(message["topic"] for message in written["messages"])
    found = by_topic(ours)
    assert found[NEW] == WRITTEN
    assert {topic: found[topic] for topic in TOPICS} == {topic: read[topic] for topic in TOPICS}
    assert all(found[topic] >= read[topic] > 0 for topic in BUSY_TOPICS)
    assert found["G_STREAM"] >= len(written.get("acked", ()))
    assert all(tables)

    with running("apache", store=store, settings=GOLDEN_SETTINGS) as peer:
        assert places(dump(peer, tmp_path, KEPT_TOPICS)) == places_of(written, *KEPT_TOPICS)
        theirs = dump(peer, tmp_path, [*topics, *BUSY_TOPICS])
        assert quiet(theirs) == quiet(ours)
        assert of_kind(ours, "message") <= theirs
        wait_until(
            lambda: [mqadmin(peer, tmp_path, *command) for command in TABLES] == tables,
            "the tables differ",
        )
        # What was to come an hour after the store was made.
        wait_until(
            lambda: by_topic(dump(peer, tmp_path, ["G_TIMER"]))["G_TIMER"] > found["G_TIMER"],
            "no timer fired",
        )

    with running("headrace", store=store, settings=GOLDEN_SETTINGS) as peer:
        again = dump(peer, tmp_path, topics)
        assert of_kind(again, "message", "offset") == of_kind(quiet(ours), "message", "offset")


def wait_until(is_so: Callable[[], bool], otherwise: str) -> None:
    """Apache's broker fills its index and its timer's topics behind what it answers."""
    until = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < until, otherwise


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
    "K_STATIC": ("updateStaticTopic", "-c", "DefaultCluster", "-qn", "2", "-t", "K_STATIC"),
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


def test_topics_of_kinds_that_only_apaches_broker_serves(tmp_path: Path) -> None:
    """Made by Apache's broker in a store of ours, which it opens again after ours; with kills."""
    store = tmp_path / "store"
    with running("headrace", store=store, settings={}) as peer:
        run(write, peer.nameserver)
        peer.daemons["broker"].stop()
    with running("apache", store=store, settings={}) as peer:
        for topic, command in K_TOPICS.items():
            mqadmin(peer, tmp_path, *command)
            wait_for_route(peer.nameserver, TIMEOUT_S, topic)
        run(write_to_kept, peer.nameserver)
        theirs = dump(peer, tmp_path, [NEW, *K_TOPICS])
    counts = dict.fromkeys(K_TOPICS, K_MESSAGES)
    assert by_topic(theirs) == {NEW: WRITTEN, **counts}

    with running("headrace", store=store, settings={}) as peer:
        run(be_refused, peer.nameserver, K_TOPICS)
        ours = dump(peer, tmp_path, [NEW, "K_STATIC", "K_COMPACT"])
        assert by_topic(ours) == {NEW: WRITTEN, "K_STATIC": K_MESSAGES, "K_COMPACT": K_MESSAGES}
        assert {line for line in of_kind(ours, "message") if "\tK_COMPACT\t" not in line} <= theirs
        run(write, peer.nameserver)

    with running("apache", store=store, settings={}) as peer:
        again = dump(peer, tmp_path, K_TOPICS)
        assert of_kind(again, "message") == {
            line for line in of_kind(theirs, "message") if f"\t{NEW}\t" not in line
        }
        run(write_to_kept, peer.nameserver)
        found = by_topic(dump(peer, tmp_path, [NEW, *K_TOPICS]))
        assert found == {NEW: 2 * WRITTEN, **dict.fromkeys(K_TOPICS, 2 * K_MESSAGES)}


def by_topic(lines: set[str]) -> Counter[str]:
    """How many messages each topic has."""
    return Counter(line.split("\t")[1] for line in of_kind(lines, "message"))


def test_records_with_checksums_of_their_own(tmp_path: Path) -> None:
    """Both write them, and both check them when they start after a kill."""
    store = tmp_path / "store"
    settings = {
        "enabledAppendPropCRC": "true",
        "forceVerifyPropCRC": "true",
        "mappedFileSizeCommitLog": "1048576",
    }
    wanted: set[str] = set()
    for name in ("headrace", "apache"):
        with running(name, store=store, settings=settings) as peer:
            run(write, peer.nameserver)
            found = of_kind(dump(peer, tmp_path, [NEW]), "message")
            assert wanted <= found
            wanted = found
    assert len(wanted) == 2 * WRITTEN
    assert all("__CRC32#" in line for line in wanted)
    with running("headrace", store=store, settings=settings) as peer:
        assert of_kind(dump(peer, tmp_path, [NEW]), "message") == wanted
