"""Queue locks of orderly consumers: one client at a time reads a queue of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace_protocol.bodies import MessageQueue

LOCK_LIFE_MS = 60_000


class QueueLocks:
    """Which client holds which queue; a lock that is not renewed ends by itself."""

    def __init__(self) -> None:
        # group -> queue -> (client id, when it was last locked, in ms)
        self._locks: dict[str, dict[MessageQueue, tuple[str, int]]] = {}

    def lock(
        self, group: str, client_id: str, queues: Iterable[MessageQueue], now_ms: int
    ) -> list[MessageQueue]:
        """Take or renew locks; returns the queues that ``client_id`` holds now."""
        locks = self._locks.setdefault(group, {})
        held = []
        for queue in queues:
            owner, locked_ms = locks.get(queue, (client_id, 0))
            if owner == client_id or now_ms - locked_ms > LOCK_LIFE_MS:
                locks[queue] = client_id, now_ms
                held.append(queue)
        return held

    def unlock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> None:
        """Give locks back; those that others hold stay."""
        locks = self._locks.get(group, {})
        for queue in queues:
            owner = locks.get(queue)
            if owner and owner[0] == client_id:
                del locks[queue]
        if not locks:
            self._locks.pop(group, None)
