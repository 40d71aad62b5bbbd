"""The committed figures: one small JSON file for each group of cases."""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
from pathlib import Path
from typing import Any

from tests.bench.table import replace_table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().with_name("results")
PAGES = ROOT / "docs" / "benchmarks"
CHARTS = ROOT / "docs" / "charts"
SIGNIFICANT_DIGITS = 5


def _ticks() -> tuple[int, int]:
    """The ticks of the cores since the machine's start, and those that the host took."""
    ticks = [int(text) for text in Path("/proc/stat").read_text().split()[1:9]]
    return sum(ticks), ticks[7]


_BEGAN = _ticks()


def stamp() -> dict[str, Any]:
    """The date and machine of a measurement, and the share that its host took."""
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}"
    spent, stolen = (now - before for now, before in zip(_ticks(), _BEGAN, strict=True))
    return {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "machine": f"{machine}, Python {platform.python_version()}, "
        f"{stolen / max(spent, 1):.0%} of it taken by its host",
    }


def keep(group: str, results: dict[str, Any], table: str) -> None:
    """Make these the published figures, which later runs compare with."""
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps(_rounded(results), separators=(",", ":"))
    # A line for each case, so that two runs can be compared by eye.
    (RESULTS / f"{group}.json").write_text(
        text.replace("]},", "]},\n").replace("}],", "}],\n") + "\n"
    )
    replace_table(PAGES / f"{group}.md", table, group)


def kept(group: str) -> dict[str, Any] | None:
    """The figures of the last run that was kept; None when there are none."""
    path = RESULTS / f"{group}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value
