"""Answers that list name only what their client may see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio.testing

from headrace_protocol import fastjson
from headrace_protocol.admin_headers import (
    CloneGroupOffsetHeader,
    GetAllSubscriptionGroupHeader,
    GetAllTopicConfigHeader,
    GetConsumeStatsHeader,
    QueryTopicConsumeByWhoHeader,
)
from headrace_protocol.codes import RequestCode as Code
from headrace_protocol.codes import ResponseCode
from headrace_protocol.headers import ListTimersHeader, ListTransactionsHeader
from headrace_protocol.message import encode_properties
from headrace_protocol.tier_headers import TierStatusHeader
from tests.support.broker import Answer, BrokerUnderTest, broker_config
from tests.support.ledger import Ledger
from tests.support.memory import HOST
from tests.support.rights import client_of, rights_of, users_of
from tests.support.waiting_broker import WaitingBroker

OK, REFUSED = ResponseCode.SUCCESS, ResponseCode.NO_PERMISSION
USERS = {
    "alice": ["Topic:mine* Sub", "Topic:named Get", "Group:mine* Sub,Get,Update"],
    "nobody": [],
}
TOPICS = ["mine-1", "mine-2", "named", "other-1", "%RETRY%mine", "%RETRY%others"]
VISIBLE = {"mine-1", "mine-2", "named", "%RETRY%mine"}


@pytest.fixture
def broker(tmp_path: Path) -> BrokerUnderTest:
    broker = BrokerUnderTest(tmp_path, rights=rights_of(users_of(**USERS)))
    for topic in TOPICS:
        broker.create_topic(topic, 1)
    for group in ("mine", "others"):
        broker.groups.get_or_create(group, HOST)
        for topic in ("mine-1", "other-1"):
            broker.offsets.commit(group, topic, 0, 1)
    return broker


def asked(
    broker: BrokerUnderTest, user: str, code: int, header: msgspec.Struct | None = None
) -> Answer:
    return broker.ask(code, header, channel=client_of(user))


def body(broker: BrokerUnderTest, user: str, code: int, header: msgspec.Struct) -> Any:
    answer = asked(broker, user, code, header)
    assert answer.code == OK, answer.remark
    return fastjson.loads(answer.body)


def test_topics(broker: BrokerUnderTest) -> None:
    everything = GetAllTopicConfigHeader()
    for user, names in (("alice", VISIBLE), ("nobody", set())):
        answer = asked(broker, user, Code.GET_ALL_TOPIC_CONFIG, everything)
        assert fastjson.loads(answer.body)["topicConfigTable"].keys() == names
        assert answer.command.ext()["totalTopicNum"] == str(len(names))
    found = body(broker, "root", Code.GET_ALL_TOPIC_CONFIG, everything)["topicConfigTable"]
    assert set(TOPICS) < found.keys()


def test_topics_in_ranges(broker: BrokerUnderTest) -> None:
    found: set[str] = set()
    for start in range(0, 8, 2):
        header = GetAllTopicConfigHeader(topic_seq=start, max_topic_num=2)
        found |= body(broker, "alice", Code.GET_ALL_TOPIC_CONFIG, header)["topicConfigTable"].keys()
    assert found == VISIBLE


def test_groups(broker: BrokerUnderTest) -> None:
    header = GetAllSubscriptionGroupHeader()
    code, name = Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, "subscriptionGroupTable"
    assert body(broker, "alice", code, header)[name].keys() == {"mine"}
    assert body(broker, "nobody", code, header)[name] == {}
    assert {"mine", "others"} < body(broker, "root", code, header)[name].keys()


def test_groups_of_a_topic(broker: BrokerUnderTest) -> None:
    broker.join("others", "c", "named", channel=client_of("root"))
    for user, groups in (("alice", []), ("root", ["others"])):
        header = QueryTopicConsumeByWhoHeader(topic="named")
        found = body(broker, user, Code.QUERY_TOPIC_CONSUME_BY_WHO, header)
        assert found["groupList"] == groups


def test_progress_of_a_group(broker: BrokerUnderTest) -> None:
    header = GetConsumeStatsHeader(consumer_group="mine")
    for user, topics in (("alice", {"mine-1"}), ("root", {"mine-1", "other-1"})):
        answer = asked(broker, user, Code.GET_CONSUME_STATS, header)
        assert {topic for topic in TOPICS if topic.encode() in answer.body} == topics


@pytest.mark.parametrize(
    ("topic", "code"), [(None, REFUSED), ("other-1", REFUSED), ("named", REFUSED)]
)
def test_progress_is_copied_in_topics_of_ones_own(
    broker: BrokerUnderTest, topic: str | None, code: int
) -> None:
    header = CloneGroupOffsetHeader(src_group="mine", dest_group="mine-too", topic=topic)
    answer = asked(broker, "alice", Code.CLONE_GROUP_OFFSET, header)
    assert answer.code == code
    assert broker.groups.get("mine-too") is None
    assert broker.offsets.topics_of("mine-too") == set()


async def test_timers(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    waiting = WaitingBroker(tmp_path, rights=rights_of(users_of(**USERS)))
    broker, timers = waiting.broker, waiting.broker.timers
    waiting.loads, waiting.runs = [timers.load], [timers.run]
    async with waiting.running():
        for number, topic in enumerate(("mine-1", "other-1", "other-1")):
            broker.topics.create_system_topic(topic)
            due = {"UNIQ_KEY": f"K{number}", "TIMER_DELAY_SEC": "60"}
            text = encode_properties(due).decode()
            sent = waiting.produce(b"x", client_of("root"), b=topic, e=0, i=text)
            assert sent.code == OK, sent.remark
        await waiting.until(lambda: timers.waiting.count == 3)
        header = ListTimersHeader(max_num=9)
        for user, count in (("alice", 1), ("nobody", 0), ("root", 3)):
            found = body(broker, user, Code.LIST_TIMERS, header)
            assert (len(found["messages"]), found["count"]) == (count, count)
        of_others = ListTimersHeader(max_num=9, topic="other-1")
        assert asked(broker, "alice", Code.LIST_TIMERS, of_others).code == REFUSED


async def test_transactions(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    ledger = Ledger(tmp_path, rights=rights_of(users_of(**USERS)))
    async with ledger.running():
        for number, topic in enumerate(("mine-1", "other-1")):
            ledger.broker.topics.create_system_topic(topic)
            half = {"UNIQ_KEY": f"A{number}", "TRAN_MSG": "true", "PGROUP": "p"}
            text = encode_properties(half).decode()
            sent = ledger.produce(b"x", client_of("root"), b=topic, e=0, f=4, i=text)
            assert sent.code == OK, sent.remark
        await ledger.check_later(1)
        header = ListTransactionsHeader(max_num=9)
        for user, count in (("alice", 1), ("nobody", 0), ("root", 2)):
            found = body(ledger.broker, user, Code.LIST_TRANSACTIONS, header)
            assert (len(found["messages"]), found["count"]) == (count, count)


def test_queues_in_the_tier(tmp_path: Path) -> None:
    tier = {"message_store_plug_in": "tieredstore", "tiered_store_file_path": tmp_path / "tier"}
    config = broker_config(tmp_path, tiered_backend_service_provider="posix", **tier)
    broker = BrokerUnderTest(tmp_path, config, rights=rights_of(users_of(**USERS)))
    for topic in ("mine-1", "other-1"):
        broker.create_topic(topic, 1)
        broker.store_message(topic, 0)
    header = TierStatusHeader(max_num=9)
    for user, count in (("alice", 1), ("nobody", 0), ("root", 2)):
        found = body(broker, user, Code.TIER_STATUS, header)
        assert (len(found["queues"]), found["queueCount"]) == (count, count)
