"""The times of the first runs that delete markers were part of.

A run enters all messages up to some queue offset that no run has entered before, so the runs' ends
and times tell the time for each marker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from headrace_protocol.columns import Array


class MarkerTimes(NamedTuple):
    """The runs of a queue, oldest first.

    ends: the queue offset after the last message that the run entered. times_ms: when it ran.
    """

    ends: list[int]
    times_ms: list[int]

    def is_over(self, queue_offsets: Array, before_ms: int) -> Array:
        """A mask of the markers that were in a run before a time. False where no run is known."""
        times_ms = np.array([*self.times_ms, np.iinfo(np.int64).max])
        is_over: Array = times_ms[np.searchsorted(self.ends, queue_offsets, "right")] < before_ms
        return is_over

    def after_run(self, end: int, now_ms: int, before_ms: int) -> MarkerTimes:
        """With one more run, and one entry only for the runs before ``before_ms``."""
        old = int(np.searchsorted(self.times_ms, before_ms))
        first = max(old - 1, 0)
        ends, times_ms = self.ends[first:], self.times_ms[first:]
        if not ends or end > ends[-1]:
            ends, times_ms = [*ends, end], [*times_ms, max(now_ms, *times_ms, 0)]
        return MarkerTimes(ends, times_ms)
