"""The official Java client and mqadmin on a compacted topic of ours, over restarts and kills."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conformance.console import Console
from tests.conformance.peer import Peer, quick_peer
from tests.support.until import wait_until

pytestmark = [pytest.mark.conformance, pytest.mark.slow]

TOPIC, OTHER = "C_TABLE", "C_OTHER"
QUEUES = 4
LOG_FILE_BYTES = 1 << 20
SETTINGS = {
    "compactionScheduleInternal": "1000",
    # Compaction takes what is flushed.
    "flushCommitLogLeastPages": "0",
    "compactionMappedFileSize": "4194304",
    "compactionCqMappedFileSize": "460000",
    "mappedFileSizeCommitLog": str(LOG_FILE_BYTES),
    "fileReservedTime": "1",
    "deleteFileBatchMax": "1000",
}
# The queues are those that Java's SelectMessageQueueByHash chooses, and the broker checks that.
ATTRIBUTES = "+cleanup.policy=COMPACTION,+key.queue=java,+max.compaction.lag.ms=1000"
REFUSED = "13"
END_MARK = bytes.fromhex("CBD43194")
AGE_S = 2 * 3600


class Row(NamedTuple):
    """A message as the client got it; without a body it deletes its key."""

    queue: int
    offset: int
    key: str
    body: str


class Table(NamedTuple):
    """The topic of a test, filled by Java."""

    console: Console
    key_count: int

    def write(self, peer: Peer, first: int, end: int) -> None:
        places = (str(self.key_count), str(first), str(end))
        assert not self.console.compacted("write", peer.nameserver, TOPIC, *places)

    def newest(self, end: int) -> dict[str, str]:
        """The last body of each key once the messages below ``end`` are written."""
        return {
            f"key-{number * number // 7 % self.key_count}": "" if number % 10 == 9 else str(number)
            for number in range(end)
        }

    def read(self, peer: Peer, how: str, group: str = "") -> list[Row]:
        lines = self.console.compacted("read", peer.nameserver, TOPIC, group or f"g-{how}", how)
        fields = (line.split("\t") for line in lines)
        return [Row(int(queue), int(offset), key, body) for queue, offset, key, body in fields]

    def check(self, peer: Peer, end: int, life: str) -> None:
        """The newest value of each key is read from offset 0, by seekToBegin and by a group."""
        for how in ("pull", "seek", "push"):
            rows = self.read(peer, how, f"g-{how}-{life}")
            for queue in range(QUEUES):
                offsets = [row.offset for row in rows if row.queue == queue]
                assert offsets == sorted(set(offsets)), (how, queue)
            assert {row.key: row.body for row in rows} == self.newest(end), how

    def wait_compacted(self, peer: Peer, end: int) -> None:
        """Until one message of each key is left."""
        count = len(self.newest(end))
        wait_until(lambda: len(self.read(peer, "pull")) == count, "superseded messages stay")

    def check_tools(self, peer: Peer, group: str) -> None:
        """mqadmin's tables of the topic and of a group that has read all of it."""
        rows = self.read(peer, "pull")
        status = [row.split() for row in self.console.mqadmin(peer, "topicStatus", "-t", TOPIC)]
        ranges = {int(row[1]): (int(row[2]), int(row[3])) for row in status}
        for queue, (least, end) in ranges.items():
            offsets = [row.offset for row in rows if row.queue == queue]
            assert (least, end) == (offsets[0], offsets[-1] + 1)
        progress = self.console.printed(peer, "consumerProgress", "-g", group)
        assert "Consume Diff Total: 0" in progress, progress
        reset = ("resetOffsetByTime", "-g", group, "-t", TOPIC, "-s", "1000")
        placed = [row.split() for row in self.console.mqadmin(peer, *reset)]
        assert {int(row[1]): int(row[2]) for row in placed} == {
            queue: least for queue, (least, _) in ranges.items()
        }
        assert sorted(self.read(peer, "push", group)) == sorted(rows)


def create(console: Console, peer: Peer, topic: str, *words: str) -> None:
    command = ("updateTopic", "-c", "DefaultCluster", "-t", topic, "-r", f"{QUEUES}")
    printed = console.printed(peer, *command, "-w", f"{QUEUES}", *words)
    assert "success" in printed, printed


def age(store: Path) -> None:
    """Have all records of the CommitLog stored so much earlier that its files have expired."""
    for path in (store / "commitlog").iterdir():
        data = bytearray(path.read_bytes())
        at = 0
        while at + 4 <= len(data) and (size := int.from_bytes(data[at : at + 4], "big")):
            if data[at + 4 : at + 8] != END_MARK:
                (stored_ms,) = struct.unpack_from(">q", data, at + 56)
                struct.pack_into(">q", data, at + 56, stored_ms - 1000 * AGE_S)
            at += size
        path.write_bytes(data)
        written_s = time.time() - AGE_S
        os.utime(path, (written_s, written_s))


@pytest.mark.parametrize(
    ("count", "key_count"), [(8_000, 500), pytest.param(200_000, 5000, marks=pytest.mark.long)]
)
def test_the_newest_values_are_there_for_ever(
    console: Console, tmp_path: Path, count: int, key_count: int
) -> None:
    store, table, end = tmp_path / "store", Table(console, key_count), count
    with quick_peer("headrace", store=store, settings=SETTINGS) as peer:
        create(console, peer, TOPIC, "-a", ATTRIBUTES)
        table.write(peer, 0, end)
        table.check(peer, end, "first")
        table.wait_compacted(peer, end)
        table.check_tools(peer, "g-push-first")
        peer.daemons["broker"].stop()

    with quick_peer("headrace", store=store, settings=SETTINGS) as peer:
        table.check(peer, end, "stopped")
        table.write(peer, end, end + count // 10)
        end += count // 10
        peer.daemons["broker"].kill()

    with quick_peer("headrace", store=store, settings=SETTINGS) as peer:
        table.check(peer, end, "killed")
        # The last file of the log never expires.
        create(console, peer, OTHER)
        console.compacted("write", peer.nameserver, OTHER, "100", "0", "1500")
        peer.daemons["broker"].stop()
    last = max(path.name for path in (store / "commitlog").iterdir())
    age(store)

    with quick_peer("headrace", store=store, settings=SETTINGS) as peer:
        printed = console.printed(peer, "deleteExpiredCommitLog", "-c", "DefaultCluster")
        assert "success" in printed, printed
        log = store / "commitlog"
        wait_until(lambda: [each.name for each in log.iterdir()] == [last], "the log has not gone")
        table.check(peer, end, "expired")
        table.check_tools(peer, "g-push-expired")


def test_messages_without_a_key_are_refused(console: Console, tmp_path: Path) -> None:
    with quick_peer("headrace", store=tmp_path / "store", settings=SETTINGS) as peer:
        create(console, peer, TOPIC, "-a", "+cleanup.policy=COMPACTION")
        outcomes = console.compacted("refusals", peer.nameserver, TOPIC)
        kinds = ("batch", "blank", "delayed", "half", "single")
        assert outcomes == [f"{kind} {REFUSED}" for kind in kinds]
        assert not Table(console, 1).read(peer, "pull")
