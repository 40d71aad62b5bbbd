"""The waits of a request: their causes and durations."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Waits:
    """The waits of one request that could not be answered at once.

    ended: called with the seconds by what was waited for, once the request is answered.
    """

    __slots__ = ("_ended", "_seconds", "_since", "_what")

    def __init__(self, what: str, ended: Callable[[Mapping[str, float]], None]) -> None:
        self._ended = ended
        self._seconds: dict[str, float] = {}
        self._what = what
        self._since = perf_counter()

    def turn_to(self, what: str) -> None:
        """Begin to wait for ``what``: a lane, a broker, a slice, the client."""
        now = perf_counter()
        self._seconds[self._what] = self._seconds.get(self._what, 0.0) + now - self._since
        self._what, self._since = what, now

    def end(self) -> None:
        """The request is answered."""
        self.turn_to("")
        self._ended(self._seconds)
