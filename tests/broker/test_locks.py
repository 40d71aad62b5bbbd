"""Queue locks of orderly consumers."""

from __future__ import annotations

from headrace_broker.consumer.locks import LOCK_LIFE_MS, QueueLocks
from headrace_broker.host_budget import Host
from headrace_protocol.bodies import MessageQueue

HOST = Host(b"\x7f\0\0\1")
Q0, Q1 = (MessageQueue("t", "b", queue_id) for queue_id in range(2))


def test_one_client_at_a_time() -> None:
    locks = QueueLocks()
    assert locks.lock("g", "c1", [Q0, Q1], 0, HOST) == [Q0, Q1]
    assert locks.lock("g", "c2", [Q0, Q1], 1, HOST) == []
    assert locks.lock("other", "c2", [Q0], 1, HOST) == [Q0]
    locks.unlock("g", "c2", [Q0])
    assert locks.lock("g", "c2", [Q0], 2, HOST) == []
    locks.unlock("g", "c1", [Q0])
    assert locks.lock("g", "c2", [Q0, Q1], 3, HOST) == [Q0]
    locks.unlock("nobody", "c1", [Q0])


def test_a_lock_that_is_not_renewed_ends() -> None:
    locks = QueueLocks()
    locks.lock("g", "c1", [Q0], 0, HOST)
    assert locks.lock("g", "c1", [Q0], LOCK_LIFE_MS, HOST) == [Q0]
    assert locks.lock("g", "c2", [Q0], 2 * LOCK_LIFE_MS, HOST) == []
    assert locks.lock("g", "c2", [Q0], 2 * LOCK_LIFE_MS + 1, HOST) == [Q0]
    assert locks.lock("g", "c1", [Q0], 2 * LOCK_LIFE_MS + 2, HOST) == []
