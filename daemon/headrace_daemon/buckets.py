"""Token buckets: rates of what hosts may have a daemon do."""

from __future__ import annotations

import math
from typing import Final

_KEYS_MAX: Final = 10_000


class Bucket:
    """Tokens that come back at a rate, at most those of a second.

    wait_s_max: longest wait for a token.
    """

    __slots__ = ("_at_s", "_rate", "_tokens", "_wait_s_max")

    def __init__(self, rate: float, wait_s_max: float = math.inf) -> None:
        self._rate = self._tokens = rate
        self._wait_s_max = wait_s_max
        self._at_s = 0.0

    def take(self, now_s: float) -> float | None:
        """Take a token; seconds until it is there, None without taking one if that is too long."""
        wait_s = self.wait_s(now_s)
        if wait_s > self._wait_s_max:
            return None
        self._tokens, self._at_s = self._tokens_at(now_s) - 1, now_s
        return wait_s

    def wait_s(self, now_s: float) -> float:
        """Seconds until the next token is there."""
        return max(0.0, (1 - self._tokens_at(now_s)) / self._rate)

    def spend(self, amount: float, now_s: float) -> None:
        """Take tokens that are used already; the bucket then owes those that it does not have."""
        self._tokens, self._at_s = self._tokens_at(now_s) - amount, now_s

    def owed_s(self, now_s: float) -> float:
        """Seconds until the bucket owes nothing."""
        return max(0.0, -self._tokens_at(now_s) / self._rate)

    def _tokens_at(self, now_s: float) -> float:
        return min(self._rate, self._tokens + (now_s - self._at_s) * self._rate)

    def is_full(self, now_s: float) -> bool:
        """True if nothing was taken for a while."""
        return self._tokens_at(now_s) >= self._rate


class Buckets:
    """Equal buckets, one for each key, such as a host."""

    def __init__(self, rate: float, wait_s_max: float) -> None:
        self._rate, self._wait_s_max = rate, wait_s_max
        self._buckets: dict[str, Bucket] = {}

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, key: str, now_s: float) -> float | None:
        """As ``Bucket.take`` of the key's bucket."""
        bucket = self._buckets.get(key)
        if bucket is None:
            if len(self._buckets) >= _KEYS_MAX:
                self._forget(now_s)
            bucket = self._buckets[key] = Bucket(self._rate, self._wait_s_max)
        return bucket.take(now_s)

    def wait_s(self, key: str, now_s: float) -> float:
        """As ``Bucket.wait_s`` of the key's bucket."""
        bucket = self._buckets.get(key)
        return 0.0 if bucket is None else bucket.wait_s(now_s)

    def _forget(self, now_s: float) -> None:
        """Forget the buckets that are full; all if none is."""
        self._buckets = {k: each for k, each in self._buckets.items() if not each.is_full(now_s)}
        if len(self._buckets) >= _KEYS_MAX:
            self._buckets.clear()
