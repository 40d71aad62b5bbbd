"""Kills parts of a pipeline at every step: ``python -m tests.spark.kills --rounds 200``.

Topic, Spark, topic, with two brokers. In each round some messages come in and a Python worker, the
driver, a broker or the nameserver is killed with ``kill -9`` when a step is reached: planning,
reading, writing, committing. At the end each message that came in is there once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import cycle, islice, product
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingUnixStreamServer
from typing import NamedTuple

import trio

from headrace import PullConsumer
from headrace.blocking import Admin, Producer
from headrace.errors import HeadraceError
from tests.spark.stepped import SOCKET, STEPS
from tests.support.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
BROKERS = ("broker-a", "broker-b")
VICTIMS = ("worker", "driver", "nameserver", *BROKERS)
SOURCE, TARGET = "copy-from", "copy-to"
QUEUES = 2
ROUND_MESSAGES = 50
STEP_TIMEOUT_S = 120
AGAIN_S = 2
END_TIMEOUT_S = 180


class Kill(NamedTuple):
    """The process that is killed when a step is reached."""

    victim: str
    step: str


class Failed(Exception):
    """A step was never reached, or the topics differ."""


def plan(rounds: int, seed: int) -> list[Kill]:
    """Every victim at every step in turn, in an order of the seed's."""
    kills = [Kill(*each) for each in product(VICTIMS, STEPS)]
    random.Random(seed).shuffle(kills)
    return list(islice(cycle(kills), rounds))


class Steps:
    """Hears of every step; the one that is waited for kills somebody before it goes on."""

    def __init__(self, path: Path) -> None:
        outer = self

        class Handler(StreamRequestHandler):
            def handle(self) -> None:
                outer.note(json.loads(self.rfile.readline()))
                self.wfile.write(b"!")

        self._lock = threading.Lock()
        self._awaited = ""
        self._kill: Callable[[int], None] | None = None
        self._done = threading.Event()
        self._server = ThreadingUnixStreamServer(str(path), Handler)
        self._server.daemon_threads = True
        # The other end may be killed while it waits.
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def arm(self, step: str, kill: Callable[[int], None]) -> None:
        """Call ``kill`` with the process that reaches the step next."""
        with self._lock:
            self._done.clear()
            self._awaited, self._kill = step, kill

    def wait(self, seconds: float) -> bool:
        """True if that happens in time."""
        return self._done.wait(seconds)

    def note(self, said: dict[str, object]) -> None:
        with self._lock:
            if said["step"] != self._awaited or self._kill is None:
                return
            kill, self._kill = self._kill, None
            pid = said["pid"]
            assert isinstance(pid, int)
            kill(pid)
            self._done.set()


class Pipeline:
    """The cluster and the Spark driver, with whom to kill."""

    def __init__(self, folder: Path, cluster: Cluster, steps: Steps) -> None:
        self.nameserver = cluster.nameserver.address
        self._folder = folder
        self._cluster = cluster
        self._steps = steps
        self._driver: subprocess.Popen[bytes] | None = None
        self._sent = 0

    def start_driver(self) -> None:
        job = {
            "nameserver": self.nameserver,
            "source": SOURCE,
            "target": TARGET,
            "checkpoint": str(self._folder / "checkpoint"),
        }
        with (self._folder / "driver.log").open("ab") as log:
            self._driver = subprocess.Popen(
                [sys.executable, "-m", "tests.spark.stepped", json.dumps(job)],
                cwd=ROOT,
                env={
                    **os.environ,
                    SOCKET: str(self._folder / "steps"),
                    "PYTHONPATH": str(ROOT),  # for the workers
                },
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill_driver(self) -> None:
        """And Java with it."""
        assert self._driver
        os.killpg(self._driver.pid, signal.SIGKILL)
        self._driver.wait()

    def round(self, kill: Kill) -> None:
        """Messages come in and somebody is killed at a step, and comes back. Raises Failed."""
        self._steps.arm(kill.step, lambda pid: self._kill(kill.victim, pid))
        until = time.monotonic() + STEP_TIMEOUT_S
        self._send()
        # A source's commit, for one, comes with the next batch.
        while not self._steps.wait(AGAIN_S):
            if time.monotonic() > until:
                raise Failed(f"nobody came there within {STEP_TIMEOUT_S} s")
            self._send()
        self._revive(kill.victim)

    def _send(self) -> None:
        bodies = [b"%d" % n for n in range(self._sent, self._sent + ROUND_MESSAGES)]
        self._sent += ROUND_MESSAGES
        # What is stored counts in the end, so it does not matter who is killed meanwhile.
        with suppress(HeadraceError), Producer(nameserver=self.nameserver) as producer:
            # Keys spread them over both brokers.
            producer.send_many(bodies, topic=SOURCE, keys=[body.decode() for body in bodies])

    def _kill(self, victim: str, pid: int) -> None:
        if victim == "worker":
            os.kill(pid, signal.SIGKILL)
        elif victim == "driver":
            self.kill_driver()
        elif victim == "nameserver":
            self._cluster.nameserver.kill()
        else:
            self._cluster.brokers[victim].kill()

    def _revive(self, victim: str) -> None:
        if victim == "driver":
            self.start_driver()
        elif victim == "nameserver":
            self._cluster.nameserver.start()
            self._cluster.nameserver.wait_up()
        elif victim in self._cluster.brokers:
            self._cluster.brokers[victim].start()
            self._cluster.brokers[victim].wait_up()

    def wait_copied(self) -> None:
        """Wait until as much has come out as went in. Raises Failed."""
        self._cluster.wait_registered()
        until = time.monotonic() + END_TIMEOUT_S
        with Admin(nameserver=self.nameserver) as admin:
            while _count(admin, TARGET) < _count(admin, SOURCE):
                if time.monotonic() > until:
                    counts = _count(admin, TARGET), _count(admin, SOURCE)
                    raise Failed(f"only {counts[0]} of {counts[1]} were copied: {self.said()}")
                time.sleep(0.1)

    def said(self) -> str:
        return (self._folder / "driver.log").read_text(errors="replace")[-4000:]


def _count(admin: Admin, topic: str) -> int:
    return sum(offset.max_offset for offset in admin.topic_stats(topic).values())


@contextmanager
def pipeline(folder: Path) -> Iterator[Pipeline]:
    """A running one."""
    steps = Steps(folder / "steps")
    try:
        with Cluster(folder, *BROKERS) as cluster:
            running = Pipeline(folder, cluster, steps)
            with Admin(nameserver=running.nameserver) as admin:
                for topic in (SOURCE, TARGET):
                    admin.create_topic(topic, queues=QUEUES)
            running.start_driver()
            try:
                yield running
            finally:
                running.kill_driver()
    finally:
        steps.close()


async def _bodies(nameserver: str, topic: str, count: int) -> Counter[bytes]:
    bodies: Counter[bytes] = Counter()
    async with PullConsumer(nameserver=nameserver) as consumer:
        await consumer.assign(await consumer.queues(topic))
        while bodies.total() < count:
            batch = await consumer.receive_many(timeout_ms=1000)
            if batch is not None:
                bodies.update(batch.values())
    return bodies


def check(running: Pipeline) -> int:
    """Compare the topics; returns how many messages there are. Raises Failed."""
    with Admin(nameserver=running.nameserver) as admin:
        counts = {topic: _count(admin, topic) for topic in (SOURCE, TARGET)}
    came, went = (trio.run(_bodies, running.nameserver, *each) for each in counts.items())
    if came != went:
        raise Failed(f"lost {(came - went).total()}, repeated {(went - came).total()}")
    return came.total()


def run(kills: list[Kill], folder: Path, say: Callable[[str], object]) -> int:
    """A round for each kill; returns the messages that were copied. Raises Failed."""
    with pipeline(folder) as running:
        for number, kill in enumerate(kills):
            began = time.monotonic()
            try:
                running.round(kill)
            except Failed as failure:
                raise Failed(f"round {number + 1}, {kill}: {failure}\n{running.said()}") from None
            say(f"{number + 1:4} {kill.victim:12} {kill.step:14} {time.monotonic() - began:5.1f} s")
        running.wait_copied()
        return check(running)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headrace-kills-") as folder:
        try:
            copied = run(plan(chosen.rounds, chosen.seed), Path(folder), _say)
        except Failed as failure:
            sys.exit(f"seed {chosen.seed}: {failure}")
    _say(f"{copied} messages, each copied once, in spite of {chosen.rounds} kills")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
