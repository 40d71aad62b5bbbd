"""Rates of TLS handshakes, each of which costs the loop up to a millisecond."""

from __future__ import annotations

from typing import Final

from headrace_daemon.buckets import Bucket, Buckets

# Handshakes a second.
ALL_RATE: Final = 200.0
HOST_RATE: Final = 20.0
# A host that must wait longer is refused.
WAIT_S_MAX: Final = 10.0


class Handshakes:
    """The handshakes of a server: of all its clients, and of each host.

    A host takes its own tokens first, so that those of all are left to others while it waits.
    """

    def __init__(self) -> None:
        self._all = Bucket(ALL_RATE, WAIT_S_MAX)
        self._hosts = Buckets(HOST_RATE, WAIT_S_MAX)

    @property
    def host_count(self) -> int:
        """The hosts that are remembered."""
        return len(self._hosts)

    def take(self, now_s: float) -> float | None:
        """Seconds until a host that has its own token may begin; None to refuse it."""
        return self._all.take(now_s)

    def take_of(self, host: str, now_s: float) -> float | None:
        """Seconds until the host may ask for a token of all; None to refuse it."""
        return self._hosts.take(host, now_s)
