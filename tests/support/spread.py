"""Spreads the tests over xdist's workers by measured duration, and shows where the time goes.

A worker gets a whole file at a time, the longest first. Folders whose tests share something that
is slow to start, such as a JVM, go to one worker.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

KEPT = Path(__file__).parents[1] / "durations.json"
ONE_WORKER = ("tests/conformance", "tests/spark")
# Most tests take less; the file lists those that take longer.
USUAL_S = 0.02
KEPT_FROM_S = 0.2


def unit(node_id: str) -> str:
    """The folder or file whose tests stay together."""
    path = node_id.partition("::")[0]
    return next((folder for folder in ONE_WORKER if path.startswith(folder + "/")), path)


def part(node_id: str) -> str:
    """The folder below tests/ that a test belongs to."""
    return node_id.partition("::")[0].partition("/")[2].partition("/")[0]


def longest_first(node_ids: Iterable[str], seconds: Mapping[str, float]) -> dict[str, float]:
    """Units with the total duration of their tests, longest first."""
    totals: dict[str, float] = defaultdict(float)
    for node_id in node_ids:
        totals[unit(node_id)] += seconds.get(node_id, USUAL_S)
    return dict(sorted(totals.items(), key=lambda total: (-total[1], total[0])))


class ByDuration(LoadScopeScheduling):
    """Hands out units in the order of the tests."""

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)


class Durations:
    """pytest's hooks; seconds: of each test, with its fixtures."""

    def __init__(self, *, is_kept: bool, is_worker: bool, shows: bool) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._is_kept = is_kept
        self._is_worker = is_worker
        self._shows = shows

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._is_worker:
            order = list(longest_first((item.nodeid for item in items), kept()))
            places = {name: place for place, name in enumerate(order)}
            items.sort(key=lambda item: places[unit(item.nodeid)])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        if self._is_kept and not self._is_worker:
            slow = {name: round(s, 1) for name, s in self.seconds.items() if s >= KEPT_FROM_S}
            KEPT.write_text(json.dumps(slow, indent=1, sort_keys=True) + "\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._shows or self._is_kept:
            terminalreporter.write_line("\n".join(table(self.seconds)))


def kept() -> dict[str, float]:
    seconds: dict[str, float] = json.loads(KEPT.read_text())
    return seconds


def table(seconds: Mapping[str, float]) -> list[str]:
    """Tests and seconds of each part, as Markdown."""
    totals: dict[str, list[float]] = defaultdict(list)
    for node_id, taken in seconds.items():
        totals[part(node_id)].append(taken)
    rows = sorted(totals.items(), key=lambda row: -sum(row[1]))
    lines = [f"| `{name}` | {len(each)} | {sum(each):.0f} |" for name, each in rows]
    count, total = len(seconds), sum(seconds.values())
    return [
        "| part | tests | seconds |",
        "|---|---:|---:|",
        *lines,
        f"| all | {count} | {total:.0f} |",
    ]


def durations(config: Any) -> Durations:
    """The hooks, as the command line asks for them."""
    return Durations(
        is_kept=config.getoption("--keep-durations"),
        is_worker=hasattr(config, "workerinput"),
        shows=bool(config.getoption("--durations")),
    )
