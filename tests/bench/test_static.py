"""The benchmark of static topics, a little of it on headrace."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.bench.bars import STATIC
from tests.bench.static import CASES, COLUMNS
from tests.bench.static_cases import elsewhere_headrace

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
def test_items_on_another_broker_are_drained(tmp_path: Path) -> None:
    reports = list(elsewhere_headrace(tmp_path, 1, 1600))
    assert len(reports) == 1
    assert reports[0]["rate"] > 0


def test_every_bar_is_of_a_case_that_is_measured() -> None:
    assert {bar.case for bar in STATIC} <= set(CASES)
    assert {bar.key for bar in STATIC} <= {key for key, *_ in COLUMNS}
