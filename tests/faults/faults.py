"""Faults of the parties while they work; each leaves them all running."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path
from random import Random
from typing import Any

from tests.faults.history import Totals
from tests.faults.load import Load
from tests.faults.waiting_history import WaitingTotals
from tests.support.cluster import Cluster

BROKER = "broker-a"
DAEMONS = ("nameserver", "broker")
UNDER_LOAD_S = 0.5
DOWN_S = 0.2
START_S = 1.0
PAUSE_S = 4.0
# Small files, so that many are begun and ended while somebody is killed.
SETTINGS: dict[str, Any] = {
    "mappedFileSizeCommitLog": 8 * 1024 * 1024,
    "mappedFileSizeConsumeQueue": 20 * 2000,
    "maxIndexNum": 20_000,
    "flushIntervalConsumeQueue": 200,
    "messageDelayLevel": "1s 5s 1m",
    "flushDelayOffsetInterval": 500,
    "mappedFileSizeTimerLog": 100 * 1024,
    # Often enough for a broker that lives a second, and never too often for a party that is slow.
    "transactionTimeOut": 200,
    "transactionCheckInterval": 200,
    "transactionCheckMax": 100_000,
}


class Scene:
    """A nameserver, a broker, and everybody who uses them."""

    def __init__(self, cluster: Cluster, load: Load, rng: Random) -> None:
        self.cluster = cluster
        self.load = load
        self.rng = rng
        self.daemons = dict(
            zip(DAEMONS, (cluster.nameserver, cluster.brokers[BROKER]), strict=True)
        )

    def go_on(self) -> None:
        """All are at work again, and stay so for a moment."""
        self.load.wait_for_progress()
        time.sleep(self.rng.random() * UNDER_LOAD_S)


def kills(scene: Scene) -> Iterator[str]:
    """The broker by kill -9, in every fourth round while it starts, too."""
    broker, rng = scene.daemons["broker"], scene.rng
    while True:
        broker.kill()
        time.sleep(rng.random() * DOWN_S)
        broker.start()
        again = rng.random() < 0.25
        if again:
            time.sleep(rng.random() * START_S)
            broker.kill()
            broker.start()
        broker.wait_up()
        yield "killed, and again while it started" if again else "killed"


def pauses(scene: Scene) -> Iterator[str]:
    """One after the other by SIGSTOP; the longest is longer than clients wait for an answer."""
    parties: dict[str, Any] = dict(scene.daemons)
    parties |= {party.name: party for party in (*scene.load.producers, *scene.load.consumers)}
    while True:
        for name in scene.rng.sample(sorted(parties), len(parties)):
            seconds = scene.rng.random() * PAUSE_S
            parties[name].pause()
            time.sleep(seconds)
            parties[name].resume()
            yield f"{name} stood still for {seconds:.1f} s"


STEPS = ("stop broker", "stop nameserver", "start broker", "start nameserver")
ORDERS = [
    order
    for order in permutations(STEPS)
    if all(order.index(f"stop {each}") < order.index(f"start {each}") for each in DAEMONS)
]


def restarts(scene: Scene) -> Iterator[str]:
    """Both daemons in order, in every order."""
    while True:
        for order in scene.rng.sample(ORDERS, len(ORDERS)):
            for step in order:
                action, _, name = step.partition(" ")
                getattr(scene.daemons[name], action)()
            for daemon in scene.daemons.values():
                daemon.wait_up()
            scene.cluster.wait_registered()
            yield ", ".join(order)


FAULTS: dict[str, Callable[[Scene], Iterator[str]]] = {
    "kills": kills,
    "pauses": pauses,
    "restarts": restarts,
}


def run(
    kind: str, rounds: int, rng: Random, folder: Path, say: Callable[[str], object]
) -> tuple[Totals, WaitingTotals]:
    """Rounds of a kind of fault under load. Raises HistoryBroken, PromiseBroken."""
    commit_log = folder / BROKER / "commitlog"
    with Cluster(folder, BROKER, **SETTINGS) as cluster, Load(folder, cluster, commit_log) as load:
        scene = Scene(cluster, load, rng)
        faults = FAULTS[kind](scene)
        scene.go_on()
        for number in range(rounds):
            began = time.monotonic()
            did = next(faults)
            scene.go_on()
            say(f"{number + 1:4} {time.monotonic() - began:5.1f} s  {did}")
        totals = load.finish()
        for daemon in scene.daemons.values():
            assert "Traceback" not in daemon.said(), daemon.said()
        return totals
