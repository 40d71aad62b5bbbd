"""Mixed load at half of what it reaches: ``python -m tests.soak.run --minutes 30``.

First all kinds of work go as fast as they can, which gives the peak; then each at half of its own
rate for the time that was asked for, on new daemons. What they hold is looked at every few seconds;
at the end everybody leaves, and nothing may be left of them.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.blocking import Admin
from tests.bench.results import stamp
from tests.soak.holdings import Sample, Trend, look, trends
from tests.soak.workers import BATCHES, BULK, QUIET, READERS, SINGLES, WORK
from tests.support.cluster import Cluster
from tests.support.kinds_at_work import LEAVE_S, KindsAtWork
from tests.support.own_disk import OwnDisk, may_mount

RESULT = Path(__file__).resolve().with_name("result.json")
BROKER = "broker-a"
# Full before the part that counts begins, so that the clean-up has much to do.
DISK_BYTES = 512 << 20
SETTINGS = {
    "mappedFileSizeCommitLog": 16 << 20,
    "mappedFileSizeConsumeQueue": 20 * 50_000,
    "maxHashSlotNum": 100_000,
    "maxIndexNum": 400_000,
    "cleanResourceInterval": 2000,
    "deleteFileBatchMax": 50,
}
PEAK_S = 15.0
LOOK_S = 5.0
QUEUES = 8
# What a daemon's own memory may seem to grow by in an hour, and its files and maps.
MEMORY_MB_PER_HOUR = 10.0
COUNT_PER_HOUR = 60.0


def workers(cluster: Cluster, rates: dict[str, float]) -> KindsAtWork:
    """One process for each kind of work."""
    addresses = cluster.nameserver.address, cluster.brokers[BROKER].address
    kinds = {name: (*addresses, str(rate)) for name, rate in rates.items()}
    return KindsAtWork("tests.soak.workers", kinds)


class SoakFailed(Exception):
    """Something grew, was left over or went wrong."""


@contextmanager
def cluster() -> Iterator[Cluster]:
    """Daemons on a disk of their own, which is soon as good as full."""
    with (
        tempfile.TemporaryDirectory(prefix="headrace-soak-") as folder,
        OwnDisk(Path(folder) / BROKER, DISK_BYTES) as disk,
        Cluster(Path(folder), BROKER, before=disk, **SETTINGS) as running,
    ):
        with Admin(nameserver=running.nameserver.address) as admin:
            for topic in (SINGLES, BATCHES, BULK, QUIET):
                admin.create_topic(topic, queues=QUEUES)
        yield running


def peak() -> dict[str, float]:
    """Turns a second of each kind of work when nothing holds them back."""
    with cluster() as running, workers(running, dict.fromkeys(WORK, math.inf)) as at_work:
        time.sleep(PEAK_S)
        done = at_work.finish()
    return {name: each["turns"] / each["seconds"] for name, each in done.items()}


def half(reached: dict[str, float]) -> dict[str, float]:
    """Turns a second of the long part; readers go as fast as messages come."""
    return {
        name: math.inf if name in READERS else min(rate / 2, WORK[name].rate_max)
        for name, rate in reached.items()
    }


def soak(seconds: float, rates: dict[str, float]) -> dict[str, Any]:
    """The long part; all that was seen. Raises SoakFailed."""
    with cluster() as running:
        pids = {name: each.pid for name, each in daemons(running).items()}
        with Admin(nameserver=running.nameserver.address) as admin:
            before = look(0, pids, admin)
            began, samples = time.monotonic(), []
            with workers(running, rates) as at_work:
                while (now := time.monotonic() - began) < seconds:
                    time.sleep(LOOK_S)
                    if ended := at_work.ended():
                        raise SoakFailed(f"ended with exit codes: {ended}")
                    samples.append(look(now, pids, admin))
                    say(samples[-1])
                work = at_work.finish()
            after = wait_until_left(before, pids, admin)
    return {"work": work, "before": before, "samples": samples, "after": after}


def daemons(running: Cluster) -> dict[str, Any]:
    return {"nameserver": running.nameserver, "broker": running.brokers[BROKER]}


def wait_until_left(before: Sample, pids: dict[str, int], admin: Admin) -> Sample:
    """Wait until the daemons hold as little of clients as before."""
    until = time.monotonic() + LEAVE_S
    while True:
        after = look(0, pids, admin)
        if after.left(before) == [] or time.monotonic() > until:
            return after
        time.sleep(1)


def problems(seen: dict[str, Any], grown: dict[str, Trend]) -> list[str]:
    """The problems of a run."""
    found = [f"left over at the end: {each}" for each in seen["after"].left(seen["before"])]
    for name, trend in grown.items():
        limit = MEMORY_MB_PER_HOUR if name.endswith("memory_mb") else COUNT_PER_HOUR
        if trend.is_growth(limit):
            found.append(f"{name} grows by {trend.per_hour:.1f} an hour, {limit:g} may be chance")
    errors = {name: each for name, each in seen["work"].items() if each.get("errors", 1)}
    return [*found, *(f"{name}: {each.get('said', each)}" for name, each in errors.items())]


def say(line: object) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--keep", action="store_true", help=f"write {RESULT.name}")
    chosen = parser.parse_args()
    if not may_mount():
        sys.exit("this user may not mount a tmpfs of its own (unshare --user --mount)")
    reached = peak()
    say(f"peak, turns a second: {reached}")
    seen = soak(chosen.minutes * 60, half(reached))
    grown = trends(seen["samples"])
    wrong = problems(seen, grown)
    result = {**stamp(), "minutes": chosen.minutes, "peak": reached, **as_json(seen, grown)}
    say(json.dumps(result))
    if chosen.keep:
        RESULT.write_text(json.dumps({**result, "problems": wrong}, indent=1) + "\n")
    if wrong:
        sys.exit("\n".join(wrong))


def as_json(seen: dict[str, Any], grown: dict[str, Trend]) -> dict[str, Any]:
    """The samples that are kept: one a minute."""
    step = max(1, round(60 / LOOK_S))
    return {
        "work": seen["work"],
        "trends": {name: trend._asdict() for name, trend in grown.items()},
        "before": seen["before"].flat(),
        "after": seen["after"].flat(),
        "samples": [sample.flat() for sample in seen["samples"][::step]],
    }


if __name__ == "__main__":
    main()
