"""Faults are planted where they are said to be, and each is shown to the tests of its line."""

from __future__ import annotations

import ast
import json
from typing import TYPE_CHECKING

import coverage
import pytest

from tests import mutants
from tests.house import ROOT
from tests.mutants import Fault, LineTests, Verdict, drawn, faults

if TYPE_CHECKING:
    from pathlib import Path

CODE = '''
LIMIT = 5

def f(a: int = 3, b: bool = True) -> int:
    """7"""
    assert a < 9
    log.warning("a", 4)
    if a < 2 and b is not None:
        await g(
            a
        )
    é = [x for x in b if x not in (a, 1)]; a == 1
    return 8 if a else f"{a + 6}"
'''


def planted(code: str) -> list[tuple[str, str, str]]:
    found = []
    for fault in faults("some.py", code):
        ast.parse(fault.planted(code))
        assert fault.diff(code)[0][2:] == code.splitlines()[fault.line - 1].strip()
        found.append((fault.kind, code[fault.start : fault.end], fault.new))
    return found


def test_every_fault_is_planted_alone_and_in_its_place() -> None:
    assert planted(CODE) == [
        ("branch", "a < 2 and b is not None", "not (a < 2 and b is not None)"),
        ("branch", "and", "or"),
        ("comparison", "<", "<="),
        ("constant", "2", "3"),
        ("comparison", "is not", "is"),
        ("call", "await g(\n            a\n        )", "pass"),
        ("comparison", "not in", "in"),
        ("constant", "1", "2"),
        ("comparison", "==", "!="),
        ("constant", "1", "2"),
        ("branch", "a", "not (a)"),
        ("constant", "8", "9"),
    ]


PAIRS = [("<", "<="), (">", ">="), ("==", "!="), ("is", "is not"), ("in", "not in")]


@pytest.mark.parametrize(("old", "new"), [*PAIRS, *((new, old) for old, new in PAIRS)])
def test_every_comparison_has_a_fault(old: str, new: str) -> None:
    assert planted(f"def f(a, b):\n    return (a) {old} b\n") == [("comparison", old, new)]


def fault_in(path: str, line: int = 3) -> Fault:
    return Fault(path, line, 2, "constant", line, line + 1, "1")


def test_faults_are_drawn_by_part_and_the_same_for_a_seed() -> None:
    parts = {"large": [fault_in("large", n) for n in range(98)], "small": [fault_in("s", 1)] * 2}
    chosen = drawn(parts, 50, seed=1)
    assert [each.path for each in chosen].count("s") == 2
    assert len(set(chosen)) == 50
    assert chosen == drawn(parts, 50, seed=1) != drawn(parts, 50, seed=2)


def map_in(folder: Path, lines: dict[str, list[int]], path: str = "broker/some.py") -> LineTests:
    kept = coverage.CoverageData(str(folder / "data"))
    for test, numbers in lines.items():
        kept.set_context(test)
        kept.add_lines({str(ROOT / path): numbers})
    kept.write()
    (folder / "seconds.json").write_text(json.dumps(dict.fromkeys(lines, 1.0)))
    return LineTests(folder)


def test_the_tests_of_a_line_come_most_particular_first(tmp_path: Path) -> None:
    lines = {"a.py::wide": [2, 3, 4, 5], "b.py::one": [3], "a.py::two": [2, 3], "c.py::other": [4]}
    tests = map_in(tmp_path, {**lines, "": [1, 2, 3]})
    assert tests.shown(fault_in("broker/some.py")) == ["b.py::one", "a.py::two", "a.py::wide"]
    assert tests.of(fault_in("broker/other.py")) == []
    # No test is known of line 9, but of line 2, where its statement begins.
    assert tests.shown(fault_in("broker/some.py", 9)) == ["a.py::two", "a.py::wide"]


def test_a_fault_is_shown_to_a_minute_of_tests(tmp_path: Path) -> None:
    tests = map_in(tmp_path, {f"a.py::{number:03}": [3] for number in range(100)})
    assert len(tests.shown(fault_in("broker/some.py"))) == 61


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "some.py").write_text("def f(a):\n    return a < 2\n")
    (tmp_path / "tree" / "tests").mkdir()
    (tmp_path / "tree" / "tests" / "test_some.py").write_text(
        "import sys; sys.path.insert(0, '')\n"
        "from some import f\n"
        "def test_one(): assert f(1)\n"
        "def test_two(): assert not f(2)\n"
    )
    return tmp_path / "tree"


@pytest.mark.slow
@pytest.mark.parametrize(("shown", "killer"), [(["one"], ""), (["one", "two"], "two")])
def test_a_fault_is_killed_by_the_test_that_fails(
    tree: Path, tmp_path: Path, shown: list[str], killer: str
) -> None:
    fault, *_ = faults("some.py", before := (tree / "some.py").read_text())
    lines = {f"tests/test_some.py::test_{each}": [2] for each in shown}
    verdict = mutants.judge(fault, map_in(tmp_path, lines, "some.py"), tree)
    assert verdict.killer == (f"tests/test_some.py::test_{killer}" if killer else "")
    assert verdict.is_killed == bool(killer)
    assert (tree / "some.py").read_text() == before


def test_the_table_has_a_row_for_each_part() -> None:
    verdicts = [
        Verdict(fault_in("broker/headrace_broker/store/a.py"), is_killed, "", 1)
        for is_killed in (True, False, True)
    ]
    verdicts.append(Verdict(fault_in("daemon/headrace_daemon/logs.py"), True, "", 1))
    assert mutants.table(verdicts)[2:] == [
        "| broker/store | 3 | 2 | 1 | 67 |",
        "| daemon | 1 | 1 | 0 | 100 |",
        "| all | 4 | 3 | 1 | 75 |",
    ]
