"""The holdings of daemons at a moment, and their growth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

# The first part of a soak fills caches, tables and the disk.
SETTLED_PART = 0.3
# What is held for clients; the one who asks has a connection of its own.
CLIENTS = ("connectionCount", "heldPullCount", "taskCount", "heldBytes")


class Holding(NamedTuple):
    """The holdings of one process. memory_mb: its own, without what it maps of files."""

    memory_mb: float
    files: int
    maps: int
    threads: int


class Sample(NamedTuple):
    """After so many seconds: of each process, and what the broker says."""

    seconds: float
    processes: dict[str, Holding]
    broker: dict[str, int]

    def flat(self) -> dict[str, Any]:
        holdings = {
            f"{name} {key}": value
            for name, holding in self.processes.items()
            for key, value in holding._asdict().items()
        }
        return {"seconds": round(self.seconds), **holdings, **self.broker}

    def left(self, before: Sample) -> list[str]:
        """The holdings that exceed those before anybody came."""
        return [
            f"{key} {self.broker[key]}, {before.broker[key]} before"
            for key in CLIENTS
            if self.broker[key] > before.broker[key]
        ]

    def __str__(self) -> str:
        return "  ".join(f"{key} {value}" for key, value in self.flat().items())


class Trend(NamedTuple):
    """A straight line through what was seen after the first part of a soak.

    rise: by the end of that time. noise: standard deviation around the line.
    """

    first: float
    last: float
    largest: float
    per_hour: float
    rise: float
    noise: float

    def is_growth(self, limit_per_hour: float) -> bool:
        """True if it grows faster, and by more than it goes up and down by itself."""
        return self.per_hour > limit_per_hour and self.rise > 2 * self.noise


def look(seconds: float, pids: dict[str, int], admin: Any) -> Sample:
    """Ask the kernel and the only broker. admin: a blocking one."""
    (node,) = admin.cluster()
    info = admin.runtime_info(node.address)
    keys = (*CLIENTS, "queueCount", "filesRemoved", "loopStallCount")
    numbers = {key: int(info[key]) for key in keys}
    return Sample(seconds, {name: holding(pid) for name, pid in pids.items()}, numbers)


def holding(pid: int) -> Holding:
    process = Path(f"/proc/{pid}")
    lines = process.joinpath("status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    return Holding(
        memory_mb=round(int(status["RssAnon"].split()[0]) * 1024 / 1e6, 2),
        files=len(list(process.joinpath("fd").iterdir())),
        maps=len(process.joinpath("maps").read_text().splitlines()),
        threads=int(status["Threads"]),
    )


def trends(samples: Sequence[Sample]) -> dict[str, Trend]:
    """The trends of memory, files, maps and threads of each process."""
    settled = samples[int(len(samples) * SETTLED_PART) :]
    seconds = np.array([sample.seconds for sample in settled])
    return {
        f"{name} {key}": trend(seconds, np.array([_value(each, name, key) for each in settled]))
        for name in settled[0].processes
        for key in Holding._fields
    }


def _value(sample: Sample, name: str, key: str) -> float:
    value: float = getattr(sample.processes[name], key)
    return value


def trend(seconds: np.ndarray, values: np.ndarray) -> Trend:
    """seconds, values: one of each sample; two at least."""
    slope, start = np.polyfit(seconds, values, 1)
    return Trend(
        first=float(values[0]),
        last=float(values[-1]),
        largest=float(values.max()),
        per_hour=float(slope * 3600),
        rise=float(slope * (seconds[-1] - seconds[0])),
        noise=float((values - slope * seconds - start).std()),
    )
