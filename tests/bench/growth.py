"""The cost of a message, and the broker's memory, while the number of things grows.

Each case starts a fresh peer, warms it up and then walks through its sizes: at each it makes the
things, measures the broker's CPU per message with 32 requests in flight, its memory, and its CPU
when nobody asks for anything.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.bench.charts import draw_growth
from tests.bench.growth_cases import CASES, Point, Run, warm_up
from tests.bench.load import FIRST_SEND_TIMEOUT_S, say
from tests.bench.options import option_parser, parse
from tests.bench.processes import raise_open_files_limit
from tests.bench.results import keep, stamp
from tests.bench.table import OURS, rows_as_table
from tests.bench.wire import Refused
from tests.conformance.peer import PeerError, running
from tests.conformance.probe import wait_for_send

WARM_UP_S = 5.0
DISK_RESERVE_BYTES = 10e9


def sizes_of(name: str, peer: str, chosen: argparse.Namespace, directory: Path) -> list[int]:
    """The sizes of a case that a peer is measured at."""
    case = CASES[name]
    most = min(chosen.most, case.theirs if peer != OURS else sys.maxsize)
    if name == "backlog":
        most = min(most, room_gb(directory))
    sizes = [*case.sizes, *(case.more if chosen.experiments else ())]
    return [size for size in sizes if size < most] + ([most] if most <= sizes[-1] else [])


def room_gb(directory: Path) -> int:
    """The gigabytes to which the disk allows a backlog to grow."""
    free = shutil.disk_usage(directory).free
    room = max(0, int((free - DISK_RESERVE_BYTES) / 1e9))
    say(f"{free / 1e9:.0f} GB are free: the backlog may grow to {room} GB")
    return room


def measure(chosen: argparse.Namespace, directory: Path) -> tuple[dict[str, Any], list[str]]:
    """All points by peer and case, and what went wrong; the other cases go on."""
    points: dict[str, dict[str, list[Point]]] = {name: {} for name in chosen.peers}
    failures = []
    for name in chosen.only or CASES:
        for peer_name in chosen.peers:
            sizes = sizes_of(name, peer_name, chosen, directory)
            try:
                grow(name, peer_name, sizes, chosen, directory, points[peer_name])
            except (PeerError, Refused, OSError) as problem:
                failures.append(f"{peer_name}, {name}: {problem}")
                say(failures[-1])
    return {**stamp(), "seconds": chosen.seconds, "peers": points}, failures


def grow(
    name: str,
    peer_name: str,
    sizes: list[int],
    chosen: argparse.Namespace,
    directory: Path,
    points: dict[str, list[Point]],
) -> None:
    """One case on a fresh peer; puts each point into ``points`` at once."""
    with running(peer_name, directory) as peer:
        wait_for_send(peer.broker, FIRST_SEND_TIMEOUT_S)
        warm_up(peer, chosen.warm_up)
        for point in CASES[name].run(Run(peer, sizes, chosen.seconds)):
            points.setdefault(name, []).append(point)
            say(f"{peer_name:9} {name:12} {_line(point)}")


def _line(point: Point) -> str:
    return "  ".join(f"{key} {value:,.1f}" for key, value in point.items())


# -- the document ----------------------------------------------------------------------------------

COLUMNS = (
    ("broker_cpu_us", "CPU, µs/message", 1),
    ("memory_mb", "memory, MB", 1),
    ("memory_per_item_kb", "memory each, KB", 1),
    ("idle_cpu_percent", "idle CPU, %", 1),
    ("read_cpu_us", "CPU of reading the oldest, µs/message", 1),
    ("wake_cpu_us", "CPU to answer a pull, µs", 1),
    ("wake_ms", "until all are answered, ms", 0),
)


def markdown(results: dict[str, Any]) -> str:
    """The chart, and a table for each case."""
    parts = [
        "![Cost against growth](../charts/growth.png)\n",
        f"Measured {results['date']} on {results['machine']}; {results['seconds']:g} s each.\n",
    ]
    for name, case in CASES.items():
        rows = [
            [f"{point['size']:,.0f}", peer, *_cells(point, points[name][0], peer)]
            for peer, points in sorted(results["peers"].items(), reverse=True)
            for point in points.get(name, ())
        ]
        if rows:
            titles = [case.title, "broker", *(title for _, title, _ in COLUMNS)]
            parts.append(rows_as_table(*_without_empty_columns(titles, rows)))
    return "\n".join(parts)


def _cells(point: Point, first: Point, peer: str) -> list[str]:
    more = point["size"] - first["size"]
    if more and peer == OURS:  # what a JVM has touched says nothing of what it needs
        each = (point["memory_mb"] - first["memory_mb"]) / more * 1000
        point = {**point, "memory_per_item_kb": each}
    return [f"{point[key]:,.{digits}f}" if key in point else "" for key, _, digits in COLUMNS]


def _without_empty_columns(
    titles: list[str], rows: list[list[str]]
) -> tuple[list[str], list[list[str]]]:
    kept = [index for index in range(len(titles)) if any(row[index] for row in rows)]
    return [titles[index] for index in kept], [[row[index] for index in kept] for row in rows]


def main(options: list[str]) -> None:
    parser = option_parser("growth", __doc__, CASES)
    parser.add_argument("--most", type=int, default=sys.maxsize, help="largest size of each case")
    parser.add_argument("--seconds", type=float, default=2, help="of each size")
    parser.add_argument("--warm-up", type=float, default=WARM_UP_S, help="seconds for each case")
    parser.add_argument("--experiments", action="store_true", help="100,000 queues too")
    chosen = parse(parser, options)
    raise_open_files_limit()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as directory:
        results, failures = measure(chosen, Path(directory))
    table = markdown(results)
    sys.stdout.write(table)
    if chosen.keep:
        keep("growth", results, table)
        draw_growth(results)
    if failures:
        sys.exit("\n".join(failures))
