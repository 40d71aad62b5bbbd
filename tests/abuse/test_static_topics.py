"""Static topics: requests of strangers, and hostile brokers that keep an item."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from headrace_protocol.admin_headers import CreateStaticTopicHeader
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import GetMaxOffsetHeader, PullMessageResponseHeader
from headrace_protocol.statictopic.mapping import TopicMapping, encode_detail
from tests.support.broker import BrokerUnderTest, broker_config
from tests.support.channel import MemoryChannel
from tests.support.running import in_background
from tests.support.static_brokers import TOPIC, Brokers, item, response
from tests.support.wire import pull_header, send_header
from tests.support.wires import pull_fields, request, send_fields

A, B = item("a", 0, 0), item("b", 1, 3)


@pytest.fixture
def brokers(tmp_path: Path) -> Brokers:
    """A queue that moved from a to b, with three messages in the item of a."""
    brokers = Brokers(tmp_path)
    brokers.map((A,))
    for _ in range(3):
        brokers.send("a", b"body")
    brokers.map((A, B))
    return brokers


def first_answer(broker: BrokerUnderTest, frame: bytes) -> tuple[int, str]:
    channel = MemoryChannel()
    broker.take(frame, channel)
    command, _ = channel.replies()[0]
    return command.code, command.remark or ""


# -- strangers -------------------------------------------------------------------------------------


def mapping(topic: str = TOPIC, **fields: Any) -> TopicMapping:
    return TopicMapping(
        **{
            "topic": topic,
            "bname": "broker-a",
            "epoch": 1000,
            "total_queues": 1,
            "hosted": {0: (A,)},
            **fields,
        }
    )


def change(broker: BrokerUnderTest, mapping: TopicMapping, **fields: Any) -> tuple[int, str]:
    header = CreateStaticTopicHeader(
        **{
            "topic": mapping.topic,
            "default_topic": "TBW102",
            "read_queue_nums": 1,
            "write_queue_nums": 1,
            "perm": 6,
            "topic_filter_type": "SINGLE_TAG",
            **fields,
        }
    )
    code = RequestCode.UPDATE_AND_CREATE_STATIC_TOPIC
    answer = broker.ask(code, header, encode_detail(mapping))
    return answer.code, answer.remark


def test_without_admin_rights_nobody_changes_a_mapping(tmp_path: Path) -> None:
    config = broker_config(tmp_path).model_copy(update={"anonymous_access": "read"})
    broker = BrokerUnderTest(tmp_path, config)
    for fields in ({}, {"force": True}, {"read_epoch": 0}):
        code, remark = change(broker, mapping(), **fields)
        assert code == ResponseCode.NO_PERMISSION
        assert "User:anonymous has no permission to access Topic:T" in remark
    assert not broker.mappings.is_static(TOPIC)
    assert broker.topics.get(TOPIC) is None


@pytest.mark.parametrize(
    ("mark", "hops"), [({"lo": "false"}, 1), ({"forwarded": "true"}, 0), ({"lo": "true"}, 1)]
)
@pytest.mark.parametrize("code", [10, 310, 320])
async def test_no_mark_gets_a_message_into_a_closed_queue(
    brokers: Brokers, code: int, mark: dict[str, str], hops: int
) -> None:
    short = send_fields(b=TOPIC)
    long = {
        "producerGroup": "p", "topic": TOPIC, "defaultTopic": "TBW102", "defaultTopicQueueNums": 4,
        "queueId": 0, "sysFlag": 0, "bornTimestamp": 1, "flag": 0,
    }  # fmt: skip
    fields = {**(long if code == 10 else short), **mark}
    asked = len(brokers.asked)
    first_answer(brokers["a"], request(code, fields, b"late"))
    assert brokers["a"].store.queue(TOPIC, 0).next_offset == 3
    assert len(brokers.asked) - asked == hops


async def test_a_bulk_send_does_not_either(brokers: Brokers) -> None:
    fields = {
        "producerGroup": "p", "topic": TOPIC, "defaultTopic": "TBW102", "defaultTopicQueueNums": 4,
        "queueId": 0, "count": 1,
    }  # fmt: skip
    for mark in ({"lo": "false"}, {"forwarded": "true"}):
        first_answer(brokers["a"], request(RequestCode.BULK_SEND, {**fields, **mark}, b"late"))
    assert brokers["a"].store.queue(TOPIC, 0).next_offset == 3


def test_marks_mean_nothing_to_a_plain_topic(brokers: Brokers) -> None:
    broker = brokers["a"]
    asked = len(brokers.asked)
    for mark in ({"lo": "false"}, {"lo": "true"}, {"forwarded": "true"}, {"n": "broker-z"}):
        code, _ = first_answer(broker, request(310, send_fields(b="Plain", **mark), b"body"))
        assert code == ResponseCode.SUCCESS
        code, _ = first_answer(broker, request(11, pull_fields(topic="Plain", **mark)))
        assert code == ResponseCode.SUCCESS
    header = GetMaxOffsetHeader(topic="Plain", queue_id=0, logical=False)
    assert broker.ask(RequestCode.GET_MAX_OFFSET, header).code == ResponseCode.SUCCESS
    assert broker.store.queue("Plain", 0).next_offset == 4
    assert len(brokers.asked) == asked


@pytest.mark.parametrize("queue_id", [1, 2**31 - 1, -2, -(2**31)])
def test_queues_that_a_topic_does_not_have(brokers: Brokers, queue_id: int) -> None:
    for header, code in (
        (send_header(queue_id), RequestCode.SEND_MESSAGE_V2),
        (pull_header(0, queue_id), RequestCode.PULL_MESSAGE),
        (GetMaxOffsetHeader(topic=TOPIC, queue_id=queue_id), RequestCode.GET_MAX_OFFSET),
    ):
        answer = brokers["a"].ask(code, header, b"body")
        assert answer.code != ResponseCode.SUCCESS
        assert TOPIC in answer.remark
    assert brokers["a"].store.queue(TOPIC, 0).next_offset == 3


async def test_brokers_that_name_each_other_do_not_pass_requests_around(
    tmp_path: Path, autojump_clock: object
) -> None:
    brokers = Brokers(tmp_path)
    brokers.map((A,))
    brokers.map((A, B), only="a")
    brokers.map((B, item("a", 2, 9, 1)), only="b")
    forwarding = brokers["a"].traffic.forwarding
    channel = MemoryChannel()
    async with in_background(forwarding.run):
        brokers["a"].send(RequestCode.SEND_MESSAGE_V2, send_header(), b"x", channel)
        while not channel.written:  # noqa: ASYNC110 - the mock clock jumps
            await trio.sleep(0.01)
    ((command, _),) = channel.replies()
    assert command.code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert TOPIC in (command.remark or "")
    assert {name for name, _, _ in brokers.asked} == {"broker-b"}
    assert len(brokers.asked) < 60
    assert not channel.charged_bytes


def test_names_that_only_the_broker_may_give(brokers: Brokers) -> None:
    known = [*brokers["a"].topics.all()]
    for topic in ("SCHEDULE_TOPIC_XXXX", "TBW102", "../../x", "a b", "x" * 300, "", "\x1b[2J"):
        code, remark = change(brokers["a"], mapping(topic))
        assert code != ResponseCode.SUCCESS, topic
        assert "\x1b" not in remark
    assert [*brokers["a"].topics.all()] == known


# -- another broker --------------------------------------------------------------------------------


@contextmanager
def answering(brokers: Brokers, code: int, fields: Mapping[str, object]) -> Iterator[list[Any]]:
    """Other brokers give this answer to every request; yields what they are asked."""
    brokers.asked.clear()
    brokers.answer = lambda ask: response(ask, code, fields)
    yield brokers.asked
    brokers.answer = None


# Codes of answers with which a reader continues, and where it may.
CONTINUES = {
    ResponseCode.SUCCESS: (2, 3),
    ResponseCode.PULL_RETRY_IMMEDIATELY: (1, 2, 3),
    ResponseCode.PULL_OFFSET_MOVED: (1, 2, 3),
}
RANGE = {"minOffset": 0, "maxOffset": 3, "suggestWhichBrokerId": 0}


@pytest.mark.parametrize(
    ("code", "fields"),
    [
        (0, {}),
        (0, {"nextBeginOffset": "x", **RANGE}),
        (0, {"nextBeginOffset": 0, **RANGE}),
        (0, {"nextBeginOffset": -(2**63), **RANGE}),
        (0, {"nextBeginOffset": 2**63 - 1, **RANGE}),
        (0, {"nextBeginOffset": 10**30, **RANGE}),
        (20, {"nextBeginOffset": 0, **RANGE}),
        (20, {**RANGE, "nextBeginOffset": 1, "minOffset": "", "maxOffset": ""}),
        (19, {**RANGE, "nextBeginOffset": 1, "maxOffset": -1}),
        (19, {**RANGE, "nextBeginOffset": 1, "minOffset": 2**62, "maxOffset": 2**62}),
        (21, {"nextBeginOffset": 10**30, **RANGE}),
        (21, {**RANGE, "nextBeginOffset": 0, "minOffset": -5, "maxOffset": 0}),
        (17, {}),
        (2**31 - 1, {"nextBeginOffset": 2, **RANGE}),
        (-1, {"nextBeginOffset": 2, **RANGE}),
    ],
)
async def test_no_answer_of_another_broker_moves_a_reader_away(
    brokers: Brokers, code: int, fields: dict[str, object]
) -> None:
    """Neither back, nor behind the item's end."""
    channel = MemoryChannel()
    with answering(brokers, code, fields) as asked:
        brokers["b"].send(RequestCode.PULL_MESSAGE, pull_header(1), channel=channel)
        assert len(asked) < 5
    for command, _ in channel.replies():
        if command.code in CONTINUES:
            answer = command.header(PullMessageResponseHeader)
            assert answer.next_begin_offset in CONTINUES[ResponseCode(command.code)]
    brokers["b"].clock.ms += 1000  # so long it believes the range in an answer
    assert [body for _, body in brokers.read_all("b", 1)] == [b"body"] * 2


@pytest.mark.parametrize("value", ["--5", "²", "x", "-", "9" * 40])
def test_a_relayed_pull_with_a_size_that_is_no_number(brokers: Brokers, value: str) -> None:
    frame = request(11, pull_fields(topic=TOPIC, maxMsgBytes=value))
    channel = MemoryChannel()
    brokers["b"].take(frame, channel)
    assert len(channel.replies()) == 1
    assert not channel.charged_bytes


def test_offsets_of_another_broker_that_are_none(brokers: Brokers) -> None:
    for fields in ({}, {"offset": "x"}, {"offset": ""}):
        with answering(brokers, ResponseCode.SUCCESS, fields):
            header = GetMaxOffsetHeader(topic=TOPIC, queue_id=0)
            for code in (RequestCode.GET_MIN_OFFSET, RequestCode.GET_MAX_OFFSET):
                answer = brokers["b"].ask(code, header)
                assert answer.code in {ResponseCode.SUCCESS, ResponseCode.SYSTEM_ERROR}
    assert not brokers["b"].unexpected
