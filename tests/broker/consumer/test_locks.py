"""Queue locks of orderly consumers."""

from __future__ import annotations

from functools import partial

import pytest
import trio

from headrace_broker.consumer.locks import LEFT_LIFE_MS, LOCK_LIFE_MS, QueueLocks
from headrace_broker.host_budget import Host
from headrace_broker.serving import upkeep
from headrace_protocol.bodies import LockBatchRequestBody, LockBatchResponseBody, MessageQueue
from headrace_protocol.codes import RequestCode
from headrace_protocol.headers import UnregisterClientHeader
from tests.broker.consumer.test_groups import notices
from tests.support.broker import BrokerUnderTest
from tests.support.channel import MemoryChannel
from tests.support.running import in_background

HOST = Host(b"\x7f\0\0\1")
Q0, Q1 = QUEUES = [MessageQueue("t", "b", queue_id) for queue_id in range(2)]


def test_one_client_at_a_time() -> None:
    locks = QueueLocks()
    assert locks.lock("g", "c1", [Q0, Q1], 0, HOST) == [Q0, Q1]
    assert locks.lock("g", "c2", [Q0, Q1], 1, HOST) == []
    assert locks.lock("other", "c2", [Q0], 1, HOST) == [Q0]
    assert not locks.unlock("g", "c2", [Q0])
    assert locks.lock("g", "c2", [Q0], 2, HOST) == []
    assert locks.unlock("g", "c1", [Q0])
    assert locks.lock("g", "c2", [Q0, Q1], 3, HOST) == [Q0]
    assert not locks.unlock("nobody", "c1", [Q0])


def test_a_lock_that_is_not_renewed_ends() -> None:
    locks = QueueLocks()
    locks.lock("g", "c1", [Q0], 0, HOST)
    assert locks.lock("g", "c1", [Q0], LOCK_LIFE_MS, HOST) == [Q0]
    assert locks.lock("g", "c2", [Q0], 2 * LOCK_LIFE_MS, HOST) == []
    assert locks.lock("g", "c2", [Q0], 2 * LOCK_LIFE_MS + 1, HOST) == [Q0]
    assert locks.lock("g", "c1", [Q0], 2 * LOCK_LIFE_MS + 2, HOST) == []


def test_the_lock_of_a_client_that_left_ends_sooner() -> None:
    locks = QueueLocks()
    locks.lock("g", "c1", [Q0], 0, HOST, {"t"})
    locks.left("g", "c1")
    assert locks.is_ordered("g", HOST)
    assert locks.lock("g", "c2", [Q0], LEFT_LIFE_MS, HOST) == []
    assert list(locks.expire(LEFT_LIFE_MS)) == [None]
    assert locks.lock("g", "c2", [Q0], LEFT_LIFE_MS + 1, HOST) == [Q0]


@pytest.mark.parametrize("how", ["heartbeat", "renewal"])
def test_the_lock_of_a_client_that_came_back_lasts(how: str) -> None:
    locks = QueueLocks()
    locks.lock("g", "c1", [Q0], 0, HOST, {"t"})
    locks.left("g", "c1")
    if how == "heartbeat":
        locks.returned("g", "c1")
    else:
        locks.lock("g", "c1", [Q0], 0, HOST)
    assert list(locks.expire(LOCK_LIFE_MS)) == []
    assert list(locks.expire(LOCK_LIFE_MS + 1)) == ["g"]
    assert len(locks) == 0
    assert not locks.is_ordered("g", HOST)


# -- members of a broker ---------------------------------------------------------------------------


def ask_locks(
    broker: BrokerUnderTest, client_id: str, code: RequestCode = RequestCode.LOCK_BATCH_MQ
) -> list[MessageQueue]:
    body = LockBatchRequestBody(consumer_group="g", client_id=client_id, mq_set=QUEUES)
    answer = broker.ask(code, body=body.encode())
    if code == RequestCode.UNLOCK_BATCH_MQ:
        return []
    return LockBatchResponseBody.decode(answer.body).lock_ok_mq_set


def two_members(broker: BrokerUnderTest) -> tuple[MemoryChannel, MemoryChannel]:
    """The first holds both queues, and neither has unread notices."""
    one, two = broker.join("g", "c1", "t"), broker.join("g", "c2", "t")
    assert ask_locks(broker, "c1") == QUEUES
    notices(one), notices(two)
    # Of more than four notices in a second, the rest are sent together.
    broker.consumers._notice_counts.clear()
    return one, two


def test_a_member_that_unregisters_hands_its_queues_over(broker: BrokerUnderTest) -> None:
    one, two = two_members(broker)
    header = UnregisterClientHeader(client_id="c1", consumer_group="g")
    broker.ask(RequestCode.UNREGISTER_CLIENT, header, channel=one)
    assert notices(two) == ["g"]
    assert ask_locks(broker, "c2") == QUEUES


def test_released_locks_are_reported(broker: BrokerUnderTest) -> None:
    _, two = two_members(broker)
    ask_locks(broker, "c1", RequestCode.UNLOCK_BATCH_MQ)
    assert notices(two) == ["g"]
    ask_locks(broker, "c1", RequestCode.UNLOCK_BATCH_MQ)
    assert notices(two) == []


def test_a_closed_connection_shortens_the_locks(broker: BrokerUnderTest) -> None:
    one, two = two_members(broker)
    broker.consumers.channel_closed(one)
    assert notices(two) == ["g"]
    assert ask_locks(broker, "c2") == []
    broker.clock.ms += LEFT_LIFE_MS
    broker.consumers.expire_locks(broker.clock.ms)
    assert notices(two) == []
    broker.clock.ms += 1
    broker.consumers.expire_locks(broker.clock.ms)
    assert set(notices(two)) == {"g"}
    assert ask_locks(broker, "c2") == QUEUES


def test_a_reconnected_member_keeps_its_locks(broker: BrokerUnderTest) -> None:
    one, _ = two_members(broker)
    broker.consumers.channel_closed(one)
    again = broker.join("g", "c1", "t")
    broker.clock.ms += LEFT_LIFE_MS + 1
    assert ask_locks(broker, "c2") == []
    # Its new connection was open before the old one was closed.
    broker.join("g", "c1", "t")
    broker.consumers.channel_closed(again)
    assert ask_locks(broker, "c2") == []
    broker.clock.ms += LOCK_LIFE_MS
    assert ask_locks(broker, "c2") == QUEUES


async def test_expired_locks_are_reported_within_a_second(
    broker: BrokerUnderTest, autojump_clock: object
) -> None:
    _, two = two_members(broker)
    broker.clock.ms += LOCK_LIFE_MS + 1
    async with in_background(partial(upkeep.expire_locks, broker.consumers, broker.clock)):
        await trio.sleep(1.5)
    assert set(notices(two)) == {"g"}


@pytest.mark.parametrize("jump_ms", [-3_600_000, 3_600_000])
async def test_members_and_locks_stay_when_the_wall_clock_is_set(
    broker: BrokerUnderTest, autojump_clock: object, jump_ms: int
) -> None:
    two_members(broker)
    broker.clock.jump(jump_ms)
    expiry = upkeep.ClientExpiry(broker.consumers, broker.producers, broker.changes, broker.clock)
    async with in_background(
        partial(upkeep.expire_locks, broker.consumers, broker.clock), expiry.run
    ):
        await trio.sleep(15)
    assert {member.client_id for member in broker.consumers.members("g")} == {"c1", "c2"}
    assert ask_locks(broker, "c2") == []
    broker.clock.ms += LOCK_LIFE_MS + 1
    assert ask_locks(broker, "c2") == QUEUES
