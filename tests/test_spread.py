"""The order in which workers get the tests, and the table of where the time goes."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from xdist.remote import Producer

from tests import conftest
from tests.support.spread import (
    ROOT,
    UNMEASURED,
    ByDuration,
    Sum,
    keep,
    kept,
    longest_first,
    sums,
    table,
    unit,
    updated,
)

if TYPE_CHECKING:
    from pathlib import Path


HERE = "tests/test_spread.py"
KNOWN = {
    "tests/store/test_a.py": {"quick": Sum(10, 5.0), "long": Sum(1, 90.0)},
    "tests/spark/test_a.py": {"quick": Sum(1, 3.0)},
    "tests/spark/test_b.py": {"quick": Sum(1, 3.0)},
    HERE: {"quick": Sum(1, 0.5)},
}


def test_tests_that_share_a_jvm_stay_together() -> None:
    assert unit("tests/spark/test_a.py::test_one[x::y]") == "tests/spark"
    assert unit("tests/store/test_a.py::test_slow") == "tests/store/test_a.py"
    assert unit("tests/conformance/test_a.py::test_b") == "tests/conformance/test_a.py"


def test_the_longest_unit_comes_first() -> None:
    tests = [
        (f"{HERE}::test_names", "quick"),
        ("tests/store/test_new.py::test_new", "quick"),
        *((f"tests/store/test_a.py::test_{number}", "quick") for number in range(8)),
        ("tests/spark/test_a.py::test_one", "quick"),
        ("tests/spark/test_b.py::test_two", "quick"),
    ]
    assert list(longest_first(tests, KNOWN).items()) == [
        ("tests/store/test_new.py", UNMEASURED.seconds),
        ("tests/spark", 6.0),
        ("tests/store/test_a.py", 4.0),
        (HERE, 0.5),
    ]


def test_kinds_of_a_file_count_apart() -> None:
    assert longest_first([("tests/store/test_a.py::test_x", "long")], KNOWN) == {
        "tests/store/test_a.py": 90.0
    }


class Node:
    """A worker of xdist that notes the tests it is given."""

    shutting_down = False

    def __init__(self) -> None:
        self.given: list[int] = []

    def send_runtest_some(self, indexes: list[int]) -> None:
        self.given += indexes

    def shutdown(self) -> None: ...


def test_a_worker_gets_the_units_in_the_order_of_the_tests() -> None:
    option = SimpleNamespace(loadscopereorder=True)
    config: Any = SimpleNamespace(option=option, getvalue=lambda _: ["popen"])
    node: Any = Node()
    # xdist would hand out the second file, which has more tests, first.
    tests = ["tests/a.py::one", "tests/b.py::one", "tests/b.py::two", "tests/c.py::one"]
    scheduler = ByDuration(config, Producer("spread"))
    scheduler.add_node(node)
    scheduler.add_node_collection(node, tests)
    scheduler.schedule()
    assert node.given == [0, 1, 2]


ENDS_ITS_WORKER = """
import os
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range(6))
def test_number(number: int) -> None:
    with (Path(__file__).parent / "runs").open("a") as runs:
        runs.write(f"{number} ")
    if number == 2:
        os._exit(1)
"""


def test_a_test_that_ends_its_worker_is_named_and_the_others_run_once(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(f"from {conftest.__name__} import *\n")
    (tmp_path / "test_it.py").write_text(ENDS_ITS_WORKER)
    options = ["-c", "/dev/null", "--rootdir", str(tmp_path), "-n", "2", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert "test_it.py::test_number[2] ended its worker" in run.stdout
    assert "1 failed, 5 passed" in run.stdout
    assert sorted((tmp_path / "runs").read_text().split()) == list("012345")


MEASURED = sums({(f"{HERE}::test_x[1]", "quick"): 1.0, (f"{HERE}::test_x[2]", "quick"): 2.0})


def test_a_run_replaces_what_it_measured_and_drops_files_that_are_gone() -> None:
    known = {HERE: {"quick": Sum(9, 9.0), "long": Sum(8, 8.0)}, "tests/test_gone.py": {}}
    assert updated(known, MEASURED, is_whole=True) == {HERE: {"quick": Sum(2, 3.0)}}


def test_a_run_of_one_kind_keeps_the_other() -> None:
    known = {HERE: {"quick": Sum(9, 9.0), "long": Sum(8, 8.0)}}
    assert updated(known, MEASURED, is_whole=False) == {
        HERE: {"quick": Sum(2, 3.0), "long": Sum(8, 8.0)}
    }


def test_what_is_kept_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "durations.json"
    keep(KNOWN, path)
    assert kept(path) == KNOWN
    assert len(path.read_text().splitlines()) == len(KNOWN) + 2


def test_the_table_has_a_row_for_each_part() -> None:
    assert table(KNOWN) == [
        "| part | tests | seconds | long tests | seconds |",
        "|---|---:|---:|---:|---:|",
        "| `store` | 10 | 5 | 1 | 90 |",
        "| `spark` | 2 | 6 | 0 | 0 |",
        "| `test_spread.py` | 1 | 0 | 0 | 0 |",
        "| all | 13 | 12 | 1 | 90 |",
    ]


def test_processes_that_tests_start_keep_their_bytecode() -> None:
    command = [sys.executable, "-c", "import sys; print(sys.dont_write_bytecode)"]
    assert subprocess.check_output(command, text=True) == "False\n"
