"""What dashboards and mqadmin ask about groups, producers and the broker."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace_broker.core import Pace
from headrace_broker.processors.dashboard import DashboardProcessor
from headrace_broker.statistics import BrokerStatistics, Counter, History
from headrace_protocol.admin_headers import (
    ConsumeDirectlyHeader,
    GetBrokerConsumeStatsHeader,
    GetConsumerStatusHeader,
    GroupHeader,
    GroupOfTopicHeader,
    QueryCorrectionOffsetHeader,
    SetReadModeHeader,
    ViewBrokerStatsHeader,
)
from headrace_protocol.bodies import (
    ConsumerStatusBody,
    HeartbeatData,
    KVTable,
    MessageQueue,
    ProducerData,
    SubscriptionGroupConfig,
    SubscriptionGroupList,
    SubscriptionGroupWrapper,
)
from headrace_protocol.channel import Channel
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.command import FLAG_RESPONSE, Command, header_fields
from headrace_protocol.errors import NotReady
from headrace_protocol.header_codecs import SerializeType, encode_frame
from headrace_protocol.message import decode_record
from headrace_protocol.message_ids import encode_offset_message_id
from headrace_protocol.pop.headers import PopMessageHeader
from headrace_protocol.serving import Request, Then
from tests.support.broker import (
    Answer,
    BrokerUnderTest,
    FetchesAtOnce,
    WorkAtOnce,
    broker_config,
)
from tests.support.channel import MemoryChannel
from tests.support.wire import pull_header

C = RequestCode


class OtherChannel(MemoryChannel):
    """A client with an address of its own."""

    address = "127.0.0.1:2"


class Noted(FetchesAtOnce):
    """Notes what is fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.lanes: list[str] = []

    def start(self, channel: Channel, wait: NotReady, then: Then) -> None:
        self.lanes.append(wait.lane.name)
        super().start(channel, wait, then)


@pytest.fixture
def broker(tmp_path: Path) -> BrokerUnderTest:
    broker = BrokerUnderTest(tmp_path)
    broker.create_topic("t", 2)
    return broker


def asked(broker: BrokerUnderTest, code: C, header: msgspec.Struct | None = None) -> Any:
    answer = broker.ask(code, header)
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return json.loads(answer.body)


def create(broker: BrokerUnderTest, *names: str) -> Answer:
    groups = [SubscriptionGroupConfig(group_name=name) for name in names]
    body = SubscriptionGroupList(group_config_list=groups).encode()
    return broker.ask(C.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, body=body)


# -- groups ----------------------------------------------------------------------------------------


def test_groups_are_created_all_or_none(broker: BrokerUnderTest) -> None:
    assert create(broker, "g", "h").code == ResponseCode.SUCCESS
    assert asked(broker, C.GET_SUBSCRIPTIONGROUP_CONFIG, GroupHeader(group="h"))["groupName"] == "h"
    assert create(broker, "i", "not a name!").code != ResponseCode.SUCCESS
    answer = broker.ask(C.GET_SUBSCRIPTIONGROUP_CONFIG, GroupHeader(group="i"))
    assert answer.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    many = create(broker, *(f"g{number}" for number in range(1001)))
    assert "the maximum is 1000" in many.remark


def forbid(broker: BrokerUnderTest, *, readable: bool | None, group: str = "g") -> Answer:
    header = GroupOfTopicHeader(group=group, topic="t", readable=readable)
    return broker.ask(C.UPDATE_AND_GET_GROUP_FORBIDDEN, header)


def pulls(broker: BrokerUnderTest) -> int:
    return broker.ask(C.PULL_MESSAGE, pull_header(topic="t", queue_id=0, sys_flag=4)).code


def test_a_forbidden_topic_is_not_read(tmp_path: Path) -> None:
    broker = BrokerUnderTest(tmp_path)
    broker.create_topic("t", 2)
    broker.store_message("t", 0)
    create(broker, "g", "h")
    assert pulls(broker) == ResponseCode.SUCCESS
    assert json.loads(forbid(broker, readable=None).body)["readable"] is True
    assert json.loads(forbid(broker, readable=False).body) == {
        "group": "g",
        "readable": False,
        "topic": "t",
    }
    answer = broker.ask(C.PULL_MESSAGE, pull_header(topic="t", queue_id=0, sys_flag=4))
    assert (answer.code, "has forbidden it" in answer.remark) == (ResponseCode.NO_PERMISSION, True)
    assert answer.command.ext()["forbiddenType"] == "5"
    pop = PopMessageHeader(
        consumer_group="g",
        topic="t",
        queue_id=-1,
        max_msg_nums=1,
        invisible_time=60_000,
        poll_time=0,
        born_time=broker.clock.ms,
        init_mode=0,
    )
    answer = broker.ask(C.POP_MESSAGE, pop)
    assert (answer.code, "has forbidden it" in answer.remark) == (ResponseCode.NO_PERMISSION, True)
    assert answer.command.ext()["forbiddenType"] == "5"
    wrapper = SubscriptionGroupWrapper.decode(broker.ask(C.GET_ALL_SUBSCRIPTIONGROUP_CONFIG).body)
    # Apache's bit of reading.
    assert wrapper.forbidden_table == {"g": {"t": 4}}

    forbid(broker, readable=False, group="h")
    assert json.loads(forbid(broker, readable=True).body)["readable"] is True
    assert pulls(broker) == ResponseCode.SUCCESS
    broker.groups.delete("h")
    assert broker.groups.wrapper().forbidden_table == {}
    assert forbid(broker, readable=False, group="none").code != ResponseCode.SUCCESS
    header = GroupOfTopicHeader(group="g", topic="none", readable=False)
    answer = broker.ask(C.UPDATE_AND_GET_GROUP_FORBIDDEN, header)
    assert answer.code == ResponseCode.TOPIC_NOT_EXIST


def test_topics_and_subscriptions_of_a_group(broker: BrokerUnderTest) -> None:
    broker.join("g", "c1", "t")
    broker.offsets.commit("g", "t", 0, 3)
    assert asked(broker, C.QUERY_TOPICS_BY_CONSUMER, GroupHeader(group="g"))["topicList"] == ["t"]
    header = GroupOfTopicHeader(group="g", topic="t")
    found = asked(broker, C.QUERY_SUBSCRIPTION_BY_CONSUMER, header)
    assert (found["group"], found["topic"]) == ("g", "t")
    assert found["subscriptionData"]["subString"] == "*"
    header = GroupOfTopicHeader(group="none", topic="t")
    found = asked(broker, C.QUERY_SUBSCRIPTION_BY_CONSUMER, header)
    assert found.get("subscriptionData") is None


def correction(broker: BrokerUnderTest, header: QueryCorrectionOffsetHeader) -> int:
    """That of queue 0, the only one; Java's integers are bare keys."""
    body = broker.ask(C.QUERY_CORRECTION_OFFSET, header).body.decode()
    start, end = '{"correctionOffsets":{0:', "}}"
    assert body.startswith(start)
    return int(body.removeprefix(start).removesuffix(end))


def test_corrections_are_the_least_progress_of_the_others(broker: BrokerUnderTest) -> None:
    for group, offset in {"a": 5, "b": 3, "c": 4, "left": 1}.items():
        broker.offsets.commit(group, "t", 0, offset)
    header = QueryCorrectionOffsetHeader(topic="t", compare_group="c", filter_groups="left,x")
    assert correction(broker, header) == 3
    broker.offsets.commit("c", "t", 0, 2)
    header = QueryCorrectionOffsetHeader(topic="t", compare_group="left")
    assert correction(broker, header) == 1
    header = QueryCorrectionOffsetHeader(topic="t", compare_group="left", filter_groups="left")
    assert correction(broker, header) == 2**63 - 1, "it is behind all others"


def test_corrections_of_queues_that_are_still_read(broker: BrokerUnderTest) -> None:
    broker.offsets.commit("a", "t", 0, 3)
    broker.offsets.commit("a", "t", 2, 1)
    header = QueryCorrectionOffsetHeader(topic="t", compare_group="none")
    assert correction(broker, header) == 3, "t has two queues"


def test_corrections_look_only_at_what_is_committed(broker: BrokerUnderTest) -> None:
    broker.create_topic("wide", 10_000)
    for number in range(20):
        broker.offsets.commit(f"g{number}", "wide", 0, 3)
    processor = DashboardProcessor(
        broker.topics,
        broker.groups,
        broker.consumers,
        broker.producers,
        broker.offsets,
        broker.clock,
        broker.changes,
    )
    header = QueryCorrectionOffsetHeader(topic="wide", compare_group="g1")
    fields = msgspec.Raw(msgspec.json.encode(header_fields(header)))
    command = Command(C.QUERY_CORRECTION_OFFSET, ext_fields=fields)
    request = Request(MemoryChannel(), SerializeType.JSON, command, b"", 0)
    breaks = list(processor.correction_offsets(request).__await__())
    assert len(breaks) == 21, "one for each group, and one for the queue that was found"


def test_the_progress_of_all_groups(broker: BrokerUnderTest) -> None:
    broker.store_message("t", 0)
    create(broker, "g")
    broker.offsets.commit("g", "t", 0, 0)
    header = GetBrokerConsumeStatsHeader(is_order=False)
    body = broker.ask(C.GET_BROKER_CONSUME_STATS, header).body
    assert b'"consumeStatsList":[{"g":[' in body
    assert b'"totalDiff":1' in body
    header = GetBrokerConsumeStatsHeader(is_order=True)
    assert asked(broker, C.GET_BROKER_CONSUME_STATS, header)["consumeStatsList"] == []


def test_all_producers(broker: BrokerUnderTest) -> None:
    assert asked(broker, C.GET_ALL_PRODUCER_INFO) == {"data": {}}
    channel = MemoryChannel()
    data = HeartbeatData(client_id="c1", producer_data_set=[ProducerData(group_name="p")])
    broker.ask(C.HEART_BEAT, body=data.encode(), channel=channel)
    broker.clock.ms += 5000
    ((row,),) = asked(broker, C.GET_ALL_PRODUCER_INFO)["data"].values()
    assert (row["clientId"], row["remoteIP"]) == ("c1", "127.0.0.1:1")
    assert row["lastUpdateTimestamp"] == broker.clock.ms - 5000


# -- members ---------------------------------------------------------------------------------------


def requested(member: MemoryChannel) -> tuple[Any, bytes]:
    (request,) = [each for each in member.replies() if not each[0].is_response]
    return request


def reply_to(
    broker: BrokerUnderTest, member: MemoryChannel, opaque: int, body: bytes, code: int = 0
) -> None:
    frame = encode_frame(
        SerializeType.JSON, code, opaque, flag=FLAG_RESPONSE, remark="no", body_bytes=len(body)
    )
    broker.take(frame + body, member)


async def test_a_message_is_passed_to_a_member(broker: BrokerUnderTest) -> None:
    physical_offset = broker.store_message("t", 1, b"order")
    member, asker = broker.join("g", "c1", "t"), OtherChannel()
    message_id = encode_offset_message_id(bytes([127, 0, 0, 1, 0, 0, 0x2A, 0x9F]), physical_offset)
    header = ConsumeDirectlyHeader(consumer_group="g", client_id="c1", msg_id=message_id)
    broker.send(C.CONSUME_MESSAGE_DIRECTLY, header, channel=asker)
    request, body = requested(member)
    assert request.header(ConsumeDirectlyHeader) == header
    assert decode_record(body).body == b"order"
    reply_to(broker, member, request.opaque, b'{"consumeResult":"CR_SUCCESS"}')
    ((reply, body),) = asker.replies()
    assert (reply.code, body) == (ResponseCode.SUCCESS, b'{"consumeResult":"CR_SUCCESS"}')


@pytest.mark.parametrize(
    ("fields", "code", "remark"),
    [
        ({"client_id": "c2"}, ResponseCode.CONSUMER_NOT_ONLINE, "<c2> not online"),
        ({}, ResponseCode.CONSUMER_NOT_ONLINE, "not online"),
        ({"client_id": "old"}, ResponseCode.SYSTEM_ERROR, "too old to be asked"),
        ({"client_id": "c1", "msg_id": "x"}, ResponseCode.INVALID_PARAMETER, "x is no offset"),
        (
            {"client_id": "c1", "msg_id": "7F00000100002A9F00000000000000FF"},
            ResponseCode.SYSTEM_ERROR,
            "no message of this broker",
        ),
    ],
)
async def test_what_cannot_be_passed_on(
    broker: BrokerUnderTest, fields: dict[str, Any], code: int, remark: str
) -> None:
    broker.join("g", "c1", "t")
    broker.join("g", "old", "t", channel=OtherChannel())
    for member in broker.consumers.members("g"):
        if member.client_id == "old":
            member.version = 100
    header = ConsumeDirectlyHeader(consumer_group="g", **fields)
    answer = broker.ask(C.CONSUME_MESSAGE_DIRECTLY, header, channel=OtherChannel())
    assert answer.code == code
    assert remark in answer.remark


async def test_the_status_of_all_members(broker: BrokerUnderTest) -> None:
    header = GetConsumerStatusHeader(topic="t", group="g")
    code = C.INVOKE_BROKER_TO_GET_CONSUMER_STATUS
    assert broker.ask(code, header).code == ResponseCode.CONSUMER_NOT_ONLINE
    member, asker = broker.join("g", "c1", "t"), OtherChannel()
    broker.send(code, header, channel=asker)
    request, _ = requested(member)
    assert request.code == C.GET_CONSUMER_STATUS_FROM_CLIENT
    table = {MessageQueue("t", "broker-a", 0): 7}
    reply_to(broker, member, request.opaque, ConsumerStatusBody(message_queue_table=table).encode())
    ((reply, body),) = asker.replies()
    assert reply.code == ResponseCode.SUCCESS
    assert body.startswith(b'{"consumerTable":{"c1":{{')
    assert body.endswith(b":7}}}")

    broker.send(
        code, GetConsumerStatusHeader(topic="t", group="g", client_addr="c1"), channel=asker
    )
    request, _ = requested(member)
    reply_to(broker, member, request.opaque, b"", code=3)
    ((reply, _),) = asker.replies()
    assert (reply.code, "c1" in (reply.remark or "")) == (ResponseCode.SYSTEM_ERROR, True)


async def status_answered(broker: BrokerUnderTest, body: bytes) -> Answer:
    """The answer to a question for the status of a group's only member, which sends ``body``."""
    member, asker = broker.join("g", "c1", "t"), OtherChannel()
    header = GetConsumerStatusHeader(topic="t", group="g")
    broker.send(C.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, header, channel=asker)
    request, _ = requested(member)
    reply_to(broker, member, request.opaque, body)
    ((reply, answered),) = asker.replies()
    return Answer(reply, answered)


async def test_a_status_is_decoded_in_a_thread(tmp_path: Path) -> None:
    fetches = Noted()
    broker = BrokerUnderTest(tmp_path, pace=Pace(WorkAtOnce(), fetches, math.inf))
    broker.create_topic("t", 2)
    table = {MessageQueue("t", "broker-a", queue_id): 7 for queue_id in range(2_000)}
    answer = await status_answered(broker, ConsumerStatusBody(message_queue_table=table).encode())
    assert (answer.code, answer.body.count(b"}:7")) == (ResponseCode.SUCCESS, 2_000)
    assert fetches.lanes == ["decoding of members' answers"]


@pytest.mark.parametrize(
    ("body", "remark"),
    [
        (b"{}" + b" " * 256 * 1024, "262146 bytes: 262144 is the most"),
        (b'{"messageQueueTable":', "found the end at character 21"),
    ],
)
async def test_a_status_that_is_not_read(broker: BrokerUnderTest, body: bytes, remark: str) -> None:
    answer = await status_answered(broker, body)
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert answer.remark.startswith("consumer <g> <c1> reports no status: ")
    assert answer.remark.endswith(remark)


async def test_no_status_of_some_of_the_members(broker: BrokerUnderTest) -> None:
    for number in range(101):
        broker.join("g", f"c{number}", "t", channel=MemoryChannel())
    header = GetConsumerStatusHeader(topic="t", group="g")
    answer = broker.ask(C.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, header)
    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert "group g has 101 members" in answer.remark
    assert "name one with clientAddr" in answer.remark


# -- the broker ------------------------------------------------------------------------------------


def test_system_topics_and_clean_up(broker: BrokerUnderTest) -> None:
    names = asked(broker, C.GET_SYSTEM_TOPIC_LIST_FROM_BROKER)["topicList"]
    assert "TBW102" in names
    assert "t" not in names
    for code in (C.CLEAN_EXPIRED_CONSUMEQUEUE, C.CLEAN_UNUSED_TOPIC):
        assert broker.ask(code).code == ResponseCode.SUCCESS
    assert broker.topics.get("t") is not None


def test_a_lone_master(broker: BrokerUnderTest) -> None:
    broker.store_message("t", 0)
    found = asked(broker, C.GET_BROKER_HA_STATUS)
    assert (found["master"], found["haConnectionInfo"], found["inSyncSlaveNums"]) == (True, [], 0)
    assert found["masterCommitLogMaxOffset"] == broker.store.commit_log.max_offset


def test_switches_without_effect(broker: BrokerUnderTest) -> None:
    answer = broker.ask(C.SET_COMMITLOG_READ_MODE, SetReadModeHeader(mode="1"))
    assert (answer.code, "without effect" in answer.remark) == (ResponseCode.SUCCESS, True)
    for mode in (None, "2"):
        answer = broker.ask(C.SET_COMMITLOG_READ_MODE, SetReadModeHeader(mode=mode))
        assert answer.code == ResponseCode.INVALID_PARAMETER
    answer = broker.ask(C.SWITCH_TIMER_ENGINE)
    assert (answer.code, "RocksDB" in answer.remark) == (ResponseCode.SYSTEM_ERROR, True)


async def test_sums_and_rates_of_counters(broker: BrokerUnderTest, autojump_clock: object) -> None:
    statistics = broker.statistics
    statistics.put("t", 4, 40)
    statistics.get("g", "t", 2, 20)
    statistics.sent_back("g", "t", 5)
    for _ in range(10):
        statistics.sample()
    statistics.put("t", 6, 60)
    expected = {
        ("TOPIC_PUT_NUMS", "t"): (10, 1.0),
        ("TOPIC_PUT_SIZE", "t"): (100, 10.0),
        ("GROUP_GET_NUMS", "t@g"): (2, 1.0),
        ("GROUP_GET_SIZE", "t@g"): (20, 10.0),
        ("SNDBCK_PUT_NUMS", "t@g"): (1, 1.0),
        ("BROKER_PUT_NUMS", "DefaultCluster"): (10, 1.0),
        ("BROKER_GET_NUMS", "DefaultCluster"): (2, 1.0),
    }
    for (name, key), (total, average) in expected.items():
        header = ViewBrokerStatsHeader(stats_name=name, stats_key=key)
        found = asked(broker, C.VIEW_BROKER_STATS_DATA, header)
        for window in ("statsMinute", "statsHour", "statsDay"):
            assert (found[window]["sum"], found[window]["avgpt"]) == (total, average), name
            assert found[window]["tps"] == total
    for name, key in {
        "TOPIC_PUT_NUMS": "none",
        "GROUP_GET_NUMS": "t",
        "BROKER_PUT_NUMS": "OtherCluster",
        "TOPIC_PUT_LATENCY": "t",
        "SOMETHING": "t",
    }.items():
        header = ViewBrokerStatsHeader(stats_name=name, stats_key=key)
        answer = broker.ask(C.VIEW_BROKER_STATS_DATA, header)
        assert (answer.code, "not exist" in answer.remark) == (ResponseCode.SYSTEM_ERROR, True)


def test_a_history_forgets_what_is_older_than_its_window() -> None:
    counter, history = Counter(), History(0.0)
    for second in range(0, 7200, 10):
        counter.add(10, 100)
        history.sample(counter, float(second))
    minute, hour, day = (history.sums(s, counter, 7190.0) for s in (60.0, 3600.0, 86_400.0))
    assert 60 <= minute.messages <= 70
    assert 3600 <= hour.messages <= 4200
    assert (day.messages, day.body_bytes, day.seconds) == (7200, 72_000, 7190.0)
    assert 600 <= history.sums(600.0, counter, 7190.0).messages <= 1200
    assert minute.messages / minute.seconds == pytest.approx(1, 0.01)
    idle = history.sums(60.0, counter, 9000.0)
    assert idle.messages == 0


async def test_few_counters_have_a_history(autojump_clock: object) -> None:
    statistics = BrokerStatistics()
    for number in range(2100):
        statistics.put(f"t{number}", 1, 1)
    for _ in range(10):
        statistics.sample()
    assert len(statistics.histories) == 2000
    assert statistics.sums(statistics.topic_puts["t2099"], 60.0).messages == 0
    for number in range(2100):
        statistics.topic_deleted(f"t{number}")
    for forget in (partial(statistics.group_deleted, "g"), partial(statistics.topic_deleted, "t")):
        statistics.get("g", "t", 1, 1)
        statistics.sent_back("g", "t", 1)
        for _ in range(10):
            statistics.sample()
        assert len(statistics.histories) == 4
        forget()
        assert len(statistics.histories) == 2, "those of the broker"


async def test_keys_that_tools_read_without_looking(tmp_path: Path) -> None:
    broker = BrokerUnderTest(tmp_path, broker_config(tmp_path))
    table = KVTable.decode(broker.ask(C.GET_BROKER_RUNTIME_INFO).body).table
    for name in (
        "putTps",
        "getTotalTps",
        "getFoundTps",
        "getMissTps",
        "getTransferredTps",
        "getTransferedTps",
    ):
        assert len([float(each) for each in table[name].split(" ")]) == 3, name
    for name in ("putMessageDistributeTime", "commitLogDirCapacity"):
        assert name in table
    for name in ("getMessageEntireTimeMax", "putMessageEntireTimeMax"):
        assert int(table[name]) == 0
