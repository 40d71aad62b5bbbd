"""Collects the conformance tests where they can run, and says so where they can't."""

from __future__ import annotations

import os

from tests.conformance.peer import missing_tools

# `make conformance` names the peer, so there a missing JDK is a failure, not a reason to pass by.
DEMANDED = "CONFORMANCE_PEER" in os.environ

collect_ignore_glob = [] if DEMANDED or not missing_tools() else ["test_*.py"]


def pytest_terminal_summary(terminalreporter):
    if collect_ignore_glob:
        terminalreporter.write_line(f"conformance tests not run: {missing_tools()}", yellow=True)
