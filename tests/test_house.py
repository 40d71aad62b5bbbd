"""Figures of the code are counted as their names say, and a bound that is passed is reported."""

from __future__ import annotations

import pytest

from tests import house
from tests.house import Bound, Figure, Module


def module(code: str, path: str = "broker/headrace_broker/some.py") -> Module:
    return Module(path, code)


def test_lines_are_summed_by_part() -> None:
    modules = [module("a = 1\n\nb = 2\n"), module("c = 3"), module("d = 4", "tests/test_d.py")]
    assert house.lines(modules) == {
        "lines, broker": Figure(4),
        "lines, tests": Figure(1),
    }


@pytest.mark.parametrize(("count", "over"), [(600, (0, 0)), (601, (1, 0)), (801, (1, 1))])
def test_long_files_are_counted(count: int, over: tuple[int, int]) -> None:
    figures = house.long_files([module("\n" * count)], "product")
    assert tuple(figure.value for figure in figures.values()) == over


FUNCTIONS = '''
class A:
    def f(self, a, /, b, *more, c=1, **rest):
        """Five parameters."""

    async def g(self):
        def inner(a, b): ...
        return inner
'''


def test_functions_are_measured_wherever_they_are() -> None:
    figures = house.function_sizes([module(FUNCTIONS)], "product")
    assert {name: figure.value for name, figure in figures.items()} == {
        "lines of a function, median, product": 2,
        "lines of a function, 95 % have at most, product": 3,
        "lines of a function, longest, product": 3,
        "parameters of a function, most, product": 5,
        "functions with over 6 parameters, product": 0,
    }
    assert figures["parameters of a function, most, product"].places[0].endswith(":3 f: 5")


@pytest.mark.parametrize(
    ("code", "path", "name"),
    [
        ("os.replace(a, b)", "broker/a.py", "calls that rename a file"),
        ("path.replace(target)", "clients/a.py", "calls that rename a file"),
        ("(folder / name).rename(target)", "broker/a.py", "calls that rename a file"),
        ("os.fdatasync(descriptor)", "broker/a.py", "calls that sync a file"),
        ("request.channel.charge(1)", "daemon/a.py", "calls of charge"),
        ("await open_stream(address)", "broker/a.py", "calls that connect, broker"),
        ("BlockingConnection.connect(address)", "clients/a.py", "calls that connect, clients"),
        ("monkeypatch.setattr(a, 'b', 1)", "tests/a.py", "calls of setattr, tests"),
        ("time.sleep(1)", "tests/a.py", "calls of sleep, tests"),
    ],
)
def test_a_call_counts_where_one_way_should_make_it(code: str, path: str, name: str) -> None:
    places = house.call_places([module(f"async def f():\n    {code}", path)])
    assert {name for name, figure in places.items() if figure.value} == {name}
    assert places[name] == Figure(1, (f"{path}: 1",))


@pytest.mark.parametrize(
    ("code", "path"),
    [
        ("text.replace('a', 'b')", "broker/a.py"),
        ("msgspec.structs.replace(row, name=1)", "broker/a.py"),
        ("os.replace(a, b)", "tests/a.py"),
        ("recharge(1)", "daemon/a.py"),
        ("store.connect(other)", "broker/a.py"),
        ("setattr(a, 'b', 1)", "broker/a.py"),
    ],
)
def test_other_calls_do_not_count(code: str, path: str) -> None:
    assert not any(each.value for each in house.call_places([module(code, path)]).values())


def test_a_figure_at_its_bound_passes() -> None:
    assert not house.problems({"a": Figure(3)}, {"a": Bound(3, "why")})


def test_a_bound_that_is_passed_is_reported_with_its_places() -> None:
    figures = {"a": house.counted(["x.py", "y.py", "x.py"])}
    assert house.problems(figures, {"a": Bound(2, "why")}) == [
        "a: 3 is above the bound of 2",
        "    x.py: 2",
        "    y.py: 1",
    ]


def test_each_figure_has_a_bound_and_each_bound_a_figure() -> None:
    assert house.problems({"a": Figure(1)}, {"b": Bound(1, "why")}) == [
        "house.toml has no bound for: a",
        "house.toml has a bound for no figure: b",
    ]


def test_the_table_has_figure_bound_and_why() -> None:
    assert house.table({"a": Figure(1234)}, {"a": Bound(2000, "why")}) == [
        "a   1,234 of   2,000  why"
    ]
    assert all(bound.why for bound in house.bounds().values())
