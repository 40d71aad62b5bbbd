"""Things that are taken away from a cluster, and return."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import NamedTuple

from tests.support.cluster import Daemon
from tests.support.own_disk import Filler

ACTIVE_MAX = 2


class Fault(NamedTuple):
    """thing: what is not as it should be meanwhile; it has one fault at a time."""

    name: str
    thing: str
    begin: Callable[[], object]
    end: Callable[[], object]


def of_daemon(name: str, daemon: Daemon) -> list[Fault]:
    """A nameserver or a broker."""
    return [
        Fault(f"{name} killed", name, daemon.kill, daemon.start),
        Fault(f"{name} stopped", name, daemon.stop, daemon.start),
        Fault(f"{name} paused", name, daemon.pause, daemon.resume),
    ]


def of_folder(name: str, folder: Path) -> Fault:
    """A place that is mounted no more: its folder is gone. Whatever is made there stays."""
    away = folder.with_name(f"{folder.name}-away")
    return Fault(
        f"{name} renamed away", name, lambda: folder.rename(away), lambda: away.rename(folder)
    )


def of_server(name: str, process: subprocess.Popen[bytes]) -> Fault:
    """A server that hangs."""
    return Fault(
        f"{name} paused",
        name,
        lambda: process.send_signal(signal.SIGSTOP),
        lambda: process.send_signal(signal.SIGCONT),
    )


def of_disk(name: str, folder: Path) -> Fault:
    """A disk whose last byte others take. folder: a new one there."""
    filler = Filler(folder, takes_inodes=False)
    return Fault(f"{name} filled", name, filler.fill, filler.free)


@dataclass
class Episode:
    """A fault from its begin to its end, in seconds of the run."""

    fault: Fault
    began_s: float
    ended_s: float | None = None


@dataclass
class Chaos:
    """At each tick something is taken away, or, if enough is away, comes back."""

    faults: list[Fault]
    rng: Random
    episodes: list[Episode] = field(default_factory=list)

    @property
    def active(self) -> list[Episode]:
        """The faults of this moment, the oldest first."""
        return [each for each in self.episodes if each.ended_s is None]

    def tick(self, now: Callable[[], float]) -> Episode:
        """Begin a fault, or end one. now: seconds of the run."""
        return self._begin(now) if len(self.active) < ACTIVE_MAX else self.end(self.active[0], now)

    def end(self, episode: Episode, now: Callable[[], float]) -> Episode:
        """Give back what a fault took."""
        episode.fault.end()
        episode.ended_s = now()
        return episode

    def _begin(self, now: Callable[[], float]) -> Episode:
        taken = {each.fault.thing for each in self.active}
        things = sorted({each.thing for each in self.faults} - taken)
        thing = self.rng.choice(things)
        fault = self.rng.choice([each for each in self.faults if each.thing == thing])
        episode = Episode(fault, now())
        fault.begin()
        self.episodes.append(episode)
        return episode
