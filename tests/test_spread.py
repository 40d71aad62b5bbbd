"""The order in which workers get the tests, and the table of where the time goes."""

from __future__ import annotations

import subprocess
import sys

from tests.support.spread import USUAL_S, longest_first, table, unit

SECONDS = {
    "tests/store/test_a.py::test_slow": 5.0,
    "tests/spark/test_a.py::test_one": 3.0,
    "tests/spark/test_b.py::test_two": 3.0,
    "tests/test_tidy.py::test_names": 0.5,
}


def test_tests_that_share_a_jvm_stay_together() -> None:
    assert unit("tests/spark/test_a.py::test_one[x::y]") == "tests/spark"
    assert unit("tests/store/test_a.py::test_slow") == "tests/store/test_a.py"


def test_the_longest_unit_comes_first_and_unmeasured_tests_count_as_short() -> None:
    order = longest_first([*SECONDS, "tests/store/test_a.py::test_new"], SECONDS)
    assert order == {
        "tests/spark": 6.0,
        "tests/store/test_a.py": 5.0 + USUAL_S,
        "tests/test_tidy.py": 0.5,
    }
    assert list(order) == ["tests/spark", "tests/store/test_a.py", "tests/test_tidy.py"]


def test_the_table_has_a_row_for_each_part() -> None:
    assert table(SECONDS) == [
        "| part | tests | seconds |",
        "|---|---:|---:|",
        "| `spark` | 2 | 6 |",
        "| `store` | 1 | 5 |",
        "| `test_tidy.py` | 1 | 0 |",
        "| all | 4 | 12 |",
    ]


def test_processes_that_tests_start_keep_their_bytecode() -> None:
    command = [sys.executable, "-c", "import sys; print(sys.dont_write_bytecode)"]
    assert subprocess.check_output(command, text=True) == "False\n"
