"""The benchmark of tiered storage, a little of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.bench.bars import TIER
from tests.bench.tier import CASES, COLUMNS, MESSAGES, ONE_TAG, Run, markdown, one_tag
from tests.bench.tier_beside import UPLOADING, beside_folder

if TYPE_CHECKING:
    from pathlib import Path


def test_every_bar_is_of_a_case_that_is_measured() -> None:
    assert {bar.case for bar in TIER} <= set(CASES)
    assert {bar.key for bar in TIER} <= {key for key, *_ in COLUMNS}


def test_one_tag_reads_little_more_than_its_messages(tmp_path: Path) -> None:
    assert 1 <= one_tag(tmp_path, MESSAGES // 100)["read_ratio"] < 1.5


@pytest.mark.slow
def test_sends_beside_uploads_are_paced(tmp_path: Path) -> None:
    case, report = next(beside_folder(tmp_path, 1, 0.2, 0.5))
    assert case == UPLOADING
    assert report["p99_ratio"] == report["p99_us"] / report["alone_p99_us"]


def test_a_run_is_a_table(tmp_path: Path) -> None:
    run = Run(tmp_path, is_short=True)
    run._add([(ONE_TAG, {"read_ratio": 1.0, "rate_ratio": 1.0})])
    assert f"| {ONE_TAG} |" in markdown(run.reports)
