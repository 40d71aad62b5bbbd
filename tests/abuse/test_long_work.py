"""Requests whose work grows with a table or a body: rejected at a bound, else done in slices.

No time is measured: a test counts the steps between which others have their turn, and what one
step does at most.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog.testing
import trio
import trio.testing

from headrace_broker.consumer.offsets import ConsumerOffsets
from headrace_broker.consumer.unconsumed import UnconsumedOffsets
from headrace_broker.store.files.config_file import ConfigFile
from headrace_broker.store.retention.disk_forecast import DiskForecast
from headrace_daemon.serving.server import ServerLimits
from headrace_protocol import bounds, fastjson
from headrace_protocol.admin_headers import (
    CloneGroupOffsetHeader,
    CreateTopicHeader,
    DeleteSubscriptionGroupHeader,
    DeleteTopicHeader,
    GetAllTopicConfigHeader,
    GetProducerConnectionListHeader,
    GetTopicStatsHeader,
    QueryConsumeQueueHeader,
    QueryConsumeTimeSpanHeader,
    QueryTopicConsumeByWhoHeader,
    ResetOffsetHeader,
)
from headrace_protocol.bodies import (
    ConsumerConnection,
    ConsumerData,
    CreateTopicListRequestBody,
    HeartbeatData,
    ProducerConnection,
    ProducerData,
    QueryConsumeQueueResponseBody,
    QueryConsumeTimeSpanBody,
    ResetOffsetBody,
    SubscriptionData,
    SubscriptionGroupConfig,
    TopicConfig,
)
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import ConsumerGroupHeader, StageAbortHeader, StageDecideHeader
from tests.daemon.test_server import serving
from tests.support.broker import Answer, BrokerUnderTest
from tests.support.channel import MemoryChannel
from tests.support.echo import frame

QUEUES = 2000


@pytest.fixture
def logs() -> Iterator[list[Any]]:
    """The lines of the log."""
    with structlog.testing.capture_logs() as lines:
        yield lines


def steps(
    broker: BrokerUnderTest, code: RequestCode, header: msgspec.Struct | None, body: bytes = b""
) -> tuple[int, Answer]:
    """Turns that others get until a request is answered, and the answer."""
    works: list[Iterator[None]] = []
    broker.registry.run_long = works.append
    broker.registry.slice_s = 0.0
    channel = MemoryChannel()
    broker.send(code, header, body, channel)
    assert not channel.written
    count = 1 + sum(1 for _ in works[0])
    ((command, answer),) = channel.replies()
    return count, Answer(command, answer)


def topic_header(read_queue_nums: int, **changes: Any) -> CreateTopicHeader:
    fields = {
        "topic": "t",
        "read_queue_nums": read_queue_nums,
        "write_queue_nums": read_queue_nums,
        "perm": 6,
        "topic_filter_type": "SINGLE_TAG",
    }
    return CreateTopicHeader(**{**fields, **changes})


# -- topics ----------------------------------------------------------------------------------------


def test_shrinking_a_wide_topic_of_many_groups_is_sliced(broker: BrokerUnderTest) -> None:
    broker.create_topic("t", QUEUES)
    broker.store_message("t", QUEUES - 1)
    for number in range(1000):
        broker.offsets.commit(f"g{number:03}", "t", QUEUES - 1, 1)
    count, answer = steps(broker, RequestCode.UPDATE_AND_CREATE_TOPIC, topic_header(1))
    assert answer.code == ResponseCode.SUCCESS
    assert answer.remark == ""
    assert count >= QUEUES / 256 + 1000 / 256


def test_groups_are_looked_at_only_for_queues_with_messages(
    broker: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.create_topic("t", QUEUES)
    broker.store_message("t", QUEUES - 1)
    for number in range(10):
        broker.offsets.commit(f"g{number}", "t", 0, 1)
    asked: list[int] = []
    query = broker.offsets.query

    def counting(group: str, topic: str, queue_id: int) -> int | None:
        asked.append(queue_id)
        return query(group, topic, queue_id)

    monkeypatch.setattr(broker.offsets, "query", counting)
    broker.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, topic_header(1))
    assert asked == [QUEUES - 1]


def test_a_warning_names_ranges_of_queues_and_some_groups(broker: BrokerUnderTest) -> None:
    broker.create_topic("t", 40)
    for queue_id in (3, *range(5, 30)):
        broker.store_message("t", queue_id)
        broker.offsets.commit(f"g{queue_id:02}", "t", queue_id, 0)
        for earlier in range(3, queue_id):
            broker.offsets.commit(f"g{earlier:02}", "t", queue_id, 1)
    answer = broker.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, topic_header(1))
    assert answer.remark.startswith(
        "queues 3, 5 to 29 of topic t hold messages that "
        "g03, g05, g06, g07, g08, g09, g10, g11, g12, g13 and 16 more has not consumed"
    )


def test_a_list_of_topics_is_sliced_and_logged_in_short(
    broker: BrokerUnderTest, logs: list[Any]
) -> None:
    topics = [TopicConfig(topic_name=f"t{number}") for number in range(500)]
    body = CreateTopicListRequestBody(topic_config_list=topics).encode()
    count, answer = steps(broker, RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, None, body)
    assert answer.code == ResponseCode.SUCCESS
    assert count >= 500
    assert broker.topics.get("t499") == topics[499]
    assert Counter(line["event"] for line in logs) == {
        "topic created or changed": 10,
        "more topics created or changed": 1,
    }


def test_a_list_of_too_many_topics_is_rejected(broker: BrokerUnderTest) -> None:
    body = b'{"topicConfigList":[%s]}' % b",".join([b"{}"] * (bounds.ITEMS_MAX + 1))
    answer = broker.ask(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, body=body)
    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert "10001 topics: the maximum is 10000" in answer.remark


@pytest.mark.parametrize(
    ("code", "header", "body"),
    [
        (
            RequestCode.UPDATE_AND_CREATE_TOPIC_LIST,
            None,
            b'{"topicConfigList":[%s]}' % b",".join([b"{}"] * 30_000),
        ),
        (
            RequestCode.STAGE_ABORT,
            StageAbortHeader(query_id="q", batch_id=0),
            b"[%s]" % b",".join([b'"a"'] * 10_002),
        ),
        (
            RequestCode.STAGE_DECIDE,
            StageDecideHeader(query_id="q"),
            b'{"decisionId":"d","batchId":1,"attempts":{"b":[%s]}}'
            % b",".join([b'{"attempt":"a","fileBytes":1,"recordCount":1}'] * 10_001),
        ),
    ],
)
def test_a_large_list_is_rejected_before_it_is_decoded(
    broker: BrokerUnderTest,
    code: RequestCode,
    header: msgspec.Struct | None,
    body: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("_decode_names", "Decision.decode")
    for name in ("msgspec.json.decode", *(f"headrace_protocol.staging.{name}" for name in names)):
        monkeypatch.setattr(name, lambda *_args, **_more: pytest.fail("decoded"))
    answer = broker.ask(code, header, body)
    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert "the maximum is 10000; send them in parts" in answer.remark


# -- settings --------------------------------------------------------------------------------------


def test_a_change_of_too_many_settings_is_rejected(broker: BrokerUnderTest) -> None:
    body = b"".join(b"k%d=1\n" % number for number in range(1001))
    answer = broker.ask(RequestCode.UPDATE_BROKER_CONFIG, body=body)
    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert "1001 lines: the maximum is 1000" in answer.remark


# -- answers ---------------------------------------------------------------------------------------


def test_resetting_many_queues_is_sliced(broker: BrokerUnderTest, logs: list[Any]) -> None:
    broker.create_topic("t", QUEUES)
    broker.groups.put(SubscriptionGroupConfig(group_name="g"))
    header = ResetOffsetHeader(topic="t", group="g", timestamp=-1, is_force=True)
    count, answer = steps(broker, RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, header)
    assert count >= QUEUES + QUEUES // 256 + QUEUES // 128
    assert len(ResetOffsetBody.decode(answer.body).offset_table) == QUEUES
    assert logs[0]["queues"] == QUEUES
    assert len(logs[0]["offsets"]) == 16


def test_time_spans_of_many_queues_are_written_in_slices(broker: BrokerUnderTest) -> None:
    broker.create_topic("t", QUEUES)
    header = QueryConsumeTimeSpanHeader(topic="t", group="g")
    count, answer = steps(broker, RequestCode.QUERY_CONSUME_TIME_SPAN, header)
    assert count >= QUEUES + QUEUES // 128
    spans = QueryConsumeTimeSpanBody.decode(answer.body).consume_time_span_set
    assert [span.message_queue.queue_id for span in spans] == list(range(QUEUES))


def test_units_are_written_in_slices(broker: BrokerUnderTest) -> None:
    broker.create_topic("t")
    for _ in range(300):
        broker.store_message("t", 0)
    header = QueryConsumeQueueHeader(topic="t", queue_id=0, index=0, count=300)
    count, answer = steps(broker, RequestCode.QUERY_CONSUME_QUEUE, header)
    assert count >= 300 + 300 / 128
    body = QueryConsumeQueueResponseBody.decode(answer.body)
    assert (len(body.queue_data), body.min_queue_index, body.max_queue_index) == (300, 0, 300)


def test_members_are_written_in_slices(broker: BrokerUnderTest) -> None:
    subscribed = ConsumerData(
        group_name="g",
        subscription_data_set=[SubscriptionData(topic=f"t{number}") for number in range(300)],
    )
    data = HeartbeatData(
        producer_data_set=[ProducerData(group_name="p")], consumer_data_set=[subscribed]
    )
    for number in range(150):
        data.client_id = f"c{number}"
        data.without_sub = number > 0
        broker.ask(RequestCode.HEART_BEAT, body=data.encode())
    header: msgspec.Struct = ConsumerGroupHeader(consumer_group="g")
    count, answer = steps(broker, RequestCode.GET_CONSUMER_CONNECTION_LIST, header)
    consumers = ConsumerConnection.decode(answer.body)
    assert count >= 150 / 128 + 300 / 128
    assert (len(consumers.connection_set), len(consumers.subscription_table)) == (150, 300)
    assert (consumers.consume_type, consumers.message_model) == ("CONSUME_PASSIVELY", "CLUSTERING")
    header = GetProducerConnectionListHeader(producer_group="p")
    count, answer = steps(broker, RequestCode.GET_PRODUCER_CONNECTION_LIST, header)
    assert count >= 150 / 128
    assert len(ProducerConnection.decode(answer.body).connection_set) == 150


def test_groups_of_a_topic_are_found_without_a_look_at_all_groups(broker: BrokerUnderTest) -> None:
    for number in range(300):
        broker.offsets.commit(f"g{number:03}", "t", 0, 1)
    header = QueryTopicConsumeByWhoHeader(topic="t")
    count, answer = steps(broker, RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, header)
    assert count >= 300 / 128
    assert len(fastjson.loads(answer.body)["groupList"]) == 300


def test_a_table_with_long_rows_is_written_in_slices() -> None:
    table = {"a": {number: number for number in range(10_000)}, "b": {1: 2}}
    written: list[fastjson.Written] = []

    async def write() -> None:
        written.append(await fastjson.dumps_sliced(table.items()))

    assert sum(1 for _ in write().__await__()) >= 10_000 // 128
    assert fastjson.loads(b"".join(written[0].parts)) == table


def test_all_offsets_are_written_in_slices(broker: BrokerUnderTest) -> None:
    for queue_id in range(1000):
        broker.offsets.commit("g", "t", queue_id, 7)
    count, answer = steps(broker, RequestCode.GET_ALL_CONSUMER_OFFSET, None)
    assert count >= 1000 // 128
    assert len(fastjson.loads(answer.body)["offsetTable"]["t@g"]) == 1000


def test_stats_of_many_queues_are_written_in_slices(broker: BrokerUnderTest) -> None:
    broker.create_topic("t", QUEUES)
    count, _ = steps(broker, RequestCode.GET_TOPIC_STATS_INFO, GetTopicStatsHeader(topic="t"))
    assert count >= QUEUES + QUEUES // 128


class FullChannel(MemoryChannel):
    """A client that is full after one answer."""

    def write(self, *buffers: bytes | bytearray | memoryview) -> None:
        super().write(*buffers)
        self.is_slow = True


@pytest.mark.parametrize("is_open", [True, False])
def test_no_long_answer_is_made_for_a_client_that_does_not_read(
    broker: BrokerUnderTest, is_open: bool
) -> None:
    channel, works = FullChannel(), list[Any]()
    broker.registry.run_long = works.append
    broker.registry.slice_s = 0.0
    for _ in range(3):
        broker.send(RequestCode.GET_ALL_TOPIC_CONFIG, GetAllTopicConfigHeader(), b"", channel)
    list(works.pop())
    assert len(channel.replies()) == 1
    assert works == []
    assert channel.on_drained is not None
    assert channel.charged_bytes > 0
    taken, channel.on_drained = channel.on_drained, None
    channel.is_slow, channel.is_open = not is_open, is_open
    taken()
    list(works.pop())
    assert len(channel.replies()) == is_open
    assert (channel.on_drained is not None) == is_open
    assert (channel.charged_bytes > 0) == is_open


async def test_a_channel_calls_back_once_when_it_drains_or_closes() -> None:
    told: list[str] = []
    limits = ServerLimits(connection_bytes_max=1_000_000)
    async with serving(limits) as (server, _, connect):
        for name in ("reads", "leaves"):
            stream = await connect()
            await stream.send_all(frame(b"big:10000000"))
            await trio.testing.wait_all_tasks_blocked()
            (channel,) = server.channels
            assert channel.is_slow
            channel.on_drained = functools.partial(told.append, name)
            while name == "reads" and channel.is_slow:
                await stream.receive_some()
            await stream.aclose()
            await trio.testing.wait_all_tasks_blocked()
    assert told == ["reads", "leaves"]


# -- the clean-up ----------------------------------------------------------------------------------


class CountedOffsets(ConsumerOffsets):
    """Counts the questions about each group."""

    def __init__(self, folder: Path) -> None:
        super().__init__(ConfigFile(folder / "counted.json"), lambda: 0)
        self.asked: Counter[str] = Counter()

    def query(self, group: str, topic: str, queue_id: int) -> int | None:
        self.asked[group] += 1
        return super().query(group, topic, queue_id)


def test_unconsumed_messages_are_found_in_blocks_of_queues(
    broker: BrokerUnderTest, tmp_path: Path
) -> None:
    broker.create_topic("t", 200)
    for queue_id in range(200):
        broker.store_message("t", queue_id)
    for number in range(5):
        broker.join(f"g{number}", f"c{number}", "t")
    offsets = CountedOffsets(tmp_path)
    disk_forecast = DiskForecast(broker.store.commit_log, broker.store.table.by_topic)
    look = UnconsumedOffsets(offsets, broker.groups, broker.consumers)
    assert sum(1 for _ in disk_forecast.scan(look)) >= 200 / 128
    assert offsets.asked == {"g0": 200}  # nobody can have more to consume than all
    assert (found := disk_forecast.find_oldest()) is not None
    assert (found.queue_id, found.group) == (0, "g0")


# -- subscriptions ---------------------------------------------------------------------------------


def test_a_subscription_that_is_too_long_is_rejected(broker: BrokerUnderTest) -> None:
    text = "a||" * 11_000
    body = msgspec.json.encode({"subscriptionData": {"subString": text}})
    answer = broker.ask(RequestCode.CHECK_CLIENT_CONFIG, body=body)
    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert "subscription of 33000 characters: the maximum is 32768" in answer.remark


# -- who did it ------------------------------------------------------------------------------------


def test_the_log_names_the_client_of_each_change(broker: BrokerUnderTest, logs: list[Any]) -> None:
    reset = ResetOffsetHeader(topic="t", group="g", timestamp=-1, is_force=True)
    for code, header, body in (
        (RequestCode.UPDATE_AND_CREATE_TOPIC, topic_header(4), b""),
        (RequestCode.UPDATE_AND_CREATE_TOPIC, topic_header(2, write_queue_nums=4), b""),
        (RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, None, b'{"groupName":"g"}'),
        (RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, reset, b""),
        (
            RequestCode.CLONE_GROUP_OFFSET,
            CloneGroupOffsetHeader(src_group="g", dest_group="h", topic="t"),
            b"",
        ),
        (RequestCode.UPDATE_BROKER_CONFIG, None, b"fileReservedTime=48"),
        (RequestCode.TRIGGER_DELETE_FILES, None, b""),
        (
            RequestCode.DELETE_SUBSCRIPTIONGROUP,
            DeleteSubscriptionGroupHeader(group_name="g"),
            b"",
        ),
        (RequestCode.DELETE_TOPIC_IN_BROKER, DeleteTopicHeader(topic="t"), b""),
    ):
        assert broker.ask(code, header, body).code == ResponseCode.SUCCESS
    assert [line["event"] for line in logs] == [
        "topic created or changed",
        "topic created or changed",
        "topic has unreachable messages",
        "group created or changed",
        "offsets reset",
        "offsets cloned",
        "settings changed",
        "removal of old files requested",
        "group deleted",
        "topic deleted",
    ]
    assert {line["client"] for line in logs} == {MemoryChannel.address}


def test_a_host_cannot_flood_the_log_with_changes(broker: BrokerUnderTest, logs: list[Any]) -> None:
    for _ in range(100):
        broker.ask(RequestCode.TRIGGER_DELETE_FILES)
    assert len(logs) == 20
    broker.changes.report()
    assert logs[-1]["count"] == 80
