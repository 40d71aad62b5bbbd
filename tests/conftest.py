"""What all tests share."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import structlog
from hypothesis import HealthCheck, settings

from tests.support.spread import ByDuration, durations

if TYPE_CHECKING:
    import pytest
    from xdist.remote import Producer

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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--keep-durations", action="store_true", help="write each test's duration to durations.json"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(durations(config))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByDuration:
    return ByDuration(config, log)
