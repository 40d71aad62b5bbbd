"""Rates of a member by topic, as RocketMQ's clients report them (ConsumeStatus)."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

import anyio

from headrace.values import now_ms

if TYPE_CHECKING:
    from collections.abc import Iterable

_MINUTE_S: Final = 60.0
_HOUR_S: Final = 3600.0
_SAMPLES: Final = 6


class _Totals(NamedTuple):
    """Counts, and seconds that they took."""

    pulls: float = 0
    pulled: float = 0
    pull_s: float = 0
    processed: float = 0
    process_s: float = 0
    failed: float = 0

    def plus(self, other: _Totals) -> _Totals:
        """The sums."""
        return _Totals(*map(sum, zip(self, other, strict=True)))

    def minus(self, other: _Totals) -> _Totals:
        """The differences."""
        return _Totals(*(mine - its for mine, its in zip(self, other, strict=True)))


class _Window:
    """The growth of totals over a time, to a sixth of it."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # Loop times, with the totals before them, where they grew.
        self._samples: deque[tuple[float, _Totals]] = deque(maxlen=_SAMPLES + 1)

    def growing(self, now: float, totals: _Totals) -> None:
        """Sample totals that are about to grow, if a sample is due."""
        if not self._samples or now - self._samples[-1][0] >= self._seconds / _SAMPLES:
            self._samples.append((now, totals))

    def growth(self, now: float, totals: _Totals) -> _Totals:
        """The growth of totals since the window began."""
        before = (old for time, old in self._samples if time >= now - self._seconds)
        return totals.minus(next(before, totals))


class TopicRates:
    """Counts messages of one topic, a batch at a time. began: the loop time at which it begins."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._totals = _Totals()
        self._minute = _Window(_MINUTE_S)
        self._hour = _Window(_HOUR_S)

    def pulled(self, count: int, seconds: float) -> None:
        """Messages have come. seconds: from the request to the answer."""
        self._add(_Totals(pulls=1, pulled=count, pull_s=seconds))

    def processed(self, count: int, seconds: float) -> None:
        """The program is done with messages. seconds: for all of them."""
        self._add(_Totals(processed=count, process_s=seconds))

    def failed(self) -> None:
        """The program has returned a message, which it then is done with as well."""
        self._add(_Totals(failed=1))

    def _add(self, more: _Totals) -> None:
        now = anyio.current_time()
        self._minute.growing(now, self._totals)
        self._hour.growing(now, self._totals)
        self._totals = self._totals.plus(more)

    def report(self) -> dict[str, float]:
        """The fields of ConsumeStatus: RT in ms, TPS per second of the last minute.

        consumeRT: per message, of the last hour if the last minute has none.
        consumeFailedMsgs: of the last hour.
        """
        now = anyio.current_time()
        minute = self._minute.growth(now, self._totals)
        hour = self._hour.growth(now, self._totals)
        lately = minute if minute.processed else hour
        seconds = max(1.0, min(_MINUTE_S, now - self._began))
        return {
            "pullRT": 1000 * minute.pull_s / max(1, minute.pulls),
            "pullTPS": minute.pulled / seconds,
            "consumeRT": 1000 * lately.process_s / max(1, lately.processed),
            "consumeOKTPS": max(0, minute.processed - minute.failed) / seconds,
            "consumeFailedTPS": minute.failed / seconds,
            "consumeFailedMsgs": int(hour.failed),
        }


class Rates:
    """The rates of a member's topics. started_ms: since when, in ms since 1970."""

    def __init__(self) -> None:
        self.started_ms = 0
        self._began = 0.0
        self._topics: dict[str, TopicRates] = {}

    def begin(self, topics: Iterable[str] = ()) -> None:
        """Count anew. topics: those that a report names in any case."""
        self.started_ms = now_ms()
        self._began = anyio.current_time()
        self._topics = {topic: TopicRates(self._began) for topic in topics}

    def of(self, topic: str) -> TopicRates:
        """The rates of a topic."""
        rates = self._topics.get(topic)
        if rates is None:
            rates = self._topics[topic] = TopicRates(self._began)
        return rates

    def report(self) -> dict[str, dict[str, float]]:
        """By topic, see ``TopicRates.report``."""
        return {topic: rates.report() for topic, rates in self._topics.items()}
