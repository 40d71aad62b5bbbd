"""Logs of a failed test's daemons, in its report: a rare failure must show its cause at once."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Generator
from typing import IO, Any, NamedTuple

import pytest

_TAIL_BYTES = 8192


class _Kept(NamedTuple):
    name: str
    process: subprocess.Popen[Any]
    log: IO[bytes]


_daemons: list[_Kept] = []


def keep(name: str, process: subprocess.Popen[Any], log: IO[bytes]) -> None:
    """Show the end of a daemon's log, a file, if the test that it runs in fails; closes it."""
    _daemons.append(_Kept(name, process, log))


def logged(log: IO[bytes], bytes_max: int | None = None) -> str:
    """The end of a file that a daemon may be writing to through the same descriptor."""
    size = os.fstat(log.fileno()).st_size
    start = max(0, size - bytes_max) if bytes_max else 0
    return os.pread(log.fileno(), size - start, start).decode(errors="replace")


@pytest.hookimpl
def pytest_runtest_setup() -> None:
    """Forget the daemons that ended with earlier tests."""
    ended = [each for each in _daemons if each.process.poll() is not None]
    for each in ended:
        _daemons.remove(each)
        each.log.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the logs to the report of a failed test."""
    report = yield
    if report.failed:
        logs = ((each.name, logged(each.log, _TAIL_BYTES)) for each in _daemons)
        report.sections += [(f"log of {name}", log) for name, log in logs if log]
    return report
