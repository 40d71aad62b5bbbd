"""The official Java client drains a tier on a folder: headrace's, and then Apache RocketMQ's own.

Each broker has its store and its tier. New groups read all of a topic by lite pull consumers, once
its messages have left the log: each disk is too full for the log, which keeps its last file only.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.bench.load import PEERS, loaded, say

if TYPE_CHECKING:
    from tests.bench.driver import Report
    from tests.bench.load import Load

CASE: Final = "Java client, folder"
TOPIC: Final = "HISTORY"
BODY_BYTES: Final = 1024
UPLOAD_TIMEOUT_S: Final = 600
SETTLED_S: Final = 5.0
LOG_FILE_BYTES: Final = 32 << 20
# Both brokers keep what they have read for 15 s; headrace looks for what is older each 7.5 s.
FORGOTTEN_S: Final = 25.0


def drains(directory: Path, messages: int, rounds: int) -> Report:
    """How headrace's tier compares with Apache's."""
    medians = {}
    for name in PEERS:
        reports = _drains_of(name, directory / f"java-{name}", messages, rounds)
        medians[name] = {
            key: statistics.median(report[key] for report in reports)
            for key in ("rate", "broker_cpu_us")
        }
        figures = medians[name]
        say(
            f"Java client, tier of {name}: {figures['rate']:,.0f} messages/s, "
            f"{figures['broker_cpu_us']:.1f} µs of the broker's CPU for each"
        )
    ours, theirs = medians["headrace"], medians["apache"]
    return {
        "rate_ratio": ours["rate"] / theirs["rate"],
        "cpu_ratio": theirs["broker_cpu_us"] / ours["broker_cpu_us"],
    }


def _drains_of(name: str, folder: Path, messages: int, rounds: int) -> list[Report]:
    tier = folder / "tier"
    tier.mkdir(parents=True)
    settings = {
        "messageStorePlugIn": "org.apache.rocketmq.tieredstore.TieredMessageStore",
        "tieredBackendServiceProvider": "org.apache.rocketmq.tieredstore.provider.PosixFileSegment",
        "tieredStoreFilePath": str(tier),
        "tieredStoreGroupCommitTimeout": "1000",
        "mappedFileSizeCommitLog": str(LOG_FILE_BYTES),
        "diskSpaceCleanForciblyRatio": "30",
        "cleanResourceInterval": "500",
    }
    with loaded(name, folder, store=folder / "store", settings=settings) as load:
        load.job({"work": "open"})
        load.job({"work": "fill"}, TOPIC, BODY_BYTES, messages=messages)
        _wait_until_uploaded(tier, messages)
        more = 2 * LOG_FILE_BYTES // BODY_BYTES
        load.job({"work": "fill"}, "LATER", BODY_BYTES, messages=more)
        _wait_until_expired(folder / "store" / "commitlog", messages)
        reports = [_drain(load, number, messages) for number in range(rounds + 1)]
        load.job({"work": "close"})
    # The first warms up both JVMs.
    return reports[1:]


def _drain(load: Load, number: int, messages: int) -> Report:
    work = {"work": "drain_lite", "group": f"history_{number}"}
    time.sleep(FORGOTTEN_S)
    before = _read_bytes(load.peer.broker_pid)
    report = load.job(work, TOPIC, BODY_BYTES, messages=messages)
    # The log is read through its map, which this does not count.
    read = _read_bytes(load.peer.broker_pid) - before
    assert read > messages * BODY_BYTES, f"{read} bytes read: the tier was not"
    return report


def _read_bytes(pid: int) -> int:
    """By read calls of a process, from files and sockets."""
    return int(Path(f"/proc/{pid}/io").read_text().split()[1])


def _wait_until_uploaded(tier: Path, messages: int) -> None:
    """Until all bodies are in the tier, and no more is written."""
    deadline = time.monotonic() + UPLOAD_TIMEOUT_S
    size, since = -1, time.monotonic()
    while size < messages * BODY_BYTES or time.monotonic() < since + SETTLED_S:
        assert time.monotonic() < deadline, f"{size} bytes of {messages} messages are uploaded"
        found = sum(path.stat().st_size for path in tier.rglob(f"{TOPIC}/*/COMMIT_LOG/*"))
        if found != size:
            size, since = found, time.monotonic()
        time.sleep(0.2)


def _wait_until_expired(log: Path, messages: int) -> None:
    """Until no file of the log has any of them."""
    deadline = time.monotonic() + UPLOAD_TIMEOUT_S
    while True:
        first = min(int(path.name) for path in log.iterdir() if path.name.isdecimal())
        # Records take some 20 % more than their bodies.
        if first > messages * BODY_BYTES * 5 // 4:
            return
        assert time.monotonic() < deadline, f"the log begins at {first}"
        time.sleep(0.2)
