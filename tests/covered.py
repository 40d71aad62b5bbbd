"""Lines and branches that the quick in-process tests run: ``make coverage``.

Prints each part's share beside its bound in coverage.toml, and fails where a share is below it.
``tests.mutants`` asks here for the tests that run a line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import coverage
import pytest

from tests.house import PRODUCT, ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

BOUNDS = ROOT / "tests" / "coverage.toml"
KEPT = ROOT / ".coverage"
# Their tests run the product in the tests' own process; daemons that a test starts don't count.
FOLDERS = ("broker", "clients", "daemon", "nameserver", "protocol", "store", "store_tools")
# Its tests share a JVM, and most of it runs in Spark's own processes.
SPARK = "clients/headrace/spark"
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "tests.support.covering")
QUICK = "not slow and not long"
CORES = os.cpu_count() or 1


def part(path: str) -> str:
    """The part of the product that a file belongs to: broker/store, clients/headrace, daemon."""
    folder, _, rest = path.partition("/")
    inner = rest.split("/")[1:-1]
    return f"{folder}/{inner[0]}" if folder in ("broker", "clients") and inner else folder


def paths(tree: Path) -> str:
    """The search path of a Python that runs the product in ``tree``."""
    return os.pathsep.join(map(str, (tree, *(tree / each for each in PRODUCT))))


def run(folder: Path, *, is_by_test: bool) -> None:
    """Run the tests; ``folder`` gets the data of coverage, and the seconds of those that pass.

    is_by_test: note which test runs a line, and no branches, which would be many rows a test.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    config = folder / "rc"
    sources = "".join(f"\n    {ROOT / each}" for each in PRODUCT)
    config.write_text(
        f"[run]\nbranch = {not is_by_test}\nparallel = true\nrelative_files = true\n"
        f"data_file = {folder}/data\nsource ={sources}\n"
        f"omit = {ROOT / SPARK}/*\n"
    )
    done = subprocess.run(
        [*PYTEST, "-n", str(CORES), "-m", QUICK, *(f"tests/{each}" for each in FOLDERS)],
        cwd=ROOT,
        env=os.environ
        | {"COVERAGE_PROCESS_START": str(config), "COVERED_BY_TEST": "1" if is_by_test else ""}
        | {"PYTHONPATH": paths(ROOT)},
        check=False,
    )
    # A test that fails here, where all are slow, is a matter of `make test`.
    if done.returncode > pytest.ExitCode.TESTS_FAILED:
        raise SystemExit("pytest did not run to its end")
    data(folder).combine([str(folder)])


def data(folder: Path) -> coverage.Coverage:
    return coverage.Coverage(data_file=folder / "data", config_file=folder / "rc")


class Share(NamedTuple):
    """Lines and branches of a part, and those that tests run."""

    total: int
    run: int

    @property
    def percent(self) -> float:
        return 100 * self.run / self.total if self.total else 100.0


def shares(folder: Path) -> dict[str, Share]:
    """The shares of each part, and of all."""
    report = folder / "report.json"
    measured = data(folder)
    measured.load()
    measured.json_report(outfile=str(report))
    sums: dict[str, Share] = defaultdict(lambda: Share(0, 0))
    for path, file in json.loads(report.read_text())["files"].items():
        of = file["summary"]
        total = of["num_statements"] + of["num_branches"]
        hit = of["covered_lines"] + of["covered_branches"]
        for name in (part(path), "all"):
            sums[name] = Share(sums[name].total + total, sums[name].run + hit)
    return dict(sorted(sums.items()))


def lines_by_test(folder: Path) -> Iterator[tuple[str, dict[int, list[str]]]]:
    """Each file with the tests that run its lines."""
    kept = coverage.CoverageData(str(folder / "data"))
    kept.read()
    for path in sorted(kept.measured_files()):
        name = str((ROOT / path).relative_to(ROOT))
        tests = kept.contexts_by_lineno(path)
        yield name, {line: [each for each in names if each] for line, names in tests.items()}


def problems(found: Mapping[str, Share], bounds: Mapping[str, int]) -> list[str]:
    """Reasons to fail, a line each."""
    stale = sorted(bounds.keys() - found.keys())
    return [
        *(f"coverage.toml has a bound for no part: {name}" for name in stale),
        *(
            f"{name}: {share.percent:.1f} % is below the bound of {bound_of(name, bounds)} %"
            for name, share in found.items()
            if share.percent < bound_of(name, bounds)
        ),
    ]


def bound_of(part: str, bounds: Mapping[str, int]) -> int:
    """A new part has the bound of all until it gets its own."""
    return bounds.get(part, bounds["all"])


def table(found: Mapping[str, Share], bounds: Mapping[str, int]) -> list[str]:
    return [
        f"{name:24} {share.percent:5.1f} % of {share.total:>6,} lines and branches, "
        f"at least {bound_of(name, bounds)} %"
        for name, share in found.items()
    ]


def main() -> int:
    run(KEPT, is_by_test=False)
    found, bounds = shares(KEPT), tomllib.loads(BOUNDS.read_text())
    wrong = problems(found, bounds)
    sys.stdout.write("".join(f"{line}\n" for line in [*table(found, bounds), *wrong]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
