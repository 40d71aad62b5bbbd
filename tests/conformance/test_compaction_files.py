"""Compaction logs under both brokers: what one has written, the other serves and compacts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from anyio import run
from zlib_ng.zlib_ng import crc32

from headrace import Admin, Message, Producer
from headrace_broker.compaction.units import FileSizes
from tests.conformance.console import Console
from tests.conformance.peer import TIMEOUT_MS, Peer, quick_peer
from tests.conformance.test_store_both_ways import of_kind
from tests.support.compaction import load_as_apache
from tests.support.until import wait_until

pytestmark = [pytest.mark.conformance, pytest.mark.slow, pytest.mark.long]

TOPIC = "C_STATE"
SIZES = FileSizes.of(65_536, 4600)
SETTINGS = {
    "compactionMappedFileSize": "65536",
    "compactionCqMappedFileSize": "4600",
    "compactionScheduleInternal": "1000",
    # Compaction takes what is flushed.
    "flushCommitLogLeastPages": "0",
}
# Apache's broker loses messages that arrive during a swap, so it compacts in a run of its own.
WITHOUT_RUNS = {**SETTINGS, "compactionScheduleInternal": "3600000"}
KEYS = 50
COUNT = 1000


async def create(nameserver: str) -> None:
    async with Admin(nameserver=nameserver) as admin:
        await admin.create_topic(TOPIC, queues=2, attributes={"cleanup.policy": "COMPACTION"})


async def write(nameserver: str, first: int, count: int) -> None:
    """Messages over all keys but one, the value of which stays the first."""
    async with Producer(nameserver=nameserver, timeout_ms=TIMEOUT_MS) as producer:
        for number in range(first, first + count):
            key = "once" if not number else f"key-{number % KEYS}"
            await producer.send(Message(TOPIC, value(number), key=key))


def value(number: int) -> bytes:
    return b"value-%d-" % number + bytes(100)


def checksums(count: int) -> dict[str, int]:
    """The CRC of the newest value of each key after ``count`` messages."""
    newest = {f"key-{number % KEYS}": number for number in range(1, count)} | {"once": 0}
    return {key: crc32(value(number)) & 0x7FFFFFFF for key, number in newest.items()}


def read(console: Console, peer: Peer) -> tuple[dict[str, int], int]:
    """By the official client: the CRC of each key's last value, and the number of messages."""
    lines = [line.split("\t") for line in of_kind(console.dump(peer, [TOPIC], ["g"]), "message")]
    lines.sort(key=lambda fields: int(fields[3]))
    keys = [re.search("KEYS=([^,}]*)", fields[-1]) for fields in lines]
    return {key[1]: int(fields[9]) for key, fields in zip(keys, lines, strict=True) if key}, len(
        lines
    )


def in_files(store: Path) -> dict[str, int]:
    """The keys that Apache's broker is going to find, with the CRC of their bodies."""
    found: dict[str, int] = {}
    for messages in load_as_apache(store, SIZES).values():
        found |= {message.properties["KEYS"]: message.body_crc for message in messages}
    return found


def test_a_compacted_topic_changes_hands(console: Console, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with quick_peer("headrace", store=store, settings=SETTINGS) as peer:
        run(create, peer.nameserver)
        run(write, peer.nameserver, 0, COUNT)
        assert read(console, peer)[0] == checksums(COUNT)
        peer.daemons["broker"].stop()
    assert in_files(store) == checksums(COUNT)

    with quick_peer("apache", store=store, settings=WITHOUT_RUNS) as peer:
        assert read(console, peer)[0] == checksums(COUNT)
        run(write, peer.nameserver, COUNT, COUNT)
        wait_until(lambda: read(console, peer)[0] == checksums(2 * COUNT), "values are missing")
        before = read(console, peer)[1]
        peer.daemons["broker"].stop()

    with quick_peer("apache", store=store, settings=SETTINGS) as peer:
        wait_until(lambda: read(console, peer)[1] < before, "Apache's broker compacts nothing")
        assert read(console, peer)[0] == checksums(2 * COUNT)
        peer.daemons["broker"].kill()

    with quick_peer("headrace", store=store, settings=SETTINGS) as peer:
        assert read(console, peer)[0] == checksums(2 * COUNT)
        run(write, peer.nameserver, 2 * COUNT, COUNT)
        peer.daemons["broker"].kill()
    with quick_peer("headrace", store=store, settings=SETTINGS) as peer:
        assert read(console, peer)[0] == checksums(3 * COUNT)
