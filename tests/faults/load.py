"""Producers and consumers at work on a cluster, each a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import numpy as np
import trio

from headrace import PullConsumer
from headrace.blocking import Admin
from tests.faults import waiting_history
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
from tests.faults.waiting_history import WaitingTotals
from tests.simulation.history import PromiseBroken
from tests.simulation.waiting_promises import WaitingLog
from tests.support.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
QUEUES = 4
PATIENCE_S = 60
PROGRESS = 20
LOOK_S = 0.02
PRODUCERS = ("single", "bulk")
CONSUMERS = 2
SETTLE_LOOK_S = 1.0
PARTY, WAITING_PARTY = "tests.faults.party", "tests.faults.waiting_party"


class Party:
    """One of the programs of a module."""

    def __init__(self, folder: Path, module: str, kind: str, number: int, nameserver: str) -> None:
        self.name = f"{kind}-{number}"
        self.path = folder / self.name
        self._log = folder / f"{self.name}.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    module,
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
        """The number of messages of each key, after the end."""
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

    def stop_sending(self) -> None:
        """The first SIGTERM of a producer that answers checks. Raises HistoryBroken."""
        self._process.terminate()
        until = time.monotonic() + PATIENCE_S
        while not self.path.with_suffix(".sent").exists():
            self.check_alive()
            if time.monotonic() > until:
                raise HistoryBroken(f"{self.name} does not stop")
            time.sleep(LOOK_S)

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

    def __init__(self, folder: Path, cluster: Cluster, commit_log: Path) -> None:
        """commit_log: folder of the broker's log."""
        self._folder = folder
        self._nameserver = cluster.nameserver.address
        self._commit_log = commit_log
        self._stack = ExitStack()
        self._senders: list[Party] = []
        self._readers: list[Party] = []
        self._handlers: list[Party] = []

    def __enter__(self) -> Self:
        with Admin(nameserver=self._nameserver) as admin:
            for topic in (TOPIC, waiting_history.TOPIC):
                admin.create_topic(topic, queues=QUEUES)
        numbers = range(CONSUMERS)
        self._readers = [self._start(PARTY, "consumer", number) for number in numbers]
        self._handlers = [self._start(WAITING_PARTY, "handler", number) for number in numbers]
        self._senders = [self._start(PARTY, kind, n) for n, kind in enumerate(PRODUCERS)]
        # A delivery that names offset 0 names none, so nothing may wait in the first record.
        self._senders[0].wait_done(1)
        self._waiting = self._start(WAITING_PARTY, "waiting", len(PRODUCERS))
        return self

    def _start(self, module: str, kind: str, number: int) -> Party:
        party = Party(self._folder, module, kind, number, self._nameserver)
        self._stack.callback(party.kill)
        return party

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def producers(self) -> list[Party]:
        """The senders of messages at once and of messages that wait."""
        return [*self._senders, self._waiting]

    @property
    def consumers(self) -> list[Party]:
        """The readers of messages at once and of messages that wait."""
        return [*self._readers, *self._handlers]

    def wait_for_progress(self) -> None:
        """Wait until each producer has heard of some more messages."""
        for producer, done in [(each, each.done) for each in self.producers]:
            producer.wait_done(done + PROGRESS)
        for consumer in self.consumers:
            # At first it has to join the group, which a broker that is gone does not let it.
            consumer.wait_done(1)
            consumer.check_alive()

    def finish(self) -> tuple[Totals, WaitingTotals]:
        """Stop sending, let the groups read everything, compare. Raises HistoryBroken."""
        for sender in self._senders:
            sender.finish()
        self._waiting.stop_sending()
        totals = self._finish_reading()
        return totals, self._finish_waiting()

    def _finish_reading(self) -> Totals:
        stored = trio.run(self._read_all)
        self._wait_until_read(len(stored))
        for reader in self._readers:
            reader.finish()
        sent = {
            (number, lane): sender.sent[lane]
            for number, sender in enumerate(self._senders)
            for lane in range(LANES)
        }
        return check(
            rows(*(each.path for each in self._senders)),
            stored,
            rows(*(each.path for each in self._readers)),
            sent,
        )

    def _finish_waiting(self) -> WaitingTotals:
        """Wait until nothing waits any more: then all promises hold."""
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                totals = self._check_waiting()
            except (HistoryBroken, PromiseBroken):
                if time.monotonic() > until:
                    raise
                time.sleep(SETTLE_LOOK_S)
            else:
                for party in (self._waiting, *self._handlers):
                    party.finish()
                return totals

    def _check_waiting(self) -> WaitingTotals:
        path = self._waiting.path
        return waiting_history.check(
            WaitingLog(list(waiting_history.messages_of(self._commit_log))),
            rows(path),
            rows(path.with_suffix(".recalled")),
            rows(*(each.path for each in self._handlers)),
            self._waiting.sent,
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
            read = rows(*(each.path for each in self._readers if each.path.exists()))
            if len(np.unique(read[["queue", "offset"]])) >= count:
                return
            time.sleep(10 * LOOK_S)
