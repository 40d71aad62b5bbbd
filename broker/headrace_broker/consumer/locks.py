"""Queue locks for ordered consumption: one client of a group at a time reads a queue."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from headrace_broker.host_budget import HostBudget
from headrace_protocol.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from headrace_broker.host_budget import Host
    from headrace_protocol.bodies import MessageQueue

LOCK_LIFE_MS = 60_000
# Memory of a lock without its texts, measured by tests/abuse/test_kept_memory.py.
_LOCK_BYTES = 1024


class _Lock(NamedTuple):
    client_id: str
    locked_ms: int


class QueueLocks:
    """The locks of all groups. A lock that is not renewed expires.

    A lock outlives its client's connection, since the client may keep reading until it expires.
    """

    def __init__(self, budget: HostBudget | None = None) -> None:
        self._budget = budget or HostBudget()
        # By group and queue, least recently renewed first.
        self._locks: OrderedDict[tuple[str, MessageQueue], _Lock] = OrderedDict()
        # By group, the queues with a lock.
        self._of: dict[str, set[MessageQueue]] = {}

    def __len__(self) -> int:
        return len(self._locks)

    def lock(
        self,
        group: str,
        client_id: str,
        queues: Iterable[MessageQueue],
        now_ms: int,
        host: Host,
    ) -> list[MessageQueue]:
        """Take or renew locks; returns the queues that ``client_id`` now holds.

        Queues for which ``host`` has no budget left stay unlocked.
        """
        locks = self._locks
        held = []
        for queue in queues:
            key = group, queue
            known = locks.get(key)
            is_mine = known is not None and known.client_id == client_id
            if known is None or is_mine or _is_expired(known, now_ms):
                if not is_mine and not self._has_budget(host, key, client_id):
                    break
                locks[key] = _Lock(client_id, now_ms)
                self._of.setdefault(group, set()).add(queue)
                locks.move_to_end(key)
                held.append(queue)
        return held

    def _has_budget(self, host: Host, key: tuple[str, MessageQueue], client_id: str) -> bool:
        group, queue = key
        chars = len(group) + len(client_id) + len(queue.topic) + len(queue.broker_name)
        try:
            self._budget.keep(host, key, _LOCK_BYTES + 4 * chars)
        except RequestError:
            return False
        return True

    def unlock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> None:
        """Release locks; those of other clients stay."""
        for queue in queues:
            known = self._locks.get((group, queue))
            if known and known.client_id == client_id:
                self._remove((group, queue))

    def is_any_held(self, group: str, now_ms: int) -> bool:
        """Whether a client holds a queue of a group now."""
        held = self._locks
        return any(not _is_expired(held[group, queue], now_ms) for queue in self._of.get(group, ()))

    def expire(self, now_ms: int) -> Iterator[None]:
        """Remove expired locks; yields after each."""
        while self._locks:
            key, lock = next(iter(self._locks.items()))
            if not _is_expired(lock, now_ms):
                return
            self._remove(key)
            yield

    def _remove(self, key: tuple[str, MessageQueue]) -> None:
        group, queue = key
        del self._locks[key]
        queues = self._of[group]
        queues.discard(queue)
        if not queues:
            del self._of[group]
        self._budget.drop(key)


def _is_expired(lock: _Lock, now_ms: int) -> bool:
    return now_ms - lock.locked_ms > LOCK_LIFE_MS
