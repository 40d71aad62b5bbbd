"""Staged writes to logic queues, which may move before their batch is decided or committed."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace_broker.staging import queues
from headrace_protocol.admin_headers import DeleteTopicHeader
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.staging import Decision
from headrace_protocol.statictopic.mapping import Chain, TopicMapping, encode_detail
from tests.broker.staging.test_staging import (
    Waiting,
    answered,
    bodies,
    commit,
    decide,
    decision,
    serving,
    stage,
)
from tests.broker.statictopic.test_static_changes import EPOCH, change, header, item, moved
from tests.support.broker import BrokerUnderTest
from tests.support.stores import crash

SUCCESS = ResponseCode.SUCCESS
REFUSED = ResponseCode.ILLEGAL_OPERATION


def crossed() -> TopicMapping:
    """Logic queue 0 is physical queue 1, and the reverse."""
    hosted: dict[int, Chain] = {0: (item(queue_id=1),), 1: (item(queue_id=0),)}
    return TopicMapping(topic="T", bname="broker-a", epoch=EPOCH, total_queues=2, hosted=hosted)


def away() -> TopicMapping:
    return moved(0, item(1, 5, -1, bname="broker-b"), crossed())


@pytest.fixture
def broker(tmp_path: Path) -> BrokerUnderTest:
    broker = BrokerUnderTest(tmp_path)
    broker.clock.ms = EPOCH
    change(broker, crossed())
    return broker


def begin_close(broker: BrokerUnderTest) -> Waiting:
    channel = Waiting()
    code = RequestCode.UPDATE_AND_CREATE_STATIC_TOPIC
    broker.send(code, header("T", 2), encode_detail(away()), channel)
    return channel


async def test_a_batch_goes_to_the_physical_queues(broker: BrokerUnderTest) -> None:
    one = stage(broker, "one", (b"a",), (b"b",))
    decide(broker, decision(one))
    async with serving(broker):
        assert (await commit(broker)).code == SUCCESS
    assert (bodies(broker, 1), bodies(broker, 0)) == ([b"a"], [b"b"])


async def test_what_is_decided_goes_in_before_the_queue_is_closed(broker: BrokerUnderTest) -> None:
    decide(broker, decision(stage(broker, "one", (b"a",), (b"b",))))
    async with serving(broker):
        closing = begin_close(broker)
        assert not closing.replies()
        assert (await answered(closing)).code == SUCCESS
        assert bodies(broker, 1) == [b"a"]
        assert broker.mappings.leads("T", 0) is None
        assert (await commit(broker)).code == SUCCESS
    assert (bodies(broker, 1), bodies(broker, 0)) == ([b"a"], [b"b"])


async def test_what_is_not_decided_is_written_again(broker: BrokerUnderTest) -> None:
    one = stage(broker, "one", (b"a",))
    change(broker, away())
    refused = decide(broker, decision(one))
    assert refused.code == REFUSED
    assert "queue 0 of topic T has moved" in refused.remark
    assert bodies(broker, 1) == []


async def test_nothing_is_decided_for_a_queue_that_is_being_closed(broker: BrokerUnderTest) -> None:
    decide(broker, Decision("d", 0, {"broker-a": (stage(broker, "one", (b"a",)),), "broker-b": ()}))
    async with serving(broker):
        closing = begin_close(broker)
        later = stage(broker, "later", (b"c",), batch=1)
        refused = decide(broker, decision(later, batch=1, name="e"))
        assert refused.code == REFUSED, refused.remark
        assert (await commit(broker)).code == SUCCESS
        assert (await answered(closing)).code == SUCCESS
    assert bodies(broker, 1) == [b"a"]


async def test_a_batch_that_is_never_committed_keeps_its_queue(
    broker: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "_PENDING_S", 0.05)
    decide(broker, Decision("d", 0, {"broker-a": (stage(broker, "one", (b"a",)),), "broker-b": ()}))
    async with serving(broker):
        answer = await answered(begin_close(broker))
        assert answer.code == REFUSED
        assert "query query-1 has a decided batch" in answer.remark
        assert broker.mappings.leads("T", 0) == 1
        assert (await commit(broker)).code == SUCCESS
        assert (await answered(begin_close(broker))).code == SUCCESS


async def test_an_attempt_from_before_a_restart_is_read_again(
    broker: BrokerUnderTest, tmp_path: Path
) -> None:
    one = stage(broker, "one", (b"a",))
    change(broker, away())
    crash(broker.store)
    again = BrokerUnderTest(tmp_path)
    assert decide(again, decision(one)).code == REFUSED


async def test_one_change_of_a_topic_at_a_time(broker: BrokerUnderTest) -> None:
    decide(broker, decision(stage(broker, "one", (b"a",))))
    async with serving(broker):
        closing = begin_close(broker)
        busy = change(broker, crossed())
        assert (busy.code, "changed by another request" in busy.remark) == (
            ResponseCode.SYSTEM_BUSY,
            True,
        )
        code = RequestCode.DELETE_TOPIC_IN_BROKER
        assert broker.ask(code, DeleteTopicHeader(topic="T")).code == ResponseCode.SYSTEM_BUSY
        assert (await answered(closing)).code == SUCCESS
    assert broker.topics.get("T") is not None
    assert broker.ask(code, DeleteTopicHeader(topic="T")).code == SUCCESS
