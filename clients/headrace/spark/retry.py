"""Retries for work that fails while a broker or a nameserver restarts."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, TypeVar

from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")

_PAUSE_S = 0.25

_log = logging.getLogger("headrace.spark")


def retry_transient(work: Callable[[], Result], seconds: float) -> Result:
    """The result of ``work``, retried on transient errors for up to ``seconds``, then raised."""
    until = time.monotonic() + seconds
    is_logged = False
    while True:
        try:
            return work()
        except HeadraceError as error:
            if not (error.retryable or error.refresh_route) or time.monotonic() >= until:
                raise
            if not is_logged:
                _log.warning("retrying for up to %g s: %s", seconds, error)
                is_logged = True
        time.sleep(_PAUSE_S)
