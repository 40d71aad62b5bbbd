"""Token buckets: rates of what clients may have a daemon do."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

_KEYS_MAX: Final = 10_000
# Old values that a new one has a look at.
_LOOKS: Final = 2


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


class Recent(OrderedDict[Key, Value]):
    """Values by key; a new one takes the place of the one that was used longest ago.

    most: how many there may be; with values that are in use there may be more.
    is_in_use: whether a value must stay.
    """

    def __init__(
        self, most: int = _KEYS_MAX, is_in_use: Callable[[Value], bool] = lambda _: False
    ) -> None:
        super().__init__()
        self._most, self._is_in_use = most, is_in_use

    def use(self, key: Key, make: Callable[[], Value]) -> Value:
        """The value of a key, made if there is none."""
        if key in self:
            self.move_to_end(key)
            return self[key]
        self._make_room()
        value = self[key] = make()
        return value

    def _make_room(self) -> None:
        for _ in range(_LOOKS):
            if len(self) < self._most:
                return
            oldest = next(iter(self))
            if self._is_in_use(self[oldest]):
                self.move_to_end(oldest)
            else:
                del self[oldest]


class Buckets:
    """Equal buckets, one for each key, such as a host."""

    def __init__(self, rate: float, wait_s_max: float) -> None:
        self._rate, self._wait_s_max = rate, wait_s_max
        self._buckets: Recent[str, Bucket] = Recent()

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, key: str, now_s: float) -> float | None:
        """As ``Bucket.take`` of the key's bucket."""
        return self._buckets.use(key, self._new).take(now_s)

    def _new(self) -> Bucket:
        return Bucket(self._rate, self._wait_s_max)

    def wait_s(self, key: str, now_s: float) -> float:
        """As ``Bucket.wait_s`` of the key's bucket."""
        bucket = self._buckets.get(key)
        return 0.0 if bucket is None else bucket.wait_s(now_s)
