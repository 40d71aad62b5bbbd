"""Figures of the code and the tests beside their bounds in house.toml: ``make house``.

Prints the table, and fails where a figure is above its bound. All figures are counts or sums of
what is in the files; none is timed here, so a busy machine changes nothing.
"""

from __future__ import annotations

import ast
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.support import spread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

ROOT = Path(__file__).parents[1]
BOUNDS = ROOT / "tests" / "house.toml"
PRODUCT = ("protocol", "daemon", "broker", "nameserver", "clients")
TESTS = ("tests",)
COMPLEXITY_MAX = 10
PARAMETERS_MAX = 6
PLACES_SHOWN = 20


Function = ast.FunctionDef | ast.AsyncFunctionDef


class Module:
    """A file, with its functions and calls."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.part = path.partition("/")[0]
        self.line_count = len(text.splitlines())
        self.functions: list[Function] = []
        self.calls: list[ast.Call] = []
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, Function):
                self.functions.append(node)
            elif isinstance(node, ast.Call):
                self.calls.append(node)


class Figure(NamedTuple):
    """A figure, and where most of it is: shown if it is above its bound."""

    value: int
    places: tuple[str, ...] = ()


class Bound(NamedTuple):
    bound: int
    why: str


Figures = dict[str, Figure]


def read(parts: Iterable[str]) -> Iterator[Module]:
    for part in parts:
        for path in sorted((ROOT / part).rglob("*.py")):
            yield Module(str(path.relative_to(ROOT)), path.read_text())


def counted(places: Iterable[str]) -> Figure:
    """The number of places, and those with most of them."""
    by_place = Counter(places)
    return Figure(
        by_place.total(), tuple(f"{place}: {n}" for place, n in by_place.most_common(PLACES_SHOWN))
    )


def longest(sizes: Mapping[str, int]) -> Figure:
    """The largest of the sizes, and whose they are."""
    places = sorted(sizes, key=lambda place: -sizes[place])[:PLACES_SHOWN]
    return Figure(sizes[places[0]], tuple(f"{place}: {sizes[place]}" for place in places))


# -- sizes -----------------------------------------------------------------------------------------


def lines(modules: Iterable[Module]) -> Figures:
    totals: Counter[str] = Counter()
    for module in modules:
        totals[module.part] += module.line_count
    return {f"lines, {part}": Figure(count) for part, count in totals.items()}


def long_files(modules: Iterable[Module], name: str) -> Figures:
    sizes = {module.path: module.line_count for module in modules}
    return {
        f"files over {bound} lines, {name}": counted(
            path for path, count in sizes.items() if count > bound
        )
        for bound in (600, 800)
    }


def line_count(function: Function) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def parameter_count(function: Function) -> int:
    """Its parameters but for self."""
    each = function.args
    every = [*each.posonlyargs, *each.args, *each.kwonlyargs, each.vararg, each.kwarg]
    return sum(one is not None and one.arg not in ("self", "cls") for one in every)


def function_sizes(modules: Iterable[Module], name: str) -> Figures:
    every = {
        f"{module.path}:{function.lineno} {function.name}": function
        for module in modules
        for function in module.functions
    }
    sizes = {place: line_count(function) for place, function in every.items()}
    parameters = {place: parameter_count(function) for place, function in every.items()}
    p95 = statistics.quantiles(sizes.values(), n=20, method="inclusive")[-1]
    return {
        f"lines of a function, median, {name}": Figure(round(statistics.median(sizes.values()))),
        f"lines of a function, 95 % have at most, {name}": Figure(round(p95)),
        f"lines of a function, longest, {name}": longest(sizes),
        f"parameters of a function, most, {name}": longest(parameters),
        f"functions with over {PARAMETERS_MAX} parameters, {name}": counted(
            place for place, count in parameters.items() if count > PARAMETERS_MAX
        ),
    }


def found_by_ruff(parts: Iterable[str], rule: str, *options: str) -> Figure:
    """Places that break a rule of ruff, also those that a comment excuses."""
    command = ["ruff", "check", "--isolated", "--ignore-noqa", "--exit-zero", "--no-cache"]
    done = subprocess.run(
        [sys.executable, "-m", *command, "--output-format=json", f"--select={rule}"]
        + [f"--config={option}" for option in options]
        + [str(ROOT / part) for part in parts],
        check=True,
        capture_output=True,
        text=True,
    )
    return counted(str(Path(row["filename"]).relative_to(ROOT)) for row in json.loads(done.stdout))


def loose_modules() -> Figure:
    root = ROOT / "broker" / "headrace_broker"
    return Figure(sum(path.name != "__init__.py" for path in root.glob("*.py")))


# -- calls that only the one way may make ----------------------------------------------------------


class Calls(NamedTuple):
    """Calls of any of these names in some parts: ``f``, ``any.f``."""

    parts: tuple[str, ...]
    names: tuple[str, ...]
    is_meant: Callable[[ast.Call], bool] = lambda _: True


def has_one_argument(call: ast.Call) -> bool:
    """As ``path.replace(target)`` and ``path.rename(target)`` have; a text's method has two."""
    return called(call).startswith("os.") or (len(call.args) == 1 and not call.keywords)


CONNECTS = ("open_stream", "connect_tcp", "create_connection", "BlockingConnection.connect")
CALLS = {
    "calls that rename a file": Calls(PRODUCT, ("replace", "rename"), has_one_argument),
    "calls that sync a file": Calls(PRODUCT, ("fsync", "fdatasync")),
    "calls of charge": Calls(PRODUCT, ("charge",)),
    "calls that connect, broker": Calls(("broker",), CONNECTS),
    "calls that connect, clients": Calls(("clients",), CONNECTS),
    "calls of setattr, tests": Calls(TESTS, ("setattr",)),
    "calls of sleep, tests": Calls(TESTS, ("sleep",)),
}


def call_places(modules: Iterable[Module]) -> Figures:
    wanted = [(f".{each}", name) for name, calls in CALLS.items() for each in calls.names]
    places: dict[str, list[str]] = {name: [] for name in CALLS}
    for module in modules:
        for call in module.calls:
            text = f".{called(call)}"
            for end, name in wanted:
                if text.endswith(end) and module.part in CALLS[name].parts:
                    places[name] += [module.path] * CALLS[name].is_meant(call)
    return {name: counted(each) for name, each in places.items()}


def called(call: ast.Call) -> str:
    """The last two names of what is called: ``os.replace``, ``.replace``, ``setattr``."""
    function = call.func
    if isinstance(function, ast.Attribute):
        owner = function.value
        return f"{getattr(owner, 'attr', getattr(owner, 'id', ''))}.{function.attr}"
    return getattr(function, "id", "")


# -- what runs -------------------------------------------------------------------------------------


def imported_modules() -> Figure:
    """Modules that ``headrace dev`` has imported when it is ready."""
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w+") as log:
        ports = ("--nameserver-port=0", "--broker-port=0")
        with subprocess.Popen(
            [sys.executable, "-X", "importtime", "-m", "headrace", "dev", *ports],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as dev:
            assert dev.stdout is not None
            is_ready = dev.stdout.readline().startswith("ready ")
            dev.send_signal(signal.SIGTERM)
        log.seek(0)
        logged = log.readlines()
    if not is_ready:
        raise SystemExit(f"headrace dev does not start: {''.join(logged[-3:])}")
    return Figure(sum(line.startswith("import time:") for line in logged) - 1)


def durations() -> Figures:
    """Counts and sums of durations.json, which ``make durations`` measures."""
    known = spread.kept()
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    figures = {"files of tests that durations.json does not have": counted(files - known.keys())}
    for kind in spread.KINDS:
        count, seconds = spread.total(known, kind)
        figures[f"tests, {kind}"] = Figure(count)
        figures[f"seconds of tests, {kind}"] = Figure(round(seconds))
    return figures


# -- the table -------------------------------------------------------------------------------------


def measure() -> Figures:
    modules = [*read(PRODUCT), *read(TESTS)]
    product = [module for module in modules if module.part in PRODUCT]
    tests = [module for module in modules if module.part in TESTS]
    complexity = f"lint.mccabe.max-complexity={COMPLEXITY_MAX}"
    return {
        **lines(modules),
        **long_files(product, "product"),
        **long_files(tests, "tests"),
        **function_sizes(product, "product"),
        **function_sizes(tests, "tests"),
        f"functions with complexity over {COMPLEXITY_MAX}, product": found_by_ruff(
            PRODUCT, "C901", complexity
        ),
        f"functions with complexity over {COMPLEXITY_MAX}, tests": found_by_ruff(
            TESTS, "C901", complexity
        ),
        "loose modules in the broker's root": loose_modules(),
        "modules that headrace dev imports": imported_modules(),
        **call_places(modules),
        "private attributes of others, tests": found_by_ruff(TESTS, "SLF001"),
        **durations(),
    }


def bounds() -> dict[str, Bound]:
    rows: dict[str, dict[str, Any]] = tomllib.loads(BOUNDS.read_text())
    return {name: Bound(**row) for name, row in rows.items()}


def table(figures: Figures, known: Mapping[str, Bound]) -> list[str]:
    width = max(map(len, figures))
    return [
        f"{name:{width}} {figure.value:>7,} of {known[name].bound:>7,}  {known[name].why}"
        for name, figure in figures.items()
        if name in known
    ]


def problems(figures: Figures, known: Mapping[str, Bound]) -> list[str]:
    """Reasons to fail, a line each."""
    found = [f"house.toml has no bound for: {name}" for name in figures.keys() - known.keys()]
    found += [f"house.toml has a bound for no figure: {name}" for name in known.keys() - figures]
    for name, figure in figures.items():
        if name in known and figure.value > known[name].bound:
            found += [
                f"{name}: {figure.value:,} is above the bound of {known[name].bound:,}",
                *(f"    {place}" for place in figure.places),
            ]
    return found


def main() -> int:
    figures, known = measure(), bounds()
    found = problems(figures, known)
    out = [*table(figures, known), *found]
    if found:
        out.append("Bring the figure down. CONTRIBUTING.md says when a bound may be raised.")
    sys.stdout.write("".join(f"{line}\n" for line in out))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
