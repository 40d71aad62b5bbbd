"""Collects the conformance tests where they can run, and says so where they can't."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.conformance.console import Console
from tests.conformance.console import console as console_in
from tests.conformance.go_client import missing_go
from tests.conformance.peer import missing_tools, quick_peer

MISSING = missing_tools()
MISSING_GO = missing_go()

# `make conformance` names the peer, so there a missing JDK is an error, not a reason to pass by.
if (MISSING or MISSING_GO) and "CONFORMANCE_PEER" in os.environ:
    raise pytest.UsageError(MISSING or MISSING_GO)

collect_ignore_glob = ["test_*.py"] if MISSING else []
collect_ignore = ["test_go_client.py", "test_go_secure.py"] if MISSING_GO else []


@pytest.fixture(scope="session")
def nameserver() -> Iterator[str]:
    """The Apache RocketMQ that these tests share; topics and groups keep them apart."""
    with quick_peer("apache") as peer:
        yield peer.nameserver


@pytest.fixture(scope="session")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    with console_in(tmp_path_factory.mktemp("console")) as running_console:
        yield running_console


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if MISSING:
        terminalreporter.write_line(f"conformance tests not run: {MISSING}", yellow=True)
    elif MISSING_GO:
        terminalreporter.write_line(f"tests of client-go not run: {MISSING_GO}", yellow=True)
