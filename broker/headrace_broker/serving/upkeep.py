"""Periodic work on the state of clients: expiry."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from headrace_broker.clock import Clock
    from headrace_broker.consumer.groups import ConsumerManager, ProducerManager
    from headrace_daemon.host_log import HostLog

_EXPIRE_S = 10.0
_EXPIRE_LOCKS_S = 1.0


class ClientExpiry:
    """Removes clients whose heartbeats have stopped.

    changes: the log of changes by clients; its suppressed lines are reported at the same interval.
    """

    def __init__(
        self,
        consumers: ConsumerManager,
        producers: ProducerManager,
        changes: HostLog,
        clock: Clock,
    ) -> None:
        self._consumers = consumers
        self._producers = producers
        self._changes = changes
        self._clock = clock

    async def run(self) -> None:
        """Run at intervals until cancelled."""
        while True:
            await trio.sleep(_EXPIRE_S)
            self._consumers.expire(self._clock.steady_ms())
            self._producers.expire(self._clock.steady_ms())
            self._changes.report()


async def expire_locks(consumers: ConsumerManager, clock: Clock) -> None:
    """Remove locks that were not renewed, until cancelled; other members wait for them."""
    while True:
        await trio.sleep(_EXPIRE_LOCKS_S)
        consumers.expire_locks(clock.steady_ms())
