"""Collects the conformance tests where they can run, and says so where they can't."""

from __future__ import annotations

import os

import pytest

from tests.conformance.peer import missing_tools

MISSING = missing_tools()

# `make conformance` names the peer, so there a missing JDK is an error, not a reason to pass by.
if MISSING and "CONFORMANCE_PEER" in os.environ:
    raise pytest.UsageError(MISSING)

collect_ignore_glob = ["test_*.py"] if MISSING else []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if MISSING:
        terminalreporter.write_line(f"conformance tests not run: {MISSING}", yellow=True)
