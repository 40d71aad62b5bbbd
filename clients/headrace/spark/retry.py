"""Retries for work that fails while a broker or a nameserver restarts."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final, NamedTuple, Self, TypeVar

from headrace.errors import HeadraceError
from headrace.outages import away
from headrace_protocol.outages import Outages

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")


class Patience(NamedTuple):
    """Seconds for which work is retried, and of the pause before each attempt."""

    retry_s: float
    pause_s: float


# Reads wait for brokers and nameservers that restart; writes do so longer.
READING: Final = Patience(30.0, 0.25)
WRITING: Final = Patience(60.0, 0.1)
AT_ONCE: Final = Patience(0.0, 0.0)

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


def is_transient(error: HeadraceError) -> bool:
    """True for an error after which the same request may succeed."""
    return error.retryable or error.refresh_route


def retry_transient(
    work: Callable[[], Result],
    patience: Patience,
    is_transient: Callable[[HeadraceError], bool] = is_transient,
) -> Result:
    """The result of ``work``, retried on transient errors; the last of them is raised."""
    until = time.monotonic() + patience.retry_s
    with Waiting() as waiting:
        while True:
            try:
                return work()
            except HeadraceError as error:
                if not is_transient(error) or time.monotonic() >= until:
                    raise
                waiting.failed(error)
            time.sleep(patience.pause_s)
