"""A tier that holds what has left the log: read by the official Java client, from either broker."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

import pytest
from anyio import run

from headrace import Admin, Message, Producer
from tests.conformance.console import Console
from tests.conformance.peer import TIMEOUT_MS, Peer, quick_peer
from tests.conformance.uploads import wait_until_uploaded

pytestmark = [pytest.mark.conformance, pytest.mark.slow, pytest.mark.long]

TOPIC = "tier_swap"
QUEUES = 3
COUNT = 12_000
TAGS = 100
WAIT_S = 60
MORE = 90
# Fields of a dumped message: its place is that in the log or in the tier.
_QUEUE, _OFFSET, _PLACE = 2, 3, 4


def settings(folder: Path) -> dict[str, str]:
    return {
        "messageStorePlugIn": "org.apache.rocketmq.tieredstore.TieredMessageStore",
        "tieredBackendServiceProvider": (
            "org.apache.rocketmq.tieredstore.provider.PosixFileSegment"
        ),
        "tieredStoreFilePath": str(folder / "tier"),
        "tieredStoreGroupCommitTimeout": "1000",
        "mappedFileSizeCommitLog": str(32 << 20),
    }


def expiring(folder: Path) -> dict[str, str]:
    """Every disk is too full for the log, which keeps its last file only."""
    more = {"diskSpaceCleanForciblyRatio": "30", "cleanResourceInterval": "500"}
    return {**settings(folder), **more}


def message(number: int) -> Message:
    body = b"%d " % number * 1000
    return Message(TOPIC, body, key=f"k{number}", tag=f"t{number % TAGS}")


async def write(nameserver: str, first: int, count: int) -> None:
    async with Admin(nameserver=nameserver) as admin:
        await admin.create_topic(TOPIC, queues=QUEUES, if_not_exists=True)
    async with Producer(nameserver=nameserver, timeout_ms=TIMEOUT_MS) as producer:
        for begin in range(first, first + count, 300):
            await producer.send_many(
                [
                    Message(
                        TOPIC, b"%d " % number * 1000, key=f"k{number}", tag=f"t{number % TAGS}"
                    )
                    for number in range(begin, min(begin + 300, first + count))
                ]
            )


def messages(console: Console, peer: Peer) -> set[tuple[str, ...]]:
    """All messages as the Java client pulls them, without their places; queues have no holes."""
    found = set()
    offsets: dict[str, set[int]] = {}
    for line in console.dump(peer, [TOPIC], ["dumping"]):
        kind, *_ = fields = line.split("\t")
        if kind == "message":
            offsets.setdefault(fields[_QUEUE], set()).add(int(fields[_OFFSET]))
            found.add((*fields[:_PLACE], *fields[_PLACE + 1 :]))
        elif kind == "index":
            assert fields[-1] not in {"nothing", "[]"}, line
    assert all(numbers == {*range(len(numbers))} for numbers in offsets.values())
    return found


def check_tags_and_times(console: Console, peer: Peer) -> None:
    """The messages that mqadmin's consumer finds by tag, and from a time on."""
    printed = console.printed(peer, "printMsg", "-t", TOPIC, "-s", "t7", "-d", "false")
    assert len(re.findall("^MSGID", printed, re.MULTILINE)) == COUNT // TAGS
    assert {*re.findall(r"TAGS=(\w+)", printed)} == {"t7"}
    now_ms = str(int(time.time() * 1000))
    times = ("-b", "0", "-e", now_ms)
    printed = console.printed(peer, "printMsg", "-t", TOPIC, "-s", "t9", "-d", "false", *times)
    assert len(re.findall("^MSGID", printed, re.MULTILINE)) == COUNT // TAGS


def test_java_reads_all_that_has_left_the_log_from_either_broker(
    tmp_path: Path, console: Console
) -> None:
    usage = shutil.disk_usage(tmp_path)
    if usage.used / (usage.used + usage.free) < 0.35:
        pytest.skip("the disk is so empty that the log would expire by age only")
    store = tmp_path / "store"
    with quick_peer("headrace", store=store, settings=expiring(tmp_path)) as peer:
        run(write, peer.nameserver, 0, COUNT)
        wait_until_uploaded(peer.nameserver, TOPIC, WAIT_S)
        wanted = messages(console, peer)
        assert len(wanted) == COUNT
        check_tags_and_times(console, peer)
        peer.daemons["broker"].kill()
    with quick_peer("headrace", store=store, settings=expiring(tmp_path)) as peer:
        assert messages(console, peer) == wanted
        peer.daemons["broker"].stop()
    with quick_peer("apache", store=store, settings=settings(tmp_path)) as peer:
        assert messages(console, peer) == wanted
        run(write, peer.nameserver, COUNT, MORE)
        wanted = messages(console, peer)
        assert len(wanted) == COUNT + MORE
        peer.daemons["broker"].stop()
    with quick_peer("headrace", store=store, settings=expiring(tmp_path)) as peer:
        wait_until_uploaded(peer.nameserver, TOPIC, WAIT_S)
        assert messages(console, peer) == wanted
        peer.daemons["broker"].stop()
