"""How long a command takes, from the start of its process: python -m tests.bench.commands."""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time

import headrace
from tests.support.processes import HEADRACE

RUNS = 20
COMMANDS = (("--version",), ("--help",), ("topic", "--help"), ("topic", "list"), ("cluster",))


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def command_s(*arguments: str) -> tuple[float, float]:
    """Medians of the time and the CPU time of a command."""
    times, cpus = [], []
    for _ in range(RUNS):
        started, cpu = time.perf_counter(), _children_cpu_s()
        subprocess.run([HEADRACE, *arguments], capture_output=True, check=True)
        times.append(time.perf_counter() - started)
        cpus.append(_children_cpu_s() - cpu)
    return statistics.median(times), statistics.median(cpus)


def main() -> None:
    """Print milliseconds; `topic list` and `cluster` ask a broker in this process."""
    with headrace.embedded() as mq:
        for arguments in COMMANDS:
            where = () if arguments[-1].startswith("-") else ("--nameserver", mq.nameserver)
            seconds, cpu = command_s(*arguments, *where)
            name = " ".join(("headrace", *arguments))
            sys.stdout.write(f"{name:24}{seconds * 1000:8.0f} ms{cpu * 1000:8.0f} ms CPU\n")


if __name__ == "__main__":
    main()
