"""Shares of lines and branches that tests run are summed by part and may not fall."""

from __future__ import annotations

import pytest

from tests import covered
from tests.covered import Share


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("broker/headrace_broker/store/write/write_path.py", "broker/store"),
        ("broker/headrace_broker/core.py", "broker"),
        ("clients/headrace/table/table.py", "clients/table"),
        ("clients/pyspark_headrace.py", "clients"),
        ("protocol/headrace_protocol/drivers/aio.py", "protocol"),
        ("daemon/headrace_daemon/logs.py", "daemon"),
    ],
)
def test_files_belong_to_parts(path: str, part: str) -> None:
    assert covered.part(path) == part


def test_a_share_below_its_bound_is_reported() -> None:
    found = {
        "daemon": Share(1000, 915),
        "protocol": Share(10, 10),
        "new": Share(100, 79),
        "all": Share(9, 8),
    }
    assert covered.problems(found, {"daemon": 92, "protocol": 100, "gone": 1, "all": 80}) == [
        "coverage.toml has a bound for no part: gone",
        "daemon: 91.5 % is below the bound of 92 %",
        "new: 79.0 % is below the bound of 80 %",
    ]
