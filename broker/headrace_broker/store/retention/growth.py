"""Estimates when the disk will be full, from the growth of what can't be removed."""

from __future__ import annotations

from collections import deque

WINDOW_S = 3600.0
# A shorter span proves nothing: an initial load does not continue for hours.
SPAN_MIN_S = 600.0
_HOUR_S = 3600.0


class Growth:
    """Samples of the bytes in use that no clean-up could free, over the last hour."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def add(self, now_s: float, byte_count: int) -> None:
        """Add a sample. now_s: from a monotonic clock."""
        self._samples.append((now_s, byte_count))
        while now_s - self._samples[0][0] > WINDOW_S:
            self._samples.popleft()

    @property
    def bytes_per_s(self) -> float:
        """Growth rate over the window; 0 while the samples span less than ``SPAN_MIN_S``."""
        if not self._samples:
            return 0.0
        (start, first), (end, last) = self._samples[0], self._samples[-1]
        return (last - first) / (end - start) if end - start >= SPAN_MIN_S else 0.0

    def full_in_hours(self, byte_limit: int) -> float | None:
        """Hours until ``byte_limit`` is reached; None if that is not to be expected."""
        if not self._samples:
            return None
        room_bytes = byte_limit - self._samples[-1][1]
        if room_bytes <= 0:
            return 0.0
        rate = self.bytes_per_s
        return room_bytes / rate / _HOUR_S if rate > 0 else None
