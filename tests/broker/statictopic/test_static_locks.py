"""Locks of logic queues, while their leader changes: two clients never hold the same queue."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace_broker.statictopic.locks import StaticLocks
from headrace_protocol.admin_headers import DeleteTopicHeader
from headrace_protocol.bodies import LockBatchRequestBody, LockBatchResponseBody, MessageQueue
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.statictopic.mapping import logic_broker_name
from tests.support.static_brokers import GROUP, TOPIC, Brokers, item

QUEUES = [MessageQueue(TOPIC, logic_broker_name(), queue) for queue in range(2)]
A0, A1 = item("a", 0, 0, 0), item("a", 0, 0, 1)


@pytest.fixture
def brokers(tmp_path: Path) -> Brokers:
    brokers = Brokers(tmp_path)
    brokers.map((A0,), (A1,))
    brokers.send("a", b"x")
    return brokers


def move(brokers: Brokers) -> None:
    """Queue 0 goes from a to b."""
    brokers.map((A0, item("b", 1, 1, 0)), (A1,))


def ask(brokers: Brokers, broker: str, code: RequestCode, client: str) -> list[int]:
    body = LockBatchRequestBody(consumer_group=GROUP, client_id=client, mq_set=QUEUES)
    answer = brokers[broker].ask(code, body=body.encode())
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    if code == RequestCode.UNLOCK_BATCH_MQ:
        return []
    held = LockBatchResponseBody.decode(answer.body).lock_ok_mq_set
    return [queue.queue_id for queue in held]


def lock(brokers: Brokers, broker: str, client: str) -> list[int]:
    return ask(brokers, broker, RequestCode.LOCK_BATCH_MQ, client)


def pass_ms(brokers: Brokers, ms: int) -> None:
    for broker in brokers.values():
        broker.clock.ms += ms


def test_queues_that_do_not_move_are_locked_by_their_leader_alone(brokers: Brokers) -> None:
    assert lock(brokers, "a", "one") == [0, 1]
    assert lock(brokers, "a", "two") == []
    assert not brokers.asked


def test_a_lock_of_the_old_leader_counts_at_the_new_one(brokers: Brokers) -> None:
    assert lock(brokers, "a", "one") == [0, 1]
    move(brokers)
    assert 0 not in lock(brokers, "b", "two")
    assert 0 in lock(brokers, "b", "one")
    pass_ms(brokers, 61_000)
    assert 0 in lock(brokers, "b", "two")


def test_leaders_are_forgotten_with_their_topic(brokers: Brokers) -> None:
    lock(brokers, "a", "one")
    locks = brokers["a"].part(StaticLocks)
    assert locks._known[TOPIC].keys() == {0, 1}
    brokers["a"].ask(RequestCode.DELETE_TOPIC_IN_BROKER, DeleteTopicHeader(topic=TOPIC))
    lock(brokers, "a", "one")
    assert not locks._known


def test_a_broker_that_lost_a_queue_asks_its_leader(brokers: Brokers) -> None:
    move(brokers)
    assert 0 in lock(brokers, "b", "one")
    assert lock(brokers, "a", "two") == [1]
    assert lock(brokers, "a", "one") == [0]


@pytest.mark.parametrize("jump_ms", [0, -3_600_000, 3_600_000])
def test_the_old_leader_is_asked_for_a_minute(brokers: Brokers, jump_ms: int) -> None:
    move(brokers)
    brokers.away.add("a")
    assert 0 not in lock(brokers, "b", "one")
    brokers["b"].clock.jump(jump_ms)
    assert 0 not in lock(brokers, "b", "one")
    pass_ms(brokers, 61_000)
    asked = len(brokers.asked)
    assert 0 in lock(brokers, "b", "one")
    assert not [each for each in brokers.asked[asked:] if each[2].get("bname") == "broker-b"]


def test_an_unlock_reaches_both(brokers: Brokers) -> None:
    assert lock(brokers, "a", "one") == [0, 1]
    move(brokers)
    assert 0 in lock(brokers, "b", "one")
    ask(brokers, "b", RequestCode.UNLOCK_BATCH_MQ, "one")
    assert 0 in lock(brokers, "b", "two")
