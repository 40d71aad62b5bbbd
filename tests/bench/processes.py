"""Figures of ``/proc`` about the processes of a peer."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Iterable
from pathlib import Path

from tests.conformance.peer import Peer

OPEN_FILES = 1 << 18


def cpu_s(pids: Iterable[int]) -> float:
    """User and system time of processes, to the nanosecond."""
    return sum(time.clock_gettime(_cpu_clock(pid)) for pid in pids)


def _cpu_clock(pid: int) -> int:
    """The clock of a process's CPU time, as clock_getcpuclockid(3) makes it on Linux."""
    return (~pid << 3) | 2


def idle_cpu_percent(peer: Peer, seconds: float) -> float:
    """CPU of all daemons of a peer that nobody uses for ``seconds``, as a share of one core."""
    before = cpu_s(peer.pids)
    time.sleep(seconds)
    return (cpu_s(peer.pids) - before) / seconds * 100


def resident_mb(pids: Iterable[int], *, mapped_files: bool = True) -> float:
    """Resident memory; a store's mapped files are page cache, so may be left out."""
    kib = 0
    for pid in pids:
        values = _process_status(pid)
        kib += values["VmRSS"] if mapped_files else values["VmRSS"] - values["RssFile"]
    return kib * 1024 / 1e6


def _process_status(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    pairs = (line.split(":", 1) for line in lines if line.endswith("kB"))
    return {key: int(value.split()[0]) for key, value in pairs}


def raise_open_files_limit() -> None:
    """Let this process and its children have many sockets and files; the most that is granted."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (max(OPEN_FILES, hard), hard):
        with contextlib.suppress(ValueError, PermissionError):  # only root may go above ``hard``
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, wanted))
            return
