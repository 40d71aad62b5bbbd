"""Faults planted in the product, and whether the tests notice: ``make mutants N=300 SEED= IN=``.

Each fault is planted alone, in a copy of the tree, and the quick tests that run its line run there:
those first that run least else, up to ``TESTS_S`` of them. A fault is killed if one of them fails
or hangs. Faults are drawn from the lines of functions that a test runs; the lines that none runs
are the subject of ``make coverage``. Asserts and log lines get no faults.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests import covered
from tests.house import PRODUCT, ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

MAP = ROOT / ".mutants"
# Seconds of the tests that one fault is shown to, as the map measured them.
TESTS_S = 60.0
# A test that takes longer hangs.
HANG_S = 60
NOT_COPIED = (".git", ".venv", ".cache", ".*_cache", "__pycache__", ".coverage", ".mutants")
HUNG = "a test hung"
DUMPED = "Timeout (0:"
# For the tests of one fault to start, and as a multiple of their measured seconds.
START_S, SLOWER = 120.0, 5.0
# A part has at least so many, however small it is.
PART_MIN = 2

SWAPPED: Mapping[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: (r"<", "<="),
    ast.LtE: (r"<=", "<"),
    ast.Gt: (r">", ">="),
    ast.GtE: (r">=", ">"),
    ast.Eq: (r"==", "!="),
    ast.NotEq: (r"!=", "=="),
    ast.Is: (r"\bis\b", "is not"),
    ast.IsNot: (r"\bis\s+not\b", "is"),
    ast.In: (r"\bin\b", "not in"),
    ast.NotIn: (r"\bnot\s+in\b", "in"),
}


class Fault(NamedTuple):
    """A change of one file: the text from ``start`` to ``end`` becomes ``new``.

    statement: first line of the statement, for which a test may be known where none is of a line.
    """

    path: str
    line: int
    statement: int
    kind: str
    start: int
    end: int
    new: str

    def planted(self, text: str) -> str:
        return text[: self.start] + self.new + text[self.end :]

    def diff(self, text: str) -> list[str]:
        """The first line that changes, before and after."""
        number = text.count("\n", 0, self.start)
        return [
            f"{sign} {each.splitlines()[number].strip()}"
            for sign, each in (("-", text), ("+", self.planted(text)))
        ]


# -- faults ----------------------------------------------------------------------------------------


class _Text:
    """A file's text, and the offsets of its nodes."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._lines = text.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def offset(self, line: int, column: int) -> int:
        """ast counts columns in bytes."""
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self.offset(node.lineno, node.col_offset),
            self.offset(node.end_lineno, node.end_col_offset),
        )

    def between(self, left: ast.expr, right: ast.expr, pattern: str) -> tuple[int, int]:
        """Offsets of an operator between two operands."""
        start, end = self.span(left)[1], self.span(right)[0]
        found = re.compile(pattern).search(self.text, start, end)
        assert found, (pattern, self.text[start:end])
        return found.span()


def in_functions(node: ast.AST, statement: int = 0) -> Iterator[tuple[ast.AST, int]]:
    """The nodes that run when functions are called, each with the first line of its statement."""
    for child in _children(node):
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        line = child.lineno if isinstance(child, ast.stmt) and (statement or is_function) else 0
        line = line or statement
        if line and not is_function:
            yield child, line
        yield from in_functions(child, line)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield from node.body
    elif isinstance(node, ast.AnnAssign):
        yield from (each for each in (node.target, node.value) if each is not None)
    # Python 3.11 does not know where the parts of an f-string are.
    elif not isinstance(node, ast.Assert | ast.JoinedStr) and not _logs(node):
        yield from ast.iter_child_nodes(node)


def faults(path: str, text: str) -> Iterator[Fault]:
    """All faults that can be planted in a file."""
    lines = _Text(text)
    for node, statement in in_functions(ast.parse(text)):
        for kind, (start, end), new in _of_node(node, lines):
            assert isinstance(node, ast.expr | ast.stmt)
            yield Fault(path, node.lineno, statement, kind, start, end, new)


def _of_node(node: ast.AST, text: _Text) -> Iterator[tuple[str, tuple[int, int], str]]:
    if isinstance(node, ast.Compare):
        operands = (node.left, *node.comparators)
        for left, right, operator in zip(operands, operands[1:], node.ops, strict=False):
            pattern, new = SWAPPED[type(operator)]
            yield "comparison", text.between(left, right, pattern), new
    elif isinstance(node, ast.BoolOp):
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        yield "branch", text.between(node.values[0], node.values[1], rf"\b{old}\b"), new
    elif isinstance(node, ast.If | ast.IfExp):
        start, end = text.span(node.test)
        yield "branch", (start, end), f"not ({text.text[start:end]})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        value = not node.value if isinstance(node.value, bool) else node.value + 1
        yield "constant", text.span(node), str(value)
    elif isinstance(node, ast.Expr) and _is_removable(node.value) and not _logs(node.value):
        yield "call", text.span(node), "pass"


def _is_removable(value: ast.expr) -> bool:
    return isinstance(value.value if isinstance(value, ast.Await) else value, ast.Call)


def _logs(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).lower().startswith("log.")


# -- tests -----------------------------------------------------------------------------------------


class LineTests:
    """The tests that run each line, and the seconds of each that passes without a fault."""

    def __init__(self, folder: Path) -> None:
        self.seconds: dict[str, float] = json.loads((folder / "seconds.json").read_text())
        self._lines = dict(covered.lines_by_test(folder))
        self._breadth = Counter(
            test for lines in self._lines.values() for tests in lines.values() for test in tests
        )

    def of(self, fault: Fault) -> list[str]:
        """The tests that run the line of a fault, or the first of its statement."""
        lines = self._lines.get(fault.path, {})
        tests = lines.get(fault.line) or lines.get(fault.statement) or []
        return [test for test in tests if test in self.seconds]

    def shown(self, fault: Fault) -> list[str]:
        """Those first that run the fewest lines, up to ``TESTS_S``; those of a file together."""
        files: dict[str, list[str]] = defaultdict(list)
        left = TESTS_S
        for test in sorted(self.of(fault), key=lambda test: (self._breadth[test], test)):
            left -= self.seconds[test]
            files[test.partition("::")[0]].append(test)
            if left < 0:
                break
        return [test for tests in files.values() for test in tests]


def is_current(folder: Path) -> bool:
    """True if the map is newer than all code and tests."""
    made = folder / "seconds.json"
    changed = (path for part in (*PRODUCT, "tests") for path in (ROOT / part).rglob("*.py"))
    return made.exists() and max(path.stat().st_mtime for path in changed) < made.stat().st_mtime


def drawn(possible: Mapping[str, Sequence[Fault]], count: int, seed: int) -> list[Fault]:
    """``count`` faults by part, in proportion to those possible, but ``PART_MIN`` at least."""
    rng, total = random.Random(seed), sum(map(len, possible.values()))
    chosen: list[Fault] = []
    for part in sorted(possible):
        share = max(PART_MIN, round(count * len(possible[part]) / total))
        chosen += rng.sample(possible[part], min(share, len(possible[part])))
    return chosen


# -- runs ------------------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """A fault after its tests.

    killer: the test that failed, "" if none did. shown_count: the tests that could kill it.
    """

    fault: Fault
    is_killed: bool
    killer: str
    shown_count: int


def copy_tree(target: Path) -> None:
    shutil.copytree(ROOT, target, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
    if (ROOT / ".cache").exists():
        (target / ".cache").symlink_to((ROOT / ".cache").resolve())


def run_tests(tree: Path, tests: Sequence[str], limit_s: float, *options: str) -> list[str]:
    """Run tests in a copy of the tree; returns those that failed, or else why pytest did."""
    listed = tree / "chosen-tests"
    listed.write_text("\n".join(tests))
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-rfE", "-p", "no:cacheprovider"]
    with subprocess.Popen(
        [*command, *options, "-o", f"faulthandler_timeout={HANG_S}", f"@{listed}"],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": covered.paths(tree), "TMPDIR": str(tree.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as running:
        try:
            out, _ = running.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            out = HUNG
        finally:
            kill_group(running.pid)
    failed = re.findall(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", out, re.MULTILINE)
    return failed if failed or not running.returncode else [HUNG if DUMPED in out else out[-99:]]


def kill_group(pid: int) -> None:
    """Kill a process, if it has not ended, and the daemons that its tests have left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def judge(fault: Fault, tests: LineTests, tree: Path) -> Verdict:
    path = tree / fault.path
    text, shown = path.read_text(), tests.shown(fault)
    limit_s = START_S + SLOWER * sum(tests.seconds[test] for test in shown)
    try:
        write(path, fault.planted(text))
        failed = run_tests(tree, shown, limit_s, "-x")
    finally:
        write(path, text)
    return Verdict(fault, bool(failed), "".join(failed[:1]), len(shown))


def write(path: Path, text: str) -> None:
    """Compiled code of the same second and size would be taken for the new one's."""
    path.write_text(text)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def judge_all(chosen: Sequence[Fault], tests: LineTests, folder: Path) -> list[Verdict]:
    trees: queue.Queue[Path] = queue.Queue()
    for number in range(covered.CORES):
        copy_tree(tree := folder / str(number) / "tree")
        trees.put(tree)

    def judge_one(fault: Fault) -> Verdict:
        tree = trees.get()
        try:
            verdict = judge(fault, tests, tree)
        finally:
            trees.put(tree)
        say(*described(verdict, (ROOT / fault.path).read_text()))
        return verdict

    with ThreadPoolExecutor(covered.CORES) as pool:
        verdicts = list(pool.map(judge_one, chosen))
    # A test that fails without a fault, too, has killed none.
    killers = sorted({each.killer for each in verdicts if each.killer.startswith("tests/")})
    unreliable = run_tests(folder / "0" / "tree", killers, 3600) if killers else []
    for test in unreliable:
        say(f"fails without a fault: {test}")
        tests.seconds.pop(test, None)
    return [judge_one(each.fault) if each.killer in unreliable else each for each in verdicts]


# -- the report ------------------------------------------------------------------------------------


def say(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def described(verdict: Verdict, text: str) -> list[str]:
    fault = verdict.fault
    place = f"{fault.path}:{fault.line} {fault.kind}"
    if verdict.is_killed:
        return [f"killed   {place}: {verdict.killer}"]
    return [f"SURVIVED {place}, {verdict.shown_count} tests", *fault.diff(text)]


def table(verdicts: Sequence[Verdict]) -> list[str]:
    """Planted, killed and survived by part, as Markdown."""
    rows: dict[str, list[bool]] = defaultdict(list)
    for verdict in verdicts:
        for name in (covered.part(verdict.fault.path), "all"):
            rows[name].append(verdict.is_killed)
    rows["all"] = rows.pop("all")
    return [
        "| part | planted | killed | survived | killed, % |",
        "|---|---:|---:|---:|---:|",
        *(
            f"| {name} | {len(each)} | {sum(each)} | {len(each) - sum(each)} "
            f"| {100 * sum(each) / len(each):.0f} |"
            for name, each in rows.items()
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--in", dest="paths", nargs="+", default=[*PRODUCT], help="begin of paths")
    options = parser.parse_args()
    if not is_current(MAP):
        covered.run(MAP, is_by_test=True)
    tests = LineTests(MAP)
    possible: dict[str, list[Fault]] = defaultdict(list)
    for part in PRODUCT:
        for path in sorted((ROOT / part).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if name.startswith(tuple(options.paths)):
                possible[covered.part(name)] += filter(tests.of, faults(name, path.read_text()))
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**32)
    say(f"seed {seed}, {sum(map(len, possible.values())):,} possible faults")
    chosen = drawn({part: each for part, each in possible.items() if each}, options.count, seed)
    random.Random(seed).shuffle(chosen)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        verdicts = judge_all(chosen, tests, Path(folder))
    survived = [each for each in verdicts if not each.is_killed]
    for verdict in sorted(survived):
        say(*described(verdict, (ROOT / verdict.fault.path).read_text()))
    say(*table(verdicts))


if __name__ == "__main__":
    main()
