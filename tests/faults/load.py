"""Two producers and two consumers at work on a cluster, each a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import trio

from headrace import PullConsumer
from headrace.blocking import Admin
from tests.faults.history import (
    LANES,
    HistoryBroken,
    Recorder,
    Totals,
    check,
    identify,
    row_count,
    rows,
)
from tests.faults.party import TOPIC

if TYPE_CHECKING:
    from tests.support.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
QUEUES = 4
PATIENCE_S = 60
LOOK_S = 0.02
PRODUCERS = ("single", "bulk")
CONSUMERS = 2


class Party:
    """One of the programs of ``tests.faults.party``."""

    def __init__(self, folder: Path, kind: str, number: int, nameserver: str) -> None:
        self.name = f"{kind}-{number}"
        self.path = folder / self.name
        self._log = folder / f"{self.name}.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.faults.party",
                    kind,
                    str(number),
                    nameserver,
                    self.path,
                ],
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def done(self) -> int:
        """Messages that it was told of, or has read, again ones too."""
        return row_count(self.path)

    @property
    def sent(self) -> list[int]:
        """Of each key, after the end."""
        sent: list[int] = json.loads(self.path.with_suffix(".sent").read_text())
        return sent

    def wait_done(self, count: int) -> None:
        """Wait until it has done so much. Raises HistoryBroken."""
        until = time.monotonic() + PATIENCE_S
        while self.done < count:
            self.check_alive()
            if time.monotonic() > until:
                raise HistoryBroken(f"{self.name} stands still at {self.done} messages")
            time.sleep(LOOK_S)

    def check_alive(self) -> None:
        if self._process.poll() is not None:
            raise HistoryBroken(f"{self.name} ended: {self._log.read_text()[-3000:]}")

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def finish(self) -> None:
        """Let it end by itself. Raises HistoryBroken if it can't."""
        self.check_alive()
        self._process.terminate()
        if self._process.wait(PATIENCE_S):
            raise HistoryBroken(f"{self.name} failed: {self._log.read_text()[-3000:]}")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class Load:
    """Everybody at work from the beginning of a ``with`` block on."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self._folder = folder
        self._nameserver = cluster.nameserver.address
        self._stack = ExitStack()
        self.producers: list[Party] = []
        self.consumers: list[Party] = []

    def __enter__(self) -> Self:
        with Admin(nameserver=self._nameserver) as admin:
            admin.create_topic(TOPIC, queues=QUEUES)
        self.consumers = [self._start("consumer", number) for number in range(CONSUMERS)]
        self.producers = [self._start(kind, number) for number, kind in enumerate(PRODUCERS)]
        return self

    def _start(self, kind: str, number: int) -> Party:
        party = Party(self._folder, kind, number, self._nameserver)
        self._stack.callback(party.kill)
        return party

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def wait_for_progress(self, messages: int = 20) -> None:
        """Wait until each producer has heard of some more messages."""
        for producer, done in [(each, each.done) for each in self.producers]:
            producer.wait_done(done + messages)
        for consumer in self.consumers:
            # At first it has to join the group, which a broker that is gone does not let it.
            consumer.wait_done(1)
            consumer.check_alive()

    def finish(self) -> Totals:
        """Stop sending, let the group read everything, compare. Raises HistoryBroken."""
        for producer in self.producers:
            producer.finish()
        stored = trio.run(self._read_all)
        self._wait_until_read(len(stored))
        for consumer in self.consumers:
            consumer.finish()
        sent = {
            (number, lane): producer.sent[lane]
            for number, producer in enumerate(self.producers)
            for lane in range(LANES)
        }
        return check(
            rows(*(each.path for each in self.producers)),
            stored,
            rows(*(each.path for each in self.consumers)),
            sent,
        )

    async def _read_all(self) -> np.ndarray:
        """All that is stored, by somebody who belongs to no group."""
        path = self._folder / "stored"
        recorder = Recorder(path)
        async with PullConsumer(nameserver=self._nameserver) as consumer:
            queues = await consumer.queues(TOPIC)
            ends = {queue: await consumer.max_offset(queue) for queue in queues}
            await consumer.assign(queues)
            with trio.fail_after(PATIENCE_S):
                while any(consumer.position(queue) < end for queue, end in ends.items()):
                    batch = await consumer.receive_many(timeout_ms=1000)
                    if batch is not None:
                        queue_id = batch.queue.queue_id
                        recorder.add(
                            (queue_id, message.queue_offset, identify(message.body))
                            for message in batch
                        )
        return rows(path)

    def _wait_until_read(self, count: int) -> None:
        """Wait until the group has read as much, or no more comes."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            read = rows(*(each.path for each in self.consumers if each.path.exists()))
            if len(np.unique(read[["queue", "offset"]])) >= count:
                return
            time.sleep(10 * LOOK_S)
