"""Spreads the tests over xdist's workers by measured duration, and shows where the time goes.

A worker gets a whole file at a time, the longest first. The tests of Spark share a JVM that is slow
to start, and go to one worker. Those of the conformance folder share JVMs, too, but mostly wait: on
one worker they were the longest chain of all.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "tests" / "durations.json"
ONE_WORKER = ("tests/spark",)


class Sum(NamedTuple):
    """The number of a file's tests of one kind, and the seconds that they take with fixtures."""

    tests: int
    seconds: float


# By file, then by kind: `make test` runs the "quick" tests, `make test-long` the "long" ones.
Sums = dict[str, dict[str, Sum]]
KINDS = ("quick", "long")
# A file that nobody has measured may be the longest, so it comes first.
UNMEASURED = Sum(1, 60.0)


def file_of(node_id: str) -> str:
    return node_id.partition("::")[0]


def unit(node_id: str) -> str:
    """The folder or file whose tests stay together."""
    path = file_of(node_id)
    return next((folder for folder in ONE_WORKER if path.startswith(folder + "/")), path)


def part(file: str) -> str:
    """The folder below tests/ that a file belongs to."""
    return file.partition("/")[2].partition("/")[0]


def kind_of(keywords: Iterable[str]) -> str:
    return KINDS["long" in keywords]


def longest_first(tests: Iterable[tuple[str, str]], known: Sums) -> dict[str, float]:
    """Units with the seconds that their tests will take, longest first.

    tests: node id and kind of each.
    known: what was measured; a test counts as the mean of its file.
    """
    totals: dict[str, float] = defaultdict(float)
    for node_id, kind in tests:
        count, seconds = known.get(file_of(node_id), {}).get(kind, UNMEASURED)
        totals[unit(node_id)] += seconds / count
    return dict(sorted(totals.items(), key=lambda total: (-total[1], total[0])))


class ByDuration(LoadScopeScheduling):
    """Hands out units in the order of the tests."""

    def __init__(self, config: pytest.Config, log: Producer) -> None:
        # xdist would sort the units by their number of tests.
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)

    def remove_node(self, node: WorkerController) -> str | None:
        """Take a worker out, and return the test that ended it.

        xdist hands that test out again with the rest of its file: a test that hangs would end one
        worker after the other, and no run would ever be over.
        """
        for tests in self.assigned_work[node].values():
            for node_id, is_done in tests.items():
                if not is_done:
                    tests[node_id] = True
                    super().remove_node(node)
                    return node_id
        return super().remove_node(node)


class Durations:
    """pytest's hooks; seconds: of each test, with its fixtures, by node id and kind."""

    def __init__(self, *, is_kept: bool, is_whole: bool, is_worker: bool, shows: bool) -> None:
        self.seconds: dict[tuple[str, str], float] = defaultdict(float)
        self._is_kept = is_kept
        self._is_whole = is_whole
        self._is_worker = is_worker
        self._shows = shows

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._is_worker:
            tests = ((item.nodeid, kind_of(item.keywords)) for item in items)
            places = {name: place for place, name in enumerate(longest_first(tests, kept()))}
            items.sort(key=lambda item: places[unit(item.nodeid)])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid, kind_of(report.keywords)] += report.duration

    def pytest_sessionfinish(self) -> None:
        if self._is_kept and not self._is_worker:
            keep(updated(kept(), sums(self.seconds), is_whole=self._is_whole))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._shows or self._is_kept:
            terminalreporter.write_line("\n".join(table(sums(self.seconds))))


def sums(seconds: Mapping[tuple[str, str], float]) -> Sums:
    """Sums of tests, whose seconds are by node id and kind."""
    totals: Sums = {}
    for (node_id, kind), taken in seconds.items():
        kinds = totals.setdefault(file_of(node_id), {})
        count, so_far = kinds.get(kind, Sum(0, 0.0))
        kinds[kind] = Sum(count + 1, so_far + taken)
    return totals


def updated(known: Sums, measured: Sums, *, is_whole: bool) -> Sums:
    """The sums after a run.

    is_whole: the run had all tests of its files, so that a kind it did not meet is gone.
    """
    after = dict(known)
    for file, kinds in measured.items():
        after[file] = kinds if is_whole else {**known.get(file, {}), **kinds}
    return {file: kinds for file, kinds in after.items() if (ROOT / file).exists()}


def kept(path: Path = KEPT) -> Sums:
    files: dict[str, dict[str, tuple[int, float]]] = json.loads(path.read_text())
    return {
        file: {kind: Sum(*each) for kind, each in kinds.items()} for file, kinds in files.items()
    }


def keep(totals: Sums, path: Path = KEPT) -> None:
    """Write durations.json: a line for each file."""
    rounded = {
        file: {kind: (count, round(seconds, 1)) for kind, (count, seconds) in kinds.items()}
        for file, kinds in totals.items()
    }
    lines = (f"{json.dumps(file)}: {json.dumps(rounded[file])}" for file in sorted(rounded))
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def total(totals: Sums, kind: str) -> Sum:
    """All tests of a kind."""
    each = [kinds[kind] for kinds in totals.values() if kind in kinds]
    return Sum(sum(one.tests for one in each), sum(one.seconds for one in each))


def table(totals: Sums) -> list[str]:
    """Tests and seconds of each part, as Markdown."""
    parts: dict[str, Sums] = defaultdict(dict)
    for file, kinds in totals.items():
        parts[f"`{part(file)}`"][file] = kinds
    rows = {name: [total(files, kind) for kind in KINDS] for name, files in parts.items()}
    rows = dict(sorted(rows.items(), key=lambda row: -sum(each.seconds for each in row[1])))
    rows["all"] = [total(totals, kind) for kind in KINDS]
    return [
        "| part | tests | seconds | long tests | seconds |",
        "|---|---:|---:|---:|---:|",
        *(
            "".join([f"| {name} |", *(f" {count} | {seconds:.0f} |" for count, seconds in each)])
            for name, each in rows.items()
        ),
    ]


def durations(config: Any) -> Durations:
    """The hooks, as the command line asks for them."""
    return Durations(
        is_kept=config.getoption("--keep-durations"),
        is_whole=not (config.option.markexpr or config.option.keyword),
        is_worker=hasattr(config, "workerinput"),
        shows=bool(config.getoption("--durations")),
    )
