"""Groups of an empty leader that leaves its chain: they continue at the new leader."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace_protocol.admin_headers import CreateStaticTopicHeader
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.command import Command
from headrace_protocol.headers import UpdateConsumerOffsetHeader
from headrace_protocol.statictopic.mapping import TopicMapping, encode_detail
from tests.support.channel import MemoryChannel
from tests.support.noted_files import NotedFiles
from tests.support.rights import client_of, rights_of, users_of
from tests.support.static_brokers import GROUP, TOPIC, Brokers, item

# Clean-up has dropped what was before.
A, C = item("a", 1, 50, 0), item("c", 2, 50, 0)


@pytest.fixture
def brokers(tmp_path: Path) -> Brokers:
    """A queue that the strict mode moves from a, where it is empty, to c: only a is closed yet."""
    brokers = Brokers(tmp_path, "abc")
    brokers.map((A,))
    brokers["a"].offsets.commit(GROUP, TOPIC, 0, 0)
    brokers["a"].offsets.commit("elsewhere", TOPIC, 7, 0)
    brokers.map((A, item("c", 2, -1, 0)), only="a")
    return brokers


def open_c(brokers: Brokers, channel: MemoryChannel) -> None:
    mapping = TopicMapping(
        topic=TOPIC, bname="broker-c", epoch=brokers.epoch + 1000, total_queues=1, hosted={0: (C,)}
    )
    header = CreateStaticTopicHeader(
        topic=TOPIC,
        default_topic="TBW102",
        read_queue_nums=1,
        write_queue_nums=1,
        perm=6,
        topic_filter_type="SINGLE_TAG",
    )
    code = RequestCode.UPDATE_AND_CREATE_STATIC_TOPIC
    brokers["c"].send(code, header, encode_detail(mapping, {0: A}), channel)


def asked_open_c(brokers: Brokers) -> Command:
    channel = MemoryChannel()
    open_c(brokers, channel)
    ((answer, _),) = channel.replies()
    return answer


def groups_at_c(brokers: Brokers) -> dict[str, int]:
    offsets = brokers["c"].offsets
    found = {group: offsets.query(group, TOPIC, 0) for group in offsets.groups_of(TOPIC)}
    return {group: offset for group, offset in found.items() if offset is not None}


def test_a_new_leader_gets_the_groups_of_the_empty_one(brokers: Brokers) -> None:
    assert asked_open_c(brokers).code == ResponseCode.SUCCESS
    assert groups_at_c(brokers) == {GROUP: 0}


@pytest.mark.parametrize("may_create", [False, True])
def test_its_groups_come_into_being_for_those_who_may_create_them(
    brokers: Brokers, may_create: bool
) -> None:
    rules = [f"Topic:{TOPIC} Create", *([f"Group:{GROUP} Create"] if may_create else [])]
    brokers["c"].registry.guard(rights_of(users_of(alice=rules)).access.check)
    channel = client_of("alice")
    open_c(brokers, channel)
    ((answer, _),) = channel.replies()
    assert answer.code == ResponseCode.SUCCESS
    assert (brokers["c"].groups.get(GROUP) is not None) is may_create
    assert groups_at_c(brokers) == {GROUP: 0}


def test_a_new_leader_does_not_open_without_them(brokers: Brokers) -> None:
    brokers.away.add("a")
    answer = asked_open_c(brokers)
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert answer.remark is not None
    assert "broker-a" in answer.remark
    assert "topic repair" in answer.remark
    assert brokers["c"].mappings.leads(TOPIC, 0) is None
    brokers.away.clear()
    assert asked_open_c(brokers).code == ResponseCode.SUCCESS
    assert groups_at_c(brokers) == {GROUP: 0}


def test_they_are_on_disk_before_the_mapping_is(brokers: Brokers) -> None:
    saved: list[str] = []

    def note(path: Path, text: bytes) -> None:
        if path.name == "topicQueueMapping.json" or f'{GROUP}"'.encode() in text:
            saved.append(path.name)

    brokers["c"].close()
    brokers.start("c", NotedFiles(note))
    asked_open_c(brokers)
    before = saved[: saved.index("topicQueueMapping.json")]
    assert {"subscriptionGroup.json", "consumerOffset.json"} == {*before}


def test_what_an_earlier_attempt_left_does_not_count(brokers: Brokers) -> None:
    for group in (GROUP, "gone"):
        brokers["c"].offsets.commit(group, TOPIC, 0, 5)
    assert asked_open_c(brokers).code == ResponseCode.SUCCESS
    assert groups_at_c(brokers) == {GROUP: 0}
    brokers["c"].offsets.commit(GROUP, TOPIC, 0, 3)
    assert asked_open_c(brokers).code == ResponseCode.SUCCESS
    assert groups_at_c(brokers) == {GROUP: 3}


async def test_a_leader_whose_start_is_decided_stops_while_it_asks(brokers: Brokers) -> None:
    """As where a repair finishes a move in available mode."""
    brokers.map((A, item("c", 2, -1, 0)), only="c")
    brokers["c"].join("late", "client", TOPIC)
    opening, commit = MemoryChannel(), MemoryChannel()
    with brokers.holding() as held:
        open_c(brokers, opening)
        header = UpdateConsumerOffsetHeader(
            consumer_group="late", topic=TOPIC, queue_id=0, commit_offset=50
        )
        brokers["c"].send(RequestCode.UPDATE_CONSUMER_OFFSET, header, channel=commit)
    assert not opening.written
    assert not commit.written
    brokers.release(held)
    brokers["c"].traffic.forwarding.retry()
    assert [answer.code for answer, _ in opening.replies()] == [ResponseCode.SUCCESS]
    assert [answer.code for answer, _ in commit.replies()] == [ResponseCode.SUCCESS]
    assert groups_at_c(brokers) == {GROUP: 0, "late": 0}


def test_a_leader_that_gets_no_answer_continues_undecided(brokers: Brokers) -> None:
    brokers.map((A, item("c", 2, -1, 0)), only="c")
    brokers.away.add("a")
    assert asked_open_c(brokers).code == ResponseCode.SYSTEM_ERROR
    assert brokers["c"].mappings.leads(TOPIC, 0) == 0
    assert brokers.send("c", b"x") == (0, -1)
