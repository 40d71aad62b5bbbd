"""Collects the conformance tests where they can run, and says so where they can't."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.conformance.peer import missing_tools, running

if TYPE_CHECKING:
    from collections.abc import Iterator

MISSING = missing_tools()

# `make conformance` names the peer, so there a missing JDK is an error, not a reason to pass by.
if MISSING and "CONFORMANCE_PEER" in os.environ:
    raise pytest.UsageError(MISSING)

collect_ignore_glob = ["test_*.py"] if MISSING else []


@pytest.fixture(scope="module")
def nameserver() -> Iterator[str]:
    """Of an Apache RocketMQ of the module's own."""
    with running("apache") as peer:
        yield peer.nameserver


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if MISSING:
        terminalreporter.write_line(f"conformance tests not run: {MISSING}", yellow=True)
