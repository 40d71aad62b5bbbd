"""What ``/proc`` says of the processes of a peer."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.conformance.peer import Peer

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
OPEN_FILES = 1 << 18


def cpu_s(pids: Iterable[int]) -> float:
    """User and system time of processes; the kernel accounts it by nanoseconds, shows 10 ms."""
    return sum(_cpu_ticks(pid) for pid in pids) / CLOCK_TICKS


def _cpu_ticks(pid: int) -> int:
    # The name in parentheses may hold blanks, so count the fields from behind it.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


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


def status_kib(pid: int, *names: str) -> tuple[int, ...]:
    """Values of a process's status, such as VmHWM. Raises OSError, KeyError after its end."""
    values = _process_status(pid)
    return tuple(values[name] for name in names)


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
