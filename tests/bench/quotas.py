"""Whether a user at its limit slows one without a quota: latencies of sends by a schedule.

In each round a user sends alone, then beside another one that sends as fast as its quota permits,
and then beside that one without the quota. All three share the daemons of the run.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.blocking import Admin
from headrace_protocol.quotas import Quota
from tests.bench.clients.paced import Latencies, Task
from tests.bench.load import say
from tests.bench.options import option_parser
from tests.bench.results import keep, stamp
from tests.bench.secure import ROOT_USER, RULES, SIGNED
from tests.bench.table import rows_as_table, spread
from tests.conformance.peer import Peer, running
from tests.conformance.probe import create_user

BODY_BYTES: Final = 1024
RATE: Final = 500.0
JOB_TIMEOUT_S: Final = 300
MEASURED, OTHER = ("measured", "a password of one"), ("other", "a password of another")
LIMITS: Final[Mapping[str, float]] = {"requests": 200.0}
ALONE, LIMITED, UNLIMITED = "alone", "beside a user at its limit", "beside one without a quota"
P99_BAR: Final = 1.1


def environment(user: tuple[str, str]) -> dict[str, str]:
    return {**os.environ, "HEADRACE_USER": user[0], "HEADRACE_PASSWORD": user[1]}


def command(task: Task) -> list[str]:
    text = msgspec.json.encode(task).decode()
    return [sys.executable, "-m", "tests.bench.clients.paced", text]


def measured(peer: Peer, seconds: float) -> Latencies:
    """What the user without a quota gets."""
    done = subprocess.run(
        command(Task(peer.nameserver, "MEASURED", BODY_BYTES, RATE, seconds)),
        env=environment(MEASURED),
        capture_output=True,
        text=True,
        check=True,
        timeout=JOB_TIMEOUT_S,
    )
    return msgspec.json.decode(done.stdout, type=Latencies)


@contextlib.contextmanager
def other_sends(peer: Peer) -> Iterator[None]:
    process = subprocess.Popen(
        command(Task(peer.nameserver, "OTHER", BODY_BYTES)),
        env=environment(OTHER),
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        process.stdout.readline()  # once it is at its limit
        yield
        assert process.poll() is None, "it has ended"
    finally:
        process.kill()
        process.wait()


def set_limits(peer: Peer, **limits: Any) -> None:
    user, password = ROOT_USER
    with Admin(nameserver=peer.nameserver, user=user, password=password) as admin:
        admin.set_quota(Quota(of="user", name=OTHER[0], **limits))


def run(rounds: int, seconds: float, directory: Path) -> dict[str, Any]:
    """All figures: latencies by what else was going on, one for each round."""
    reports: dict[str, list[dict[str, float]]] = {}

    def add(name: str, found: Latencies) -> None:
        reports.setdefault(name, []).append(msgspec.to_builtins(found))
        say(f"{name:28} p50 {found.p50_us / 1000:7.2f} ms  p99 {found.p99_us / 1000:7.2f} ms")

    settings = {**SIGNED, "authRequiresTls": "none"}
    with running("headrace", directory, settings=settings) as peer:
        for user in (MEASURED, OTHER):
            create_user(peer.broker, user, RULES, ROOT_USER)
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}")
            add(ALONE, measured(peer, seconds))
            for name, limits in ((LIMITED, LIMITS), (UNLIMITED, {})):
                set_limits(peer, **limits)
                with other_sends(peer):
                    add(name, measured(peer, seconds))
    return {**stamp(), "rounds": rounds, "seconds": seconds, "reports": reports}


def markdown(results: dict[str, Any]) -> str:
    """The table of the document, and the bar."""
    reports = results["reports"]
    rows = []
    for name, found in reports.items():
        # Of each round, since the machine's own speed changes between them.
        pairs = zip(found, reports[ALONE], strict=True)
        ratio = statistics.median(report["p99_us"] / alone["p99_us"] for report, alone in pairs)
        bar = f"≤ {P99_BAR}: {'met' if ratio <= P99_BAR else '**missed**'}"
        rows.append(
            [
                name,
                *(spread([report[key] for report in found], 1000, 2) for key in KEYS),
                f"{ratio:.2f}",
                bar if name == LIMITED else "",
            ]
        )
    title = (
        f"{results['date']}, {results['machine']}, medians of {results['rounds']} rounds of "
        f"{results['seconds']:g} s, {RATE:g} messages/s"
    )
    columns = ["a user sends", "p50, ms", "p99, ms", "p99 ÷ alone", "bar"]
    return f"{title}\n\n{rows_as_table(columns, rows)}"


KEYS: Final = ("p50_us", "p99_us")


def main(options: list[str]) -> None:
    parser = option_parser("quotas", __doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=10, help="of each measurement")
    chosen = parser.parse_args(options)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as directory:
        results = run(chosen.rounds, chosen.seconds, Path(directory))
    table = markdown(results)
    sys.stdout.write(table)
    if chosen.keep:
        keep("quotas", results, table)
