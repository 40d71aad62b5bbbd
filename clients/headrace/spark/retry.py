"""Retries for work that fails while a broker or a nameserver restarts."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final, Self, TypeVar

from headrace.errors import HeadraceError
from headrace.outages import away
from headrace_protocol.outages import Outages

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")

# How long reads wait for brokers and nameservers that restart.
RETRY_S = 30.0
_PAUSE_S = 0.25

_log = logging.getLogger("headrace.spark")

OUTAGES: Final = Outages(_log.warning)


class Waiting:
    """Logs what the retries of a ``with`` block wait for; see ``Outages``."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        self._end(OUTAGES.forget if error_type else OUTAGES.worked)

    def failed(self, error: HeadraceError) -> None:
        """Another attempt follows after this error."""
        name = away(error)
        self._names.add(name)
        OUTAGES.failed(name, error)

    def worked(self) -> None:
        """An attempt has succeeded."""
        self._end(OUTAGES.worked)

    def _end(self, end: Callable[[str], None]) -> None:
        while self._names:
            end(self._names.pop())


def retry_transient(work: Callable[[], Result], seconds: float) -> Result:
    """The result of ``work``, retried on transient errors for up to ``seconds``, then raised."""
    until = time.monotonic() + seconds
    with Waiting() as waiting:
        while True:
            try:
                return work()
            except HeadraceError as error:
                if not (error.retryable or error.refresh_route) or time.monotonic() >= until:
                    raise
                waiting.failed(error)
            time.sleep(_PAUSE_S)
