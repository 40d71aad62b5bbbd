"""What went in and out, counted per batch; rates over the last ten seconds."""

from __future__ import annotations

from collections import deque

import trio

_SAMPLE_S = 1.0
_WINDOW_SAMPLES = 10


class Counter:
    """Messages and bytes since the broker started, with the rate of late."""

    __slots__ = ("body_bytes", "count", "samples")

    def __init__(self) -> None:
        self.count = 0
        self.body_bytes = 0
        self.samples: deque[tuple[float, int]] = deque(maxlen=_WINDOW_SAMPLES + 1)

    def add(self, count: int, body_bytes: int) -> None:
        """Count a batch."""
        self.count += count
        self.body_bytes += body_bytes

    def sample(self, now: float) -> None:
        """Remember how far the count is at ``now`` (seconds)."""
        self.samples.append((now, self.count))

    @property
    def rate(self) -> float:
        """Messages a second over the window; 0 before the second sample."""
        if len(self.samples) < 2:
            return 0.0
        (start, first), (end, last) = self.samples[0], self.samples[-1]
        return (last - first) / (end - start) if end > start else 0.0


class BrokerStatistics:
    """Counters of the broker as a whole, of topics written and of groups reading topics."""

    def __init__(self) -> None:
        self.puts = Counter()
        self.gets = Counter()
        self.topic_puts: dict[str, Counter] = {}
        self.group_gets: dict[tuple[str, str], Counter] = {}

    def put(self, topic: str, count: int, body_bytes: int) -> None:
        """Messages were stored."""
        self.puts.add(count, body_bytes)
        counter = self.topic_puts.get(topic)
        if counter is None:
            counter = self.topic_puts[topic] = Counter()
        counter.add(count, body_bytes)

    def get(self, group: str, topic: str, count: int, body_bytes: int) -> None:
        """Messages were handed to a group."""
        self.gets.add(count, body_bytes)
        counter = self.group_gets.get((group, topic))
        if counter is None:
            counter = self.group_gets[group, topic] = Counter()
        counter.add(count, body_bytes)

    def topic_rate(self, topic: str) -> float:
        """Messages a second stored of ``topic``."""
        counter = self.topic_puts.get(topic)
        return counter.rate if counter else 0.0

    def group_rate(self, group: str, topic: str) -> float:
        """Messages a second handed to ``group`` from ``topic``."""
        counter = self.group_gets.get((group, topic))
        return counter.rate if counter else 0.0

    async def run(self) -> None:
        """Take samples until cancelled; what stood still in the whole window is dropped."""
        while True:
            now = trio.current_time()
            self.puts.sample(now)
            self.gets.sample(now)
            _sample_active(self.topic_puts, now)
            _sample_active(self.group_gets, now)
            await trio.sleep(_SAMPLE_S)


def _sample_active(counters: dict, now: float) -> None:  # type: ignore[type-arg]
    for counter in counters.values():
        counter.sample(now)
