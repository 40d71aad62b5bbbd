"""The queue directory: each of its rules, and the answers of requests that follow them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace_broker.queue_directory import (
    Elsewhere,
    FindPlace,
    FindSource,
    Here,
    Lookup,
    Place,
    QueueDirectory,
    Use,
)
from headrace_broker.store.log.commit_log import CommitLog
from headrace_broker.store.store_queue import StoreQueue
from headrace_broker.store.store_source import EmptySource, GetResult, StoreSource
from headrace_protocol.admin_headers import (
    DeleteTopicHeader,
    GetConsumeStatsHeader,
    GetTopicStatsHeader,
    QueryConsumeQueueHeader,
    QueryConsumeTimeSpanHeader,
    ResetOffsetHeader,
)
from headrace_protocol.bodies import TopicConfig
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.headers import (
    BulkPullHeader,
    BulkSendHeader,
    GetEarliestMsgStoretimeHeader,
    GetMaxOffsetHeader,
    GetMinOffsetHeader,
    OffsetResponseHeader,
    PullMessageHeader,
    PullMessageResponseHeader,
    QueryConsumerOffsetHeader,
    SearchOffsetHeader,
    SendMessageHeader,
    SendMessageHeaderV2,
    SendMessageResponseHeader,
    StageSendHeader,
    UpdateConsumerOffsetHeader,
)
from headrace_protocol.message import decode_records
from tests.support.batches import block
from tests.support.broker import Answer, BrokerUnderTest
from tests.support.features import add_parts
from tests.support.stores import put

LOOKS = (Use.BEGIN, Use.INSPECT, Use.LIST)
AWAY = Elsewhere("broker-b", "10.0.0.2:10911")
REFUSAL = RequestError(ResponseCode.SYSTEM_BUSY, "a place says no")


def directory(
    broker: BrokerUnderTest, *places: FindPlace, sources: Sequence[FindSource] = ()
) -> QueueDirectory:
    made = QueueDirectory("broker-a", broker.store, broker.topics)
    made.ask(places, sources)
    return made


def assert_refused(place: Place, code: ResponseCode, remark: str) -> None:
    assert isinstance(place, RequestError)
    assert (place.code, remark in place.remark) == (code, True), place.remark


def place_of(name: str, place: Place) -> FindPlace:
    """Answers for the topics of a name."""
    return lambda _directory, lookup: place if lookup.topic.topic_name == name else None


# -- the rules -------------------------------------------------------------------------------------


@pytest.mark.parametrize("use", Use)
def test_a_topic_that_is_not_there(broker: BrokerUnderTest, use: Use) -> None:
    lookups: list[Lookup] = []
    places = directory(broker, lambda _, each: lookups.append(each))
    place = places.resolve("x", 0, use)
    assert_refused(place, ResponseCode.TOPIC_NOT_EXIST, "headrace topic create x")
    assert not lookups


@pytest.mark.parametrize(
    ("perm", "forbidden", "remark"),
    [
        (4, {Use.SEND}, "sending message is forbidden"),
        (2, {Use.PULL, Use.READ}, "pulling message is forbidden"),
    ],
)
def test_what_the_topic_does_not_permit(
    broker: BrokerUnderTest, perm: int, forbidden: set[Use], remark: str
) -> None:
    broker.create_topic("t", perm=perm)
    places = directory(broker, place_of("t", AWAY))
    for use in Use:
        place = places.resolve("t", 0, use)
        if use in forbidden:
            assert_refused(place, ResponseCode.NO_PERMISSION, remark)
        else:
            assert place == AWAY


@pytest.mark.parametrize(
    ("perm", "forbidden", "remark"),
    [(4, {Use.SEND}, "no write bit"), (2, {Use.PULL, Use.READ}, "no read bit")],
)
def test_what_the_broker_does_not_permit(
    broker: BrokerUnderTest, perm: int, forbidden: set[Use], remark: str
) -> None:
    broker.create_topic("t")
    broker.config.broker_permission = perm
    for use in Use:
        place = directory(broker).resolve("t", 0, use)
        if use in forbidden:
            assert_refused(place, ResponseCode.NO_PERMISSION, remark)
        else:
            assert isinstance(place, Here)


@pytest.mark.parametrize(
    ("use", "queues"),
    [(Use.SEND, 3), (Use.PULL, 2), (Use.READ, 2), (Use.BEGIN, 3), (Use.INSPECT, 3), (Use.LIST, 3)],
)
def test_queues_that_a_topic_does_not_have(broker: BrokerUnderTest, use: Use, queues: int) -> None:
    broker.topics.put(TopicConfig(topic_name="t", read_queue_nums=2, write_queue_nums=3))
    places = directory(broker)
    for queue_id in range(queues):
        assert isinstance(places.resolve("t", queue_id, use), Here)
    assert_refused(
        places.resolve("t", queues, use),
        ResponseCode.INVALID_PARAMETER,
        f"queue {queues} of topic t on broker broker-a: there are {queues}",
    )
    if use is not Use.SEND:
        assert_refused(places.resolve("t", -1, use), ResponseCode.INVALID_PARAMETER, "queue -1")


def test_a_message_for_any_queue_gets_one_that_is_written(broker: BrokerUnderTest) -> None:
    broker.topics.put(TopicConfig(topic_name="t", read_queue_nums=9, write_queue_nums=2))
    places = directory(broker)
    queues = [places.serve("t", -1, Use.SEND).queue for _ in range(64)]
    assert {queue.queue_id for queue in queues if queue} == {0, 1}
    broker.topics.put(TopicConfig(topic_name="t", read_queue_nums=9, write_queue_nums=0))
    refused = places.resolve("t", -1, Use.SEND)
    assert_refused(refused, ResponseCode.NO_PERMISSION, "has no queue to write to")


@pytest.mark.parametrize("use", LOOKS)
def test_looking_makes_no_queue(broker: BrokerUnderTest, use: Use) -> None:
    broker.create_topic("t")
    place = directory(broker).serve("t", 1, use)
    assert place.queue is None
    assert isinstance(place.source, EmptySource)
    assert broker.store.find_queue("t", 1) is None
    made = directory(broker).serve("t", 1, Use.PULL)
    assert made.queue is broker.store.find_queue("t", 1)
    assert isinstance(made.source, StoreSource)
    assert directory(broker).serve("t", 1, use).queue is made.queue


def test_a_queue_that_was_taken_away_is_only_looked_at(broker: BrokerUnderTest) -> None:
    broker.create_topic("t", 2)
    broker.store_message("t", 1)
    broker.create_topic("t", 1)
    places = directory(broker)
    for use in LOOKS:
        assert places.serve("t", 1, use).source.max_offset() == 1
    for use in (Use.SEND, Use.PULL):
        assert_refused(places.resolve("t", 1, use), ResponseCode.INVALID_PARAMETER, "there are 1")


def test_the_first_place_that_answers_decides(broker: BrokerUnderTest) -> None:
    for name in ("a", "b", "c"):
        broker.create_topic(name)
    places = directory(broker, place_of("a", AWAY), place_of("a", REFUSAL), place_of("b", REFUSAL))
    assert places.resolve("a", 7, Use.PULL) == AWAY  # which queues there are is for it to say
    assert places.resolve("b", 0, Use.PULL) is REFUSAL
    assert isinstance(places.resolve("c", 0, Use.PULL), Here)


def test_how_a_place_that_is_not_here_is_told(broker: BrokerUnderTest) -> None:
    for name in ("away", "refused", "here"):
        broker.create_topic(name)
    places = directory(broker, place_of("away", AWAY), place_of("refused", REFUSAL))
    for ask in (places.serve, places.find):
        with pytest.raises(RequestError, match=r"served by broker broker-b at 10\.0\.0\.2:10911"):
            ask("away", 3, Use.INSPECT)
    assert places.source_to_list("away", 3) is None
    assert places.find("refused", 0, Use.INSPECT) is None
    for refuse in (
        lambda: places.serve("refused", 0, Use.INSPECT),
        lambda: places.source_to_list("refused", 0),
    ):
        with pytest.raises(RequestError, match="a place says no"):
            refuse()
    assert isinstance(places.find("here", 0, Use.INSPECT), Here)
    assert isinstance(places.source_to_list("here", 0), EmptySource)


def test_the_first_source_that_answers_reads(broker: BrokerUnderTest) -> None:
    broker.create_topic("t")
    broker.store_message("t", 0)
    first, second = EmptySource(), EmptySource()
    lookups: list[tuple[Lookup, StoreQueue]] = []

    def pulls_only(what: Lookup, queue: StoreQueue) -> EmptySource | None:
        lookups.append((what, queue))
        return first if what.use is Use.PULL else None

    finds: list[FindSource] = [pulls_only, lambda what, _: second if what.queue_id else None]
    places = directory(broker, sources=finds)
    assert places.serve("t", 0, Use.PULL).source is first
    assert places.serve("t", 1, Use.SEND).source is second
    assert isinstance(places.serve("t", 0, Use.INSPECT).source, StoreSource)
    assert [queue.queue_id for _, queue in lookups] == [0, 1, 0]
    assert lookups[0][0].topic is broker.topics.get("t")


@pytest.mark.parametrize("use", LOOKS)
def test_what_was_looked_at_is_kept_until_the_tables_change(
    broker: BrokerUnderTest, use: Use
) -> None:
    lookups: list[int] = []
    places = directory(broker, lambda _, each: lookups.append(each.queue_id))
    broker.create_topic("t", 4)
    for queue_id in range(4):
        broker.store_message("t", queue_id)
    look = partial(places.serve, "t", 0, use)
    before = look()
    assert look() is before
    assert lookups == [0]
    broker.create_topic("another")
    assert look() is not before
    assert lookups == [0, 0]
    places.cached_max = 3
    for queue_id in range(4):
        places.serve("t", queue_id, use)
    look()
    assert lookups == [0, 0, 1, 2, 3, 0]  # all were forgotten at three


def test_a_queue_of_a_topic_that_was_made_again_is_another(broker: BrokerUnderTest) -> None:
    places = directory(broker)
    broker.create_topic("t", 1)
    broker.store_message("t", 0)
    assert places.serve("t", 0, Use.INSPECT).source.max_offset() == 1
    deleted = broker.ask(RequestCode.DELETE_TOPIC_IN_BROKER, DeleteTopicHeader(topic="t"))
    assert deleted.code == ResponseCode.SUCCESS
    assert_refused(places.resolve("t", 0, Use.INSPECT), ResponseCode.TOPIC_NOT_EXIST, "topic[t]")
    broker.create_topic("t", 1)
    assert places.serve("t", 0, Use.INSPECT).source.max_offset() == 0


# -- requests --------------------------------------------------------------------------------------


@pytest.fixture
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BrokerUnderTest:
    """A broker whose topic "t" another one serves; this one still has a message of it."""
    add_parts(monkeypatch, places=(place_of("t", AWAY),))
    broker = BrokerUnderTest(tmp_path)
    broker.create_topic("t")
    broker.store_message("t", 0)
    broker.join("g", "c", "t")
    return broker


QUEUE: dict[str, Any] = {"topic": "t", "queue_id": 0}
SEND = {
    **QUEUE,
    "producer_group": "p",
    "default_topic": "TBW102",
    "default_topic_queue_nums": 4,
    "sys_flag": 0,
    "born_timestamp": 0,
    "flag": 0,
}
PULL = {
    **QUEUE,
    "consumer_group": "g",
    "queue_offset": 0,
    "max_msg_nums": 32,
    "sys_flag": 4,
    "commit_offset": 0,
    "suspend_timeout_millis": 0,
}
BLOCK = {
    **{name: SEND[name] for name in SEND if name not in {"sys_flag", "born_timestamp", "flag"}},
    "count": 1,
}
RECORDS = bytes(block(b"body", topic="t").body)


def pull_header(**changes: Any) -> PullMessageHeader:
    return PullMessageHeader(**{**PULL, "sub_version": 0, "subscription": "*", **changes})


@pytest.mark.parametrize(
    ("code", "header", "body"),
    [
        (RequestCode.SEND_MESSAGE, SendMessageHeader(**SEND, properties=""), b"new"),
        (RequestCode.SEND_MESSAGE_V2, SendMessageHeaderV2(**SEND, properties=""), b"new"),
        (RequestCode.SEND_BATCH_MESSAGE, SendMessageHeaderV2(**SEND, batch=True), b"new"),
        (RequestCode.BULK_SEND, BulkSendHeader(**BLOCK), RECORDS),
        (
            RequestCode.STAGE_SEND,
            StageSendHeader(**BLOCK, query_id="q", batch_id=0, attempt="a", block_number=0),
            RECORDS,
        ),
        (RequestCode.PULL_MESSAGE, pull_header(), b""),
        (RequestCode.PULL_MESSAGE, pull_header(queue_offset=1, sys_flag=2 + 4), b""),
        (RequestCode.BULK_PULL, BulkPullHeader(**PULL, max_msg_bytes=9999), b""),
        (RequestCode.GET_MAX_OFFSET, GetMaxOffsetHeader(**QUEUE), b""),
        (RequestCode.GET_MIN_OFFSET, GetMinOffsetHeader(**QUEUE), b""),
        (RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, SearchOffsetHeader(**QUEUE, timestamp=0), b""),
        (RequestCode.GET_EARLIEST_MSG_STORETIME, GetEarliestMsgStoretimeHeader(**QUEUE), b""),
        (
            RequestCode.QUERY_CONSUMER_OFFSET,
            QueryConsumerOffsetHeader(**QUEUE, consumer_group="g"),
            b"",
        ),
        (
            RequestCode.UPDATE_CONSUMER_OFFSET,
            UpdateConsumerOffsetHeader(**QUEUE, consumer_group="g", commit_offset=1),
            b"",
        ),
        (
            RequestCode.QUERY_CONSUME_QUEUE,
            QueryConsumeQueueHeader(**QUEUE, index=0, count=1),
            b"",
        ),
        (
            RequestCode.INVOKE_BROKER_TO_RESET_OFFSET,
            ResetOffsetHeader(**QUEUE, group="g", timestamp=-1, is_force=True),
            b"",
        ),
    ],
)
def test_requests_for_a_queue_of_another_broker_change_nothing(
    away: BrokerUnderTest, code: int, header: msgspec.Struct, body: bytes
) -> None:
    log_end = away.store.commit_log.max_offset
    answer = away.ask(code, header, body)
    assert answer.code == ResponseCode.NOT_LEADER_FOR_QUEUE, answer.remark
    assert "queue 0 of topic t is served by broker broker-b at 10.0.0.2:10911" in answer.remark
    assert away.store.commit_log.max_offset == log_end
    assert away.offsets.query("g", "t", 0) is None
    assert not away.long_polling.held_count


@pytest.mark.parametrize(
    ("code", "header", "table"),
    [
        (RequestCode.GET_TOPIC_STATS_INFO, GetTopicStatsHeader(topic="t"), "offsetTable"),
        (RequestCode.GET_CONSUME_STATS, GetConsumeStatsHeader(consumer_group="g"), "offsetTable"),
        (
            RequestCode.QUERY_CONSUME_TIME_SPAN,
            QueryConsumeTimeSpanHeader(topic="t", group="g"),
            "consumeTimeSpanSet",
        ),
    ],
)
def test_statistics_leave_out_queues_of_another_broker(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    header: msgspec.Struct,
    table: str,
) -> None:
    def second_queue(_directory: QueueDirectory, lookup: Lookup) -> Place | None:
        return AWAY if lookup.queue_id == 1 else None

    add_parts(monkeypatch, places=(second_queue,))
    broker = BrokerUnderTest(tmp_path)
    broker.create_topic("t", 3)
    broker.join("g", "c", "t")
    broker.offsets.commit("g", "t", 0, 1)
    answer = broker.ask(code, header)
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    assert sorted(queue_ids(answer.body)) == [0, 2]
    assert table.encode() in answer.body


def queue_ids(body: bytes) -> list[int]:
    """Ids of the queues that a body names; keys of its maps are objects themselves."""
    return [int(part.split(b"}")[0].split(b",")[0]) for part in body.split(b'"queueId":')[1:]]


def test_a_source_changes_with_the_tables_not_with_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []

    def empty_if_multi(lookup: Lookup, _queue: StoreQueue) -> EmptySource | None:
        found.append(lookup.topic.topic_filter_type)
        return EmptySource() if lookup.topic.topic_filter_type == "MULTI_TAG" else None

    add_parts(monkeypatch, sources=(empty_if_multi,))
    broker = BrokerUnderTest(tmp_path)
    broker.create_topic("t", 1)
    broker.store_message("t", 0)
    broker.join("g", "c", "t")
    for _ in range(3):
        assert pulled(broker).code == ResponseCode.SUCCESS
    assert found == ["SINGLE_TAG"]
    broker.create_topic("t", 1, topic_filter_type="MULTI_TAG")
    for _ in range(3):
        assert pulled(broker).code == ResponseCode.PULL_NOT_FOUND
    assert found == ["SINGLE_TAG", "MULTI_TAG"]


def pulled(broker: BrokerUnderTest, **changes: Any) -> Answer:
    return broker.ask(RequestCode.PULL_MESSAGE, pull_header(**changes))


def test_a_place_that_moves_without_a_topic_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[str] = []

    def place(_directory: QueueDirectory, lookup: Lookup) -> Place | None:
        return AWAY if lookup.topic.topic_name in moved else None

    add_parts(monkeypatch, places=(place,))
    broker = BrokerUnderTest(tmp_path)
    broker.create_topic("t", 1)
    sends = SendMessageHeaderV2(**SEND, properties="")
    for code in (ResponseCode.SUCCESS, ResponseCode.NOT_LEADER_FOR_QUEUE):
        assert broker.ask(RequestCode.SEND_MESSAGE_V2, sends, b"body").code == code
        assert pulled(broker).code == code
        moved.append("t")
        broker.topics.lookups_changed()


class ShiftedSource(StoreSource):
    """A queue whose clients see other offsets than the store."""

    def __init__(self, queue: StoreQueue, commit_log: CommitLog, delta: int) -> None:
        super().__init__(queue, commit_log)
        self._delta = delta

    def get(self, queue_offset: int, *limits: Any) -> GetResult:
        result = super().get(queue_offset - self._delta, *limits)
        return result._replace(
            next_offset=result.next_offset + self._delta,
            min_offset=result.min_offset + self._delta,
            max_offset=result.max_offset + self._delta,
        )

    def max_offset(self) -> int:
        return super().max_offset() + self._delta


def test_a_place_can_map_a_queue_and_its_offsets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def second_of_both(places: QueueDirectory, lookup: Lookup) -> Place | None:
        here = places.local(lookup._replace(queue_id=1))
        if here.queue is None:
            return None
        return here._replace(source=ShiftedSource(here.queue, broker.store.commit_log, 100))

    add_parts(monkeypatch, places=(second_of_both,))
    broker = BrokerUnderTest(tmp_path)
    broker.create_topic("t", 2)
    put(broker.store, broker.store.queue("t", 1), b"moved")
    sent = broker.ask(
        RequestCode.SEND_MESSAGE_V2, SendMessageHeaderV2(**SEND, properties=""), b"sent"
    )
    assert sent.command.header(SendMessageResponseHeader).queue_offset == 1
    answer = pulled(broker, queue_offset=100)
    assert [record.body for record in decode_records(answer.body)] == [b"moved", b"sent"]
    header = answer.command.header(PullMessageResponseHeader)
    assert (header.min_offset, header.next_begin_offset, header.max_offset) == (100, 102, 102)
    end = broker.ask(RequestCode.GET_MAX_OFFSET, GetMaxOffsetHeader(**QUEUE))
    assert end.command.header(OffsetResponseHeader).offset == 102
