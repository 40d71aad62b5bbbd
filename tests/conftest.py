"""Fixtures and hooks of all tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest
import structlog
from hypothesis import HealthCheck, settings

from tests.support import evidence
from tests.support.spread import ByDuration, durations
from tests.support.steps import Rounds

if TYPE_CHECKING:
    from xdist.remote import Producer

# Tests start hundreds of processes. Where this variable is set, as in many containers, each of them
# compiles all that it imports: `headrace dev` takes 1.5 s of CPU to start, and 0.6 s without it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Machines of CI are shared and slow at times; slow examples are no failure. A failing example is
# printed with what reproduces it.
settings.register_profile(
    "headrace", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("headrace")

# Events of daemons in the tests' own process go to logging, never to standard output. Set here and
# not where a broker is embedded, since capture_logs() leaves structlog configured.
structlog.configure(
    processors=[structlog.stdlib.filter_by_level, structlog.processors.KeyValueRenderer()],
    logger_factory=structlog.stdlib.LoggerFactory(),
    wrapper_class=structlog.stdlib.BoundLogger,
)

# A shell starts background jobs with interrupts ignored, and commands under test inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Tests write some gigabytes before they end.
USED_RATIO_MAX = 0.88


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--keep-durations", action="store_true", help="write durations.json: seconds of each file"
    )


def pytest_sessionstart() -> None:
    folder = tempfile.gettempdir()
    disk = os.statvfs(folder)
    used = disk.f_blocks - disk.f_bfree
    ratio = used / (used + disk.f_bavail)
    if ratio > USED_RATIO_MAX:
        pytest.exit(
            f"{folder} is on a disk that is {ratio:.0%} full, and brokers reject messages above "
            f"90%: free some of it, or set TMPDIR to a folder on another disk",
            returncode=pytest.ExitCode.USAGE_ERROR,
        )


CLOCKS = {"autojump_clock", "mock_clock"}


def pytest_itemcollected(item: pytest.Item) -> None:
    """Refuse a mock clock that pytest-trio does not see, so that its test runs by the real one."""
    for mark in item.iter_markers("usefixtures"):
        if CLOCKS & set(mark.args):
            raise pytest.UsageError(f"{item.nodeid}: a clock must be a parameter of the test")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        # A run that is ended from outside names the tests that have failed so far.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    config.pluginmanager.register(durations(config))
    config.pluginmanager.register(evidence)
    config.pluginmanager.register(Rounds())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect with the garbage collector off, which finds nothing and takes a third of the time.

    Later collections skip the half a million objects of the tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByDuration:
    return ByDuration(config, log)


def pytest_handlecrashitem(crashitem: str, sched: ByDuration) -> None:
    """Print at once which test ended its worker: the run may be cut off before its summary."""
    reporter = sched.config.pluginmanager.get_plugin("terminalreporter")
    assert reporter is not None
    reporter.write_line(f"\n{crashitem} ended its worker")
