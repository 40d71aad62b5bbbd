"""What all tests share."""

from __future__ import annotations

import structlog
from hypothesis import settings

# Machines of CI are shared and slow at times; a slow example is no failure. A failing example is
# printed with what reproduces it.
settings.register_profile("headrace", deadline=None, print_blob=True)
settings.load_profile("headrace")

# Events of daemons in the tests' own process go to logging, never to standard output. Set here and
# not where a broker is embedded, since capture_logs() leaves structlog configured.
structlog.configure(
    processors=[structlog.stdlib.filter_by_level, structlog.processors.KeyValueRenderer()],
    logger_factory=structlog.stdlib.LoggerFactory(),
    wrapper_class=structlog.stdlib.BoundLogger,
)
