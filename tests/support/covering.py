"""pytest's hooks while the tests are covered; see ``tests.covered``."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import coverage
import pytest

_IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
# Workers begin to measure as they start; the daemons that a test starts are not measured.
_CONFIG = Path(os.environ["COVERAGE_PROCESS_START"])
if _IS_WORKER:
    del os.environ["COVERAGE_PROCESS_START"]
_IS_BY_TEST = bool(os.environ.get("COVERED_BY_TEST"))
_seconds: dict[str, float] = defaultdict(float)
_failed: set[str] = set()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool, bool]:
    running = coverage.Coverage.current()
    if running is None or not _IS_BY_TEST:
        return (yield)
    running.switch_context(item.nodeid)
    try:
        return (yield)
    finally:
        running.switch_context("")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid] += report.duration
    if report.failed:
        _failed.add(report.nodeid)


def pytest_unconfigure() -> None:
    if (running := coverage.Coverage.current()) is not None:
        running.stop()
        running.save()
    if not _IS_WORKER:
        passed = {test: seconds for test, seconds in _seconds.items() if test not in _failed}
        (_CONFIG.parent / "seconds.json").write_text(json.dumps(passed))
