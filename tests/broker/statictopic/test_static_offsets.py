"""Offsets of logic queues: of the messages, and of groups, which go to the items that hold them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace_protocol.admin_headers import DeleteSubscriptionGroupHeader, DeleteTopicHeader
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.command import Command
from headrace_protocol.headers import (
    GetEarliestMsgStoretimeHeader,
    GetMaxOffsetHeader,
    GetMinOffsetHeader,
    OffsetResponseHeader,
    QueryConsumerOffsetHeader,
    SearchOffsetHeader,
    TimestampResponseHeader,
    UpdateConsumerOffsetHeader,
)
from headrace_protocol.statictopic.mapping import MappingItem
from tests.support.static_brokers import GROUP, TOPIC, Brokers, item

QUEUE: dict[str, Any] = {"topic": TOPIC, "queue_id": 0}
# Logic queue 1, so that logic and physical ids differ.
OTHER = (item("a", 0, 0, 0),)
A, B, A2 = item("a", 0, 0, 1), item("b", 1, 5, 0), item("a", 2, 10, 2)


@pytest.fixture
def brokers(tmp_path: Path) -> Brokers:
    """A queue that went from a to b and back, with 5 messages in each item, one a second."""
    brokers = Brokers(tmp_path)
    for number, chain in enumerate(((A,), (A, B), (A, B, A2))):
        brokers.map(chain, OTHER)
        for _ in range(5):
            brokers.send("ab"[number % 2], b"body")
            for broker in brokers.values():
                broker.clock.ms += 1000
    for broker in brokers.values():
        broker.join(GROUP, "c", TOPIC)
    return brokers


def offset(brokers: Brokers, code: RequestCode, header: msgspec.Struct, broker: str = "a") -> int:
    answer = brokers[broker].ask(code, header)
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return answer.command.header(OffsetResponseHeader).offset


def commit(brokers: Brokers, value: int, broker: str = "a", **fields: Any) -> int:
    header = UpdateConsumerOffsetHeader(
        **{**QUEUE, "consumer_group": GROUP, "commit_offset": value, **fields}
    )
    return brokers[broker].ask(RequestCode.UPDATE_CONSUMER_OFFSET, header).code


def committed(brokers: Brokers, broker: str = "a", **fields: Any) -> int | None:
    header = QueryConsumerOffsetHeader(**QUEUE, consumer_group=GROUP, **fields)
    answer = brokers[broker].ask(RequestCode.QUERY_CONSUMER_OFFSET, header)
    if answer.code == ResponseCode.QUERY_NOT_FOUND:
        return None
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return answer.command.header(OffsetResponseHeader).offset


def kept(brokers: Brokers) -> list[dict[int, int]]:
    """Rows of both brokers' tables: physical queue -> physical offset."""
    return [broker.offsets.offsets_of(GROUP, TOPIC) for broker in brokers.values()]


def test_the_range_is_that_of_the_chain(brokers: Brokers) -> None:
    assert offset(brokers, RequestCode.GET_MIN_OFFSET, GetMinOffsetHeader(**QUEUE)) == 0
    assert offset(brokers, RequestCode.GET_MAX_OFFSET, GetMaxOffsetHeader(**QUEUE)) == 15
    physical = GetMaxOffsetHeader(topic=TOPIC, queue_id=1, logical=False)
    assert offset(brokers, RequestCode.GET_MAX_OFFSET, physical) == 5


def test_the_end_while_the_leader_is_undecided(brokers: Brokers) -> None:
    undecided = item("b", 3, -1, 1)
    brokers.map((A, B, A2, undecided), OTHER, only="b")
    brokers.send("b", b"body")
    end = offset(brokers, RequestCode.GET_MAX_OFFSET, GetMaxOffsetHeader(**QUEUE), "b")
    assert end == 15


@pytest.mark.parametrize("first", [A, item("b", 0, 0, 1)])
def test_the_earliest_time_is_that_of_the_earliest_item(tmp_path: Path, first: MappingItem) -> None:
    brokers = Brokers(tmp_path)
    brokers.map((first,), OTHER)
    name = first.bname[-1]
    times = [earliest(brokers, name)]
    brokers.send(name, b"body")
    times.append(sent_ms := brokers[name].clock.ms)
    brokers.map((first, item("a", 1, 1, 2)), OTHER)
    brokers["a"].clock.ms += 5000
    brokers.send("a", b"body")
    assert times == [-1, sent_ms]
    assert earliest(brokers) == sent_ms


def earliest(brokers: Brokers, broker: str = "a") -> int:
    code, header = RequestCode.GET_EARLIEST_MSG_STORETIME, GetEarliestMsgStoretimeHeader(**QUEUE)
    return brokers[broker].ask(code, header).command.header(TimestampResponseHeader).timestamp


def test_an_offset_is_kept_at_the_item_that_holds_it(brokers: Brokers) -> None:
    assert committed(brokers, set_zero_if_not_found=False) is None
    for value, expected in (
        (3, [{1: 3}, {}]),
        (7, [{1: 5}, {0: 2}]),
        (12, [{1: 5, 2: 2}, {0: 5}]),
    ):
        assert commit(brokers, value) == ResponseCode.SUCCESS
        assert kept(brokers) == expected
        assert committed(brokers) == value


def test_going_back_wins(brokers: Brokers) -> None:
    for value in (12, 7, 12, 2):
        assert commit(brokers, value) == ResponseCode.SUCCESS
        assert committed(brokers) == value
    assert kept(brokers) == [{1: 2}, {}]


def test_a_group_that_has_committed_nothing_begins_with_a_young_queue(brokers: Brokers) -> None:
    assert committed(brokers) == 0


def test_an_old_item_that_is_away_is_not_guessed(brokers: Brokers) -> None:
    brokers.away.add("b")
    header = QueryConsumerOffsetHeader(**QUEUE, consumer_group=GROUP)
    answer = brokers["a"].ask(RequestCode.QUERY_CONSUMER_OFFSET, header)
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "broker-b" in answer.remark
    assert commit(brokers, 12) == ResponseCode.SUCCESS
    assert committed(brokers) == 12


def test_a_neighbour_that_was_away_is_changed_by_a_later_commit(brokers: Brokers) -> None:
    commit(brokers, 7)
    brokers.away.add("b")
    commit(brokers, 12)
    commit(brokers, 2)
    brokers.away.clear()
    commit(brokers, 3)
    assert committed(brokers) == 3
    assert kept(brokers) == [{1: 3}, {}]


def test_the_offset_in_a_pull_is_committed_like_any_other(brokers: Brokers) -> None:
    for value, expected in ((3, [{1: 3}, {}]), (12, [{1: 5, 2: 2}, {0: 5}])):
        brokers.pull("a", value, sys_flag=1 + 4, commit_offset=value)
        assert kept(brokers) == expected
        assert committed(brokers) == value


async def test_a_broker_that_lost_the_queue_asks_the_leader(brokers: Brokers) -> None:
    assert commit(brokers, 12, "b") == ResponseCode.SUCCESS
    assert committed(brokers, "b") == 12
    assert offset(brokers, RequestCode.GET_MAX_OFFSET, GetMaxOffsetHeader(**QUEUE), "b") == 15
    assert {fields.get("forwarded") for _, _, fields in brokers.asked[-1:]} == {"true"}


def test_bad_offsets(brokers: Brokers) -> None:
    assert commit(brokers, -1) == ResponseCode.INVALID_PARAMETER
    assert commit(brokers, 3, queue_id=2) == ResponseCode.INVALID_PARAMETER
    header = GetMaxOffsetHeader(topic=TOPIC, queue_id=2)
    answer = brokers["a"].ask(RequestCode.GET_MAX_OFFSET, header)
    assert (answer.code, "queues 0 to 1" in answer.remark) == (ResponseCode.INVALID_PARAMETER, True)


@pytest.mark.parametrize("value", [20, 5_000, 10_000, 2**62])
async def test_offsets_in_a_jump_and_beyond_the_end(brokers: Brokers, value: int) -> None:
    brokers.map((A, B, A2, item("b", 3, 10_000, 1)), OTHER)
    brokers.send("b", b"body")
    for broker in ("a", "b"):
        assert commit(brokers, value, broker) == ResponseCode.SUCCESS
        found = committed(brokers, "b")
        assert found is not None
        # A group that stands in a jump has read what is before it, and nothing behind it.
        assert 15 <= found <= max(value, 10_000)
        assert [body for _, body in brokers.read_all("b", min(found, 10_000))] == [b"body"]


def refused(brokers: Brokers, header: msgspec.Struct, code: RequestCode) -> Command:
    answer = brokers["a"].ask(code, header)
    assert answer.code == ResponseCode.SYSTEM_ERROR
    return answer.command


def test_what_the_leader_has_known_needs_nobody_else(brokers: Brokers) -> None:
    for value in (7, 3):  # b's item, and an older one of a
        commit(brokers, value)
        brokers.away.add("b")
        assert committed(brokers) == value
        brokers.away.clear()
    header = QueryConsumerOffsetHeader(**QUEUE, consumer_group="other")
    brokers.away.add("b")
    command = refused(brokers, header, RequestCode.QUERY_CONSUMER_OFFSET)
    assert str(command.remark).startswith("the offsets from 5 to 10 are on broker broker-b: ")
    assert command.ext()["nextItemOffset"] == "10"


@pytest.mark.parametrize("deleted", ["group", "topic"])
def test_what_the_leader_knows_ends_with_its_group_and_topic(
    brokers: Brokers, deleted: str
) -> None:
    for value in (7, 12, 3):
        commit(brokers, value)
    offsets = brokers["a"].offsets
    assert offsets.logic_known
    assert offsets.logic_gens
    if deleted == "group":
        header = DeleteSubscriptionGroupHeader(group_name=GROUP, clean_offset=True)
        brokers["a"].ask(RequestCode.DELETE_SUBSCRIPTIONGROUP, header)
        brokers["b"].offsets.commit(GROUP, TOPIC, 0, 1)
        assert committed(brokers) == 6
        brokers["b"].ask(RequestCode.DELETE_SUBSCRIPTIONGROUP, header)
        brokers["a"].ask(RequestCode.DELETE_SUBSCRIPTIONGROUP, header)
    else:
        brokers["a"].ask(RequestCode.DELETE_TOPIC_IN_BROKER, DeleteTopicHeader(topic=TOPIC))
    assert offsets.logic_known == offsets.logic_gens == {}


def test_an_answer_of_another_broker_is_remembered(brokers: Brokers) -> None:
    brokers["b"].offsets.commit(GROUP, TOPIC, 0, 2)
    assert committed(brokers) == 7
    brokers.away.add("b")
    assert committed(brokers) == 7
    brokers.away.clear()
    brokers.map((A, B, A2, item("b", 3, 15, 1)), OTHER)
    brokers.send("b", b"body")
    brokers.map((A, B, A2, item("b", 3, 15, 1), item("a", 4, 16, 3)), OTHER)
    brokers.away.add("b")
    header = QueryConsumerOffsetHeader(**QUEUE, consumer_group=GROUP)
    refused(brokers, header, RequestCode.QUERY_CONSUMER_OFFSET)


def test_the_beginning_of_an_item_that_is_away_is_its_first_offset(tmp_path: Path) -> None:
    brokers = Brokers(tmp_path)
    brokers.map((B,), OTHER)
    brokers.send("b", b"body")
    brokers.map((B, item("a", 2, 6, 2)), OTHER)
    brokers.away.add("b")
    assert offset(brokers, RequestCode.GET_MIN_OFFSET, GetMinOffsetHeader(**QUEUE)) == 5
    search = SearchOffsetHeader(**QUEUE, timestamp=0)
    command = refused(brokers, search, RequestCode.SEARCH_OFFSET_BY_TIMESTAMP)
    assert str(command.remark).startswith("the offsets from 5 to 6 are on broker broker-b: ")


def test_a_group_at_the_end_of_the_old_leader_is_known_to_the_new_one(tmp_path: Path) -> None:
    brokers = Brokers(tmp_path)
    brokers.map((item("b", 0, 0, 0),), OTHER)
    for _ in range(5):
        brokers.send("b", b"body")
    brokers["b"].offsets.commit(GROUP, TOPIC, 0, 5)
    brokers["b"].offsets.commit("behind", TOPIC, 0, 4)
    brokers.map((item("b", 0, 0, 0), item("a", 1, 5, 1)), OTHER)
    assert brokers["a"].offsets.offsets_of(GROUP, TOPIC) == {1: 0}
    assert brokers["a"].offsets.offsets_of("behind", TOPIC) == {}
    brokers.away.add("b")
    assert committed(brokers) == 5
