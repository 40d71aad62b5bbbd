"""kill -9 of a broker at any moment, and at each step of its tier: its whole history is read.

As a program it takes the number of kills, a seed and a layout: ``python -m
tests.system.test_tier_kills 100 1 posix``, or ``file`` for the layout of a bucket.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest

from headrace import blocking
from headrace.errors import HeadraceError
from headrace.messages import Message
from tests.support.cluster import Cluster, Daemon
from tests.support.killed_broker import STEPS
from tests.support.processes import run

HISTORY: Final = "history"
# Keeps its newest messages only.
BRIEF: Final = "brief"
# Is deleted and made again.
RENEWED: Final = "renewed"
DELETION: Final = "topic deletion"
BODY_BYTES: Final = 900
PACE_S: Final = 0.004
# Longest wait for a step.
STEP_S: Final = 4.0
READ_S: Final = 120.0
# The tier has segments of a few messages, and all that it has is read from there.
SETTINGS: Final[dict[str, Any]] = {
    "messageStorePlugIn": "tieredstore",
    "tieredStorageLevel": "FORCE",
    "tieredStoreGroupCommitTimeout": 50,
    "tieredStoreCommitLogMaxSize": 20_000,
    "tieredStoreConsumeQueueMaxSize": 400,
    "tieredStoreDeleteFileInterval": 200,
    "tieredStoreIndexFileMaxHashSlotNum": 100,
    "tieredStoreIndexFileMaxIndexNum": 200,
    "mappedFileSizeCommitLog": 1 << 17,
    "flushDiskType": "SYNC_FLUSH",
}


class Sent:
    """Numbers of messages. unsure: those whose answer was lost; they may be stored."""

    def __init__(self) -> None:
        self.acknowledged: set[int] = set()
        self.unsure: set[int] = set()

    def check(self, topic: str, found: list[int], offset: int) -> None:
        """Compare with what was read, from a queue offset on."""
        first = min(found, default=sys.maxsize) if topic == BRIEF and offset else 0
        lost = {number for number in self.acknowledged if number >= first} - {*found}
        unknown = {*found} - self.acknowledged - self.unsure
        assert not lost, (topic, sorted(lost))
        assert not unknown, (topic, sorted(unknown))
        # In the order in which they were sent; the client may have sent one again at once.
        assert found == sorted(found), topic


class Sender:
    """Sends numbered messages to the topics in turn, and makes one of them again."""

    def __init__(self, nameserver: str) -> None:
        self._nameserver = nameserver
        self._count = 0
        self._lock = threading.Lock()
        self.sent = {HISTORY: Sent(), BRIEF: Sent(), RENEWED: Sent()}
        # Whether a topic may be the old one, the new one or neither.
        self.is_renewal_open = False

    def send_until(self, stop: threading.Event) -> None:
        with blocking.Producer(
            nameserver=self._nameserver, timeout_ms=500, delivery_timeout_ms=500
        ) as producer:
            while not stop.wait(PACE_S):
                with self._lock:
                    self._send(producer)

    def _send(self, producer: blocking.Producer) -> None:
        self._count += 1
        topic = [HISTORY, BRIEF, RENEWED][self._count % 3]
        if topic == RENEWED and self.is_renewal_open:
            return
        try:
            producer.send(Message(topic, b"%d " % self._count + bytes(BODY_BYTES)))
        except HeadraceError:
            self.sent[topic].unsure.add(self._count)
        else:
            self.sent[topic].acknowledged.add(self._count)

    def renew(self) -> None:
        """Delete a topic and make it again, unless the broker ends."""
        with self._lock, blocking.Admin(nameserver=self._nameserver) as admin:
            self.is_renewal_open = True
            with suppress(HeadraceError):
                if RENEWED in admin.topics():
                    admin.delete_topic(RENEWED)
                admin.create_topic(RENEWED, queues=1)
                self.sent[RENEWED] = Sent()
                self.is_renewal_open = False

    def check(self) -> None:
        """Read all topics."""
        for topic, sent in self.sent.items():
            if topic != RENEWED or not self.is_renewal_open:
                offset, found = read_all(self._nameserver, topic)
                assert not offset or topic == BRIEF
                sent.check(topic, found, offset)


def read_all(nameserver: str, topic: str) -> tuple[int, list[int]]:
    """The numbers of all messages in the only queue of a topic, and the first offset."""
    numbers: list[int] = []
    offsets: list[int] = []
    with (
        blocking.Admin(nameserver=nameserver) as admin,
        blocking.PullConsumer(nameserver=nameserver) as consumer,
    ):
        ((queue, at),) = admin.topic_stats(topic).items()
        consumer.assign([queue])
        until = time.monotonic() + READ_S
        while consumer.position(queue) < at.max_offset:
            assert time.monotonic() < until, (at, offsets[-1:])
            for message in consumer.receive_many(timeout_ms=1000) or ():
                assert not offsets or message.queue_offset == offsets[-1] + 1, offsets[-1:]
                offsets.append(message.queue_offset)
                numbers.append(int(message.body.split()[0]))
    assert not offsets or offsets[-1] + 1 == at.max_offset
    return (offsets[0] if offsets else at.max_offset), numbers


class Killer:
    """Kills a broker at any moment, or has it end itself at a step. kills: by what ended it."""

    def __init__(self, broker: Daemon, order: Path, layout: str, rng: Random) -> None:
        self._broker = broker
        self._order = order
        self._rng = rng
        self._steps = list(STEPS[layout])
        self.kills: Counter[str] = Counter()

    def order(self) -> str:
        """Choose how the broker ends next."""
        step = self._rng.choice(["", *self._steps])
        if step:
            moment, count = self._rng.choice(["before", "after"]), self._rng.randrange(1, 4)
            if step == DELETION:  # happens once
                count = 1
            new = self._order.with_suffix(".new")
            new.write_text(f"{step} {moment} {count}")
            new.rename(self._order)
        return step

    def wait(self, step: str, longest_s: float) -> None:
        """Have the broker end: by itself, or killed after some time."""
        until = time.monotonic() + (longest_s if step else self._rng.uniform(0, longest_s / 2))
        while time.monotonic() < until and self._broker.exit_code is None:
            time.sleep(0.01)
        self.kills[step if self._broker.exit_code is not None else "any moment"] += 1
        self._broker.kill()
        self._order.unlink(missing_ok=True)

    def start(self) -> None:
        """Start the broker, which in one of three times is killed once more before it serves."""
        if self._rng.random() < 1 / 3:
            step = self.order()
            self._broker.start()
            self.wait(step, STEP_S / 2)
        self._broker.start()
        self._broker.wait_up()


def kill_rounds(folder: Path, kill_count: int, seed: int, layout: str) -> Counter[str]:
    """Returns the number of kills by step."""
    rng, order = Random(seed), folder / "order"
    before = (sys.executable, "-m", "tests.support.killed_broker", str(order))
    place = {"tieredBackendServiceProvider": layout, "tieredStoreFilePath": folder / "tier"}
    with Cluster(folder, "a", before=before, **SETTINGS, **place) as cluster:
        broker, nameserver = cluster.brokers["a"], cluster.nameserver.address
        sender, killer = Sender(nameserver), Killer(broker, order, layout, rng)
        with blocking.Admin(nameserver=nameserver) as admin:
            admin.create_topic(HISTORY, queues=1)
            admin.create_topic(BRIEF, queues=1, attributes={"reserve.size": "60000"})
            admin.create_topic(RENEWED, queues=1)
        while killer.kills.total() < kill_count:
            stop = threading.Event()
            thread = threading.Thread(target=sender.send_until, args=(stop,))
            thread.start()
            time.sleep(rng.uniform(0, 1))
            step = killer.order()
            if step == DELETION or sender.is_renewal_open or rng.random() < 0.2:
                sender.renew()
            killer.wait(step, STEP_S)
            stop.set()
            thread.join()
            killer.start()
            cluster.wait_registered()
            sender.check()
        broker.stop()
        assert "queue is not uploaded" not in broker.said()
        assert "Traceback" not in broker.said()
    verified = run("tier", "verify", "-c", str(folder / "a.conf"), "--deep")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    return killer.kills


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["posix", "file"])
@pytest.mark.parametrize(
    "kill_count", [3, pytest.param(15, marks=pytest.mark.long)], ids=["3 kills", "15 kills"]
)
def test_a_broker_killed_at_any_moment_keeps_its_history(
    tmp_path: Path, kill_count: int, layout: str
) -> None:
    kill_rounds(tmp_path, kill_count, 1, layout)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        kills = kill_rounds(Path(folder), int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
        sys.stdout.write("".join(f"{count:4} {step}\n" for step, count in sorted(kills.items())))
