"""Compacted queues rebuilt from Apache's broker, and pulled from ours by the code of its slaves."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from anyio import run, sleep

from headrace import Admin
from tests.conformance.console import Console
from tests.conformance.peer import Peer, quick_peer
from tests.conformance.test_compacted_topics import ATTRIBUTES, Row, Table, create
from tests.support.until import wait_until

pytestmark = [pytest.mark.conformance, pytest.mark.slow, pytest.mark.long]

TOPIC = "C_TABLE"
KEYS = 200
SETTINGS = {
    "compactionScheduleInternal": "1000",
    # Compaction takes what is flushed.
    "flushCommitLogLeastPages": "0",
    "compactionMappedFileSize": "65536",
    "compactionCqMappedFileSize": "4600",
    "mappedFileSizeCommitLog": str(1 << 20),
}
WITHOUT_RUNS = {**SETTINGS, "compactionScheduleInternal": "3600000"}


def fetch(console: Console, peer: Peer, queue: int, end: int) -> list[Row]:
    lines = console.compacted("fetch", peer.nameserver, TOPIC, peer.broker, str(queue), str(end))
    fields = (line.split("\t") for line in lines)
    return [Row(int(queue), int(offset), key, body) for queue, offset, key, body in fields]


def test_a_slave_of_apaches_broker_can_pull_a_queue(console: Console, tmp_path: Path) -> None:
    table = Table(console, KEYS)
    with quick_peer("headrace", store=tmp_path / "store", settings=SETTINGS) as peer:
        create(console, peer, TOPIC, "-a", ATTRIBUTES)
        table.write(peer, 0, 2000)
        table.wait_compacted(peer, 2000)
        rows = table.read(peer, "pull")
        for queue in range(4):
            expected = [row for row in rows if row.queue == queue]
            assert fetch(console, peer, queue, expected[-1].offset + 1) == expected
            # Without messages of its own a slave has no end to give.
            assert fetch(console, peer, queue, -1) == expected
            some = fetch(console, peer, queue, expected[20].offset)
            assert some == expected[: len(some)]
            assert 20 <= len(some) <= 30
        for queue in range(4):
            group = f"{TOPIC}-{queue}-pull-group"
            printed = console.printed(peer, "consumerConnection", "-g", group)
            assert "not online" in printed, printed


def newest(rows: list[Row]) -> dict[str, str]:
    return {row.key: row.body for row in rows}


def lose_older_part(store: Path) -> None:
    """All but the newest messages: the compaction log, and what the CommitLog had before."""
    shutil.rmtree(store / "compaction")
    *older, _ = sorted((store / "commitlog").iterdir())
    assert len(older) > 1
    for path in older:
        path.unlink()


async def rebuild(peer: Peer, master: Peer) -> None:
    async with Admin(nameserver=peer.nameserver) as admin:
        states = await admin.rebuild_topic(TOPIC, master.broker)
        while any(state.is_rebuilding for state in states.values()):
            await sleep(0.1)
            states = await admin.rebuild_topic(TOPIC, master.broker, start=False)
    assert [state.rebuild_problem for state in states.values()] == [""]


def test_queues_are_rebuilt_from_apaches_broker(console: Console, tmp_path: Path) -> None:
    table, apache, ours = Table(console, KEYS), tmp_path / "apache", tmp_path / "ours"
    with quick_peer("apache", store=apache, settings=WITHOUT_RUNS) as peer:
        create(console, peer, TOPIC, "-a", "+cleanup.policy=COMPACTION")
        table.write(peer, 0, 3000)
        count = 3000
        wait_until(lambda: len(table.read(peer, "pull")) == count, "messages are missing")
        values = newest(table.read(peer, "pull"))
        assert len(values) == len(table.newest(count))
        peer.daemons["broker"].stop()
    shutil.copytree(apache, ours)
    lose_older_part(ours)

    with (
        quick_peer("apache", store=apache, settings=SETTINGS) as master,
        # The other broker is of another cluster.
        quick_peer(
            "headrace", store=ours, settings={**SETTINGS, "rebuildSources": master.broker}
        ) as peer,
    ):
        assert newest(table.read(peer, "pull")).items() < values.items()
        wait_until(
            lambda: len(table.read(master, "pull")) < count, "Apache's broker compacts nothing"
        )
        run(rebuild, peer, master)
        rows = table.read(peer, "pull")
        assert newest(rows) == values
        for queue in range(4):
            offsets = [row.offset for row in rows if row.queue == queue]
            assert offsets == sorted(set(offsets))
