"""Rates of TLS handshakes, each of which costs the loop up to a millisecond."""

from __future__ import annotations

from typing import Final

# Handshakes a second.
ALL_RATE: Final = 200.0
HOST_RATE: Final = 20.0
# A host that must wait longer is refused.
WAIT_S_MAX: Final = 10.0
_HOSTS_MAX: Final = 10_000


class Bucket:
    """Tokens that come back at a rate, at most those of a second."""

    __slots__ = ("_at_s", "_rate", "_tokens")

    def __init__(self, rate: float) -> None:
        self._rate = self._tokens = rate
        self._at_s = 0.0

    def take(self, now_s: float) -> float | None:
        """Take a token; seconds until it is there, None without taking one if that is too long."""
        tokens = min(self._rate, self._tokens + (now_s - self._at_s) * self._rate)
        wait_s = max(0.0, (1 - tokens) / self._rate)
        if wait_s > WAIT_S_MAX:
            return None
        self._tokens, self._at_s = tokens - 1, now_s
        return wait_s

    def is_full(self, now_s: float) -> bool:
        """True if nothing was taken for a while."""
        return self._tokens + (now_s - self._at_s) * self._rate >= self._rate


class Handshakes:
    """The handshakes of a server: of all its clients, and of each host.

    A host takes its own tokens first, so that those of all are left to others while it waits.
    """

    def __init__(self) -> None:
        self._all = Bucket(ALL_RATE)
        self._hosts: dict[str, Bucket] = {}

    @property
    def host_count(self) -> int:
        """The hosts that are remembered."""
        return len(self._hosts)

    def take(self, now_s: float) -> float | None:
        """Seconds until a host that has its own token may begin; None to refuse it."""
        return self._all.take(now_s)

    def take_of(self, host: str, now_s: float) -> float | None:
        """Seconds until the host may ask for a token of all; None to refuse it."""
        bucket = self._hosts.get(host)
        if bucket is None:
            if len(self._hosts) >= _HOSTS_MAX:
                self._forget(now_s)
            bucket = self._hosts[host] = Bucket(HOST_RATE)
        return bucket.take(now_s)

    def _forget(self, now_s: float) -> None:
        """Forget the hosts that are at rest; all if none is."""
        self._hosts = {h: each for h, each in self._hosts.items() if not each.is_full(now_s)}
        if len(self._hosts) >= _HOSTS_MAX:
            self._hosts.clear()
