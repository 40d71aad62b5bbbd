"""Tries again while somebody is away for a moment: a broker or a nameserver that restarts."""

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


def patiently(work: Callable[[], Result], seconds: float) -> Result:
    """What ``work`` returns; its errors that may pass are raised only after so many seconds."""
    until = time.monotonic() + seconds
    is_told = False
    while True:
        try:
            return work()
        except HeadraceError as error:
            if not (error.retryable or error.refresh_route) or time.monotonic() >= until:
                raise
            if not is_told:
                _log.warning("tried again for %g s: %s", seconds, error)
                is_told = True
        time.sleep(_PAUSE_S)
