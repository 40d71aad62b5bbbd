"""The broker itself: how it is doing, and its settings."""

from __future__ import annotations

from typing import Any

from headrace_broker.settings.files import parse_properties
from headrace_broker.settings.listing import RELOADABLE
from headrace_protocol.admin_headers import GetBrokerConfigResponseHeader
from headrace_protocol.bodies import ConsumerOffsetSerializeWrapper, DataVersion, KVTable
from headrace_protocol.codes import RequestCode, ResponseCode
from tests.support.broker import Answer, BrokerUnderTest


def runtime_info(broker: BrokerUnderTest) -> dict[str, str]:
    answer = broker.ask(RequestCode.GET_BROKER_RUNTIME_INFO)
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return KVTable.decode(answer.body).table


# What mqadmin clusterList and brokerStatus take apart: numbers, the first of several, or a flag.
NUMBERS = (
    "sendThreadPoolQueueSize",
    "pullThreadPoolQueueSize",
    "sendThreadPoolQueueHeadWaitTimeMills",
    "pullThreadPoolQueueHeadWaitTimeMills",
    "ackThreadPoolQueueSize",
    "ackThreadPoolQueueHeadWaitTimeMills",
    "pageCacheLockTimeMills",
    "timerReadBehind",
    "timerOffsetBehind",
    "timerCongestNum",
    "timerEnqueueTps",
    "timerDequeueTps",
    "putTps",
    "getTransferredTps",
    "commitLogDiskRatio",
    "bootTimestamp",
)


async def test_the_peers_tools_find_what_they_look_for(broker: BrokerUnderTest) -> None:
    info = runtime_info(broker)
    for name in NUMBERS:
        float(info[name].split(" ")[0])
    assert info["brokerVersionDesc"].startswith("headrace ")
    assert info["brokerActive"] == "true"
    assert info["earliestMessageTimeStamp"] == "-1"


async def test_the_numbers_are_those_of_the_store(broker: BrokerUnderTest) -> None:
    start_ms = broker.clock.ms
    broker.create_topic("t")
    broker.store_message("t", 0)
    broker.store_message("t", 0)
    broker.clock.ms = start_ms + (((2 * 24 + 3) * 60 + 4) * 60 + 5) * 1000
    info = runtime_info(broker)
    assert info["earliestMessageTimeStamp"] == str(start_ms)
    assert info["commitLogMaxOffset"] == str(broker.store.commit_log.max_offset)
    assert info["remainHowManyDataToFlush"] == f"{broker.store.commit_log.max_offset} B"
    assert info["runtime"] == "[ 2 days, 3 hours, 4 minutes, 5 seconds ]"
    assert info["refusesWrites"] == "no"
    assert "refusesWritesSince" not in info


async def test_a_refusal_says_why_and_since_when(broker: BrokerUnderTest) -> None:
    began_ms = broker.clock.ms
    for reason in ("the disk is 91% full", "the disk is 92% full"):
        broker.store.commit_log.refuse(reason, broker.store.root)
        broker.clock.ms += 60_000
    info = runtime_info(broker)
    assert "the disk is 92% full" in info["refusesWrites"]
    assert info["refusesWritesSince"] == str(began_ms)


def read_config(broker: BrokerUnderTest) -> tuple[dict[str, str], DataVersion]:
    answer = broker.ask(RequestCode.GET_BROKER_CONFIG)
    values, _ = parse_properties(answer.body.decode(), "body")
    version = answer.command.header(GetBrokerConfigResponseHeader).version
    return values, DataVersion.decode(version.encode())


def update(broker: BrokerUnderTest, text: str) -> Answer:
    return broker.ask(RequestCode.UPDATE_BROKER_CONFIG, body=text.encode())


def test_settings_are_read_and_changed(broker: BrokerUnderTest) -> None:
    values, version = read_config(broker)
    assert values == broker.config.as_text()
    assert values["brokerName"] == "broker-a"
    answer = update(broker, "# by hand\nlongPollingEnable=false\nflushConsumerOffsetInterval=7\n")
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    assert not broker.config.long_polling_enable
    assert broker.config.flush_consumer_offset_interval == 7
    values, new_version = read_config(broker)
    assert values["longPollingEnable"] == "false"
    assert new_version.counter == version.counter + 1


def test_one_unknown_setting_refuses_all_changes(broker: BrokerUnderTest) -> None:
    before = broker.config.as_text()
    answer = update(broker, "longPollingEnable=false\ncolour=red")
    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert "unknown key colour" in answer.remark
    assert broker.config.as_text() == before


def test_another_permission_is_told_to_the_nameservers(broker: BrokerUnderTest) -> None:
    told: list[Any] = []
    broker.topics.subscribe(told.append)
    before = broker.topics.change_count, broker.topics.data_version.counter
    update(broker, "brokerPermission=4")
    after = broker.topics.change_count, broker.topics.data_version.counter
    assert told == [None]
    assert after == (before[0] + 1, before[1] + 1)


def test_every_live_setting_can_be_set_to_what_it_is(broker: BrokerUnderTest) -> None:
    values = broker.config.as_text()
    text = "\n".join(f"{key}={values[key]}" for key in RELOADABLE)
    assert update(broker, text).code == ResponseCode.SUCCESS
    assert broker.config.as_text() == values


def test_progress_for_slaves(broker: BrokerUnderTest) -> None:
    broker.offsets.commit("g", "t", 1, 5)
    answer = broker.ask(RequestCode.GET_ALL_CONSUMER_OFFSET)
    body = ConsumerOffsetSerializeWrapper.decode(answer.body)
    assert body.offset_table == {"t@g": {1: 5}}
    assert body.group_topic_map == {"g": ["t"]}
