"""Counts of messages stored and read, and their rates over the last ten seconds."""

from __future__ import annotations

import datetime as dt
from bisect import bisect_left
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

_SAMPLE_S = 1.0
_WINDOW_SAMPLES = 10
# Minute, hour and day, and the time between two samples of each.
WINDOWS_S = (60.0, 3600.0, 86_400.0)
_PERIODS_S = (10.0, 600.0, 3600.0)
# A history has about 6 KiB. Topics and groups beyond these have none.
_HISTORIES_MAX = 2000


class Counter:
    """Messages and bytes since the broker started, and their recent rate.

    today_morning, yesterday_morning: the count at the last two midnights.
    is_sampled: whether samples are taken, because the count has changed recently.
    """

    __slots__ = (
        "body_bytes",
        "count",
        "is_sampled",
        "samples",
        "today_morning",
        "yesterday_morning",
    )

    def __init__(self) -> None:
        self.count = 0
        self.body_bytes = 0
        self.today_morning = self.yesterday_morning = 0
        self.is_sampled = False
        self.samples: deque[tuple[float, int]] | None = None

    def add(self, count: int, body_bytes: int) -> None:
        """Count messages."""
        self.count += count
        self.body_bytes += body_bytes

    def sample(self, now: float) -> None:
        """Take a sample at ``now`` (seconds)."""
        if self.samples is None:
            self.samples = deque(maxlen=_WINDOW_SAMPLES + 1)
        self.samples.append((now, self.count))

    def sample_is_idle(self, now: float) -> bool:
        """Take a sample; if the whole window shows no change, drop all samples and return True."""
        self.sample(now)
        samples = self.samples
        assert samples is not None
        if len(samples) <= _WINDOW_SAMPLES or samples[0][1] != self.count:
            return False
        self.samples = None
        self.is_sampled = False
        return True

    def begin_day(self) -> None:
        """Record the count at midnight."""
        self.yesterday_morning, self.today_morning = self.today_morning, self.count

    @property
    def rate(self) -> float:
        """Messages a second over the window; 0 before the second sample."""
        if self.samples is None or len(self.samples) < 2:
            return 0.0
        (start, first), (end, last) = self.samples[0], self.samples[-1]
        return (last - first) / (end - start) if end > start else 0.0


class Sums(NamedTuple):
    """Messages and bytes of a window. seconds: how long it is: up to a sample more, or younger."""

    messages: int
    body_bytes: int
    seconds: float


class History:
    """Samples of a counter for the last minute, hour and day; see ``WINDOWS_S``."""

    __slots__ = ("_samples",)

    def __init__(self, now: float) -> None:
        self._samples = [
            deque([(now, 0, 0)], maxlen=round(window_s / period_s) + 2)
            for window_s, period_s in zip(WINDOWS_S, _PERIODS_S, strict=True)
        ]

    def sample(self, counter: Counter, now: float) -> None:
        """Take a sample where one is due."""
        for period_s, samples in zip(_PERIODS_S, self._samples, strict=True):
            if now - samples[-1][0] >= period_s:
                samples.append((now, counter.count, counter.body_bytes))

    def sums(self, window_s: float, counter: Counter, now: float) -> Sums:
        """Messages and bytes of the last ``window_s`` seconds, at most a day."""
        samples = self._samples[bisect_left(WINDOWS_S, window_s)]
        start, count, body_bytes = samples[0]
        for sample in samples:
            if sample[0] > now - window_s:
                break
            start, count, body_bytes = sample
        return Sums(counter.count - count, counter.body_bytes - body_bytes, max(now - start, 1.0))


class BrokerStatistics:
    """Counters of the broker, of sends by topic, of reads and returns by group and topic.

    Idle topics cost nothing.
    sampled: the counters that have changed within the window.
    on_put, on_get: called with what was counted, while there are quotas; else None.
    """

    def __init__(self) -> None:
        self.puts = Counter()
        self.gets = Counter()
        self.topic_puts: dict[str, Counter] = {}
        self.group_gets: dict[tuple[str, str], Counter] = {}
        self.send_backs: dict[tuple[str, str], Counter] = {}
        self.sampled: list[Counter] = []
        self.histories: dict[Counter, History] = {}
        self._looks = 0
        self.on_put: Callable[[str, int], None] | None = None
        self.on_get: Callable[[str, str, int], None] | None = None

    def put(self, topic: str, count: int, body_bytes: int) -> None:
        """Count messages stored in a topic."""
        self.puts.add(count, body_bytes)
        counter = self.topic_puts.get(topic)
        if counter is None:
            counter = self.topic_puts[topic] = Counter()
        if not counter.is_sampled:
            self._begin_sampling(counter)
        counter.add(count, body_bytes)
        if self.on_put is not None:
            self.on_put(topic, body_bytes)

    def get(self, group: str, topic: str, count: int, body_bytes: int) -> None:
        """Count messages read by a group."""
        self.gets.add(count, body_bytes)
        counter = self.group_gets.get((group, topic))
        if counter is None:
            counter = self.group_gets[group, topic] = Counter()
        if not counter.is_sampled:
            self._begin_sampling(counter)
        counter.add(count, body_bytes)
        if self.on_get is not None:
            self.on_get(group, topic, body_bytes)

    def sent_back(self, group: str, topic: str, body_bytes: int) -> None:
        """Count a message of a topic that a group has sent back."""
        counter = self.send_backs.get((group, topic))
        if counter is None:
            counter = self.send_backs[group, topic] = Counter()
        if not counter.is_sampled:
            self._begin_sampling(counter)
        counter.add(1, body_bytes)

    def topic_deleted(self, topic: str) -> None:
        """Remove the counters of a topic; the totals keep its messages."""
        self._forget(self.topic_puts.pop(topic, None))
        self._forget_groups(lambda key: key[1] == topic)

    def group_deleted(self, group: str) -> None:
        """Remove the counters of a group."""
        self._forget_groups(lambda key: key[0] == group)

    def _forget_groups(self, is_gone: Callable[[tuple[str, str]], bool]) -> None:
        for counters in (self.group_gets, self.send_backs):
            for key in list(filter(is_gone, counters)):
                self._forget(counters.pop(key))

    def _forget(self, counter: Counter | None) -> None:
        if counter is not None:
            self.histories.pop(counter, None)

    def _begin_sampling(self, counter: Counter) -> None:
        counter.is_sampled = True
        self.sampled.append(counter)

    def sample(self) -> None:
        """Take a sample of all active counters."""
        now = trio.current_time()
        self.puts.sample(now)
        self.gets.sample(now)
        self._looks += 1
        if self._looks % _WINDOW_SAMPLES == 0:
            self._sample_histories(now)
        self.sampled = [counter for counter in self.sampled if not counter.sample_is_idle(now)]

    def _sample_histories(self, now: float) -> None:
        for counter in (self.puts, self.gets, *self.sampled):
            history = self.histories.get(counter)
            if history is None:
                if len(self.histories) >= _HISTORIES_MAX:
                    continue
                history = self.histories[counter] = History(now)
            history.sample(counter, now)

    def rates(self, counter: Counter) -> str:
        """The rates of ten seconds, one minute and ten minutes, as the peer writes them."""
        minute, ten_minutes = (self.sums(counter, window_s) for window_s in (60.0, 600.0))
        rates = (counter.rate, *(each.messages / each.seconds for each in (minute, ten_minutes)))
        return " ".join(f"{rate:.2f}" for rate in rates)

    def sums(self, counter: Counter, window_s: float) -> Sums:
        """Messages and bytes of a counter in the last ``window_s`` seconds, at most a day."""
        history = self.histories.get(counter)
        if history is None:
            return Sums(0, 0, 1.0)
        return history.sums(window_s, counter, trio.current_time())

    def topic_rate(self, topic: str) -> float:
        """Messages a second stored in ``topic``."""
        counter = self.topic_puts.get(topic)
        return counter.rate if counter else 0.0

    def group_rate(self, group: str, topic: str) -> float:
        """Messages a second read by ``group`` from ``topic``."""
        counter = self.group_gets.get((group, topic))
        return counter.rate if counter else 0.0

    async def run(self, now_ms: Callable[[], int]) -> None:
        """Take samples until cancelled.

        now_ms: the wall clock, for the beginning of a day.
        """
        today = _day(now_ms())
        while True:
            if (day := _day(now_ms())) != today:
                today = day
                self.puts.begin_day()
                self.gets.begin_day()
            self.sample()
            await trio.sleep(_SAMPLE_S)


def _day(now_ms: int) -> dt.date:
    """The local date: as in the peer, days begin at local midnight."""
    return dt.datetime.fromtimestamp(now_ms / 1000).astimezone().date()
