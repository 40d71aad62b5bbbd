"""Queue locks for ordered consumption: one client of a group at a time reads a queue."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from typing import TYPE_CHECKING, NamedTuple

from headrace_broker.host_budget import HostBudget
from headrace_protocol.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator

    from headrace_broker.host_budget import Host
    from headrace_protocol.bodies import MessageQueue

LOCK_LIFE_MS = 60_000
# For a client whose connection is closed: it trusts a lock for 30 s after requesting it.
LEFT_LIFE_MS = 35_000
# Memory of a lock without its texts, measured by tests/abuse/test_kept_memory.py.
_LOCK_BYTES = 1024

_Key = tuple[str, "MessageQueue"]  # group, queue


class _Lock(NamedTuple):
    """reader: the host of a member that consumes the queue's topic; None for any other client."""

    client_id: str
    locked_ms: int
    reader: Host | None


class QueueLocks:
    """The locks of all groups. A lock that is not renewed expires. Times are ``Clock.steady_ms``.

    A lock outlives its client's connection, since the client may keep reading until it expires.
    """

    def __init__(self, budget: HostBudget | None = None) -> None:
        self._budget = budget or HostBudget()
        # Least recently renewed first.
        self._locks: OrderedDict[_Key, _Lock] = OrderedDict()
        # By group and client, the locked queues.
        self._of: defaultdict[str, dict[str, set[MessageQueue]]] = defaultdict(dict)
        # By group and host, the locks of members that consume what they lock.
        self._read: Counter[tuple[str, Host]] = Counter()
        # Group and id of clients that hold locks without a connection.
        self._left: set[tuple[str, str]] = set()

    def __len__(self) -> int:
        return len(self._locks)

    def lock(
        self,
        group: str,
        client_id: str,
        queues: Iterable[MessageQueue],
        now_ms: int,
        host: Host,
        consumed: Container[str] = (),
    ) -> list[MessageQueue]:
        """Take or renew locks; returns the queues that ``client_id`` now holds.

        consumed: topics that the client consumes as a member. Queues for which ``host`` has no
        budget left stay unlocked.
        """
        held = []
        for queue in queues:
            key = group, queue
            known = self._locks.get(key)
            is_mine = known is not None and known.client_id == client_id
            if known is None or is_mine or self._is_expired(group, known, now_ms):
                if not is_mine and not self._take(host, key, client_id):
                    break
                self._set(key, _Lock(client_id, now_ms, host if queue.topic in consumed else None))
                held.append(queue)
        self.returned(group, client_id)
        return held

    def _set(self, key: _Key, lock: _Lock) -> None:
        if (known := self._locks.get(key)) is not None:
            self._count(key[0], known, -1)
        self._locks[key] = lock
        self._locks.move_to_end(key)
        self._count(key[0], lock, 1)

    def _count(self, group: str, lock: _Lock, sign: int) -> None:
        if lock.reader is not None:
            key = group, lock.reader
            self._read[key] += sign
            if not self._read[key]:
                del self._read[key]

    def _take(self, host: Host, key: _Key, client_id: str) -> bool:
        """Enter a lock in the indexes, instead of an expired one; False without budget."""
        group, queue = key
        chars = len(group) + len(client_id) + len(queue.topic) + len(queue.broker_name)
        if key in self._locks:
            self._remove(key)
        try:
            self._budget.keep(host, key, _LOCK_BYTES + 4 * chars)
        except RequestError:
            return False
        self._of[group].setdefault(client_id, set()).add(queue)
        return True

    def unlock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> bool:
        """Release locks; those of other clients stay. Returns whether there were any."""
        before = len(self._locks)
        for queue in queues:
            known = self._locks.get((group, queue))
            if known and known.client_id == client_id:
                self._remove((group, queue))
        return len(self._locks) < before

    # -- clients that come and go ------------------------------------------------------------------

    def is_holder(self, group: str, client_id: str) -> bool:
        """True if a client has locks."""
        return group in self._of and client_id in self._of[group]

    def release(self, group: str, client_id: str) -> None:
        """Release all locks of a client, which reads no longer."""
        if self.is_holder(group, client_id):
            self.unlock(group, client_id, list(self._of[group][client_id]))

    def left(self, group: str, client_id: str) -> None:
        """Shorten the locks of a client without a connection, which may still be reading."""
        if self.is_holder(group, client_id):
            self._left.add((group, client_id))

    def returned(self, group: str, client_id: str) -> None:
        """Undo ``left``."""
        self._left.discard((group, client_id))

    def of_group(self, group: str, now_ms: int) -> Iterator[tuple[MessageQueue, str, int]]:
        """The locked queues of a group, each with its client id and the ms until it expires."""
        for client_id, queues in list(self._of.get(group, {}).items()):
            life_ms = self._life_ms(group, client_id)
            for queue in list(queues):
                lock = self._locks.get((group, queue))
                if lock is not None and lock.locked_ms + life_ms >= now_ms:
                    yield queue, client_id, lock.locked_ms + life_ms - now_ms

    # -- expiry ------------------------------------------------------------------------------------

    def is_ordered(self, group: str, host: Host) -> bool:
        """True if a member of a group on a host holds a queue that it consumes.

        Anybody may lock any name, so other locks say nothing about the group.
        """
        return (group, host) in self._read

    def expire(self, now_ms: int) -> Iterator[str | None]:
        """Remove expired locks; yields the group of each, and None for a lock that stays."""
        while self._locks:
            key, lock = next(iter(self._locks.items()))
            if not self._is_expired(key[0], lock, now_ms):
                break
            self._remove(key)
            yield key[0]
        for group, client_id in list(self._left):
            for queue in list(self._of.get(group, {}).get(client_id, ())):
                known = self._locks.get((group, queue))
                if known and self._is_expired(group, known, now_ms):
                    self._remove((group, queue))
                    yield group
                else:
                    yield None

    def _is_expired(self, group: str, lock: _Lock, now_ms: int) -> bool:
        return now_ms - lock.locked_ms > self._life_ms(group, lock.client_id)

    def _life_ms(self, group: str, client_id: str) -> int:
        return LEFT_LIFE_MS if (group, client_id) in self._left else LOCK_LIFE_MS

    def _remove(self, key: _Key) -> None:
        group, queue = key
        lock = self._locks.pop(key)
        self._count(group, lock, -1)
        client_id = lock.client_id
        clients = self._of[group]
        clients[client_id].discard(queue)
        if not clients[client_id]:
            del clients[client_id]
            self._left.discard((group, client_id))
        if not clients:
            del self._of[group]
        self._budget.drop(key)
