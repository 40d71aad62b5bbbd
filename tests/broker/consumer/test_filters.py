"""SQL92 filters at the broker: checks, registrations, pulls, held pulls, and what is saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio.testing

from headrace_broker.consumer.bloom_positions import bit_positions
from headrace_broker.consumer.filter_table import DEAD_LIFE_MS, PRUNE_INTERVAL_MS
from headrace_broker.consumer.filters import Filter, filter_bytes
from headrace_protocol.bodies import (
    CheckClientRequestBody,
    ConsumerData,
    HeartbeatData,
    SubscriptionData,
)
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.filters.expression import Expression
from headrace_protocol.filters.parser import parse
from headrace_protocol.headers import PullMessageResponseHeader
from headrace_protocol.message import decode_records
from tests.support.broker import Answer, BrokerUnderTest, broker_config
from tests.support.channel import MemoryChannel
from tests.support.memory import kept_bytes
from tests.support.running import in_background
from tests.support.wire import pull_header

SUSPEND, SUBSCRIPTION = 2, 4
SQL = "a > 5"


@pytest.fixture
def broker(tmp_path: Path) -> BrokerUnderTest:
    broker = BrokerUnderTest(tmp_path)
    broker.create_topic("T", 1)
    return broker


def put(broker: BrokerUnderTest, *values: object, topic: str = "T", **others: str) -> None:
    """Messages whose property a has these values."""
    for value in values:
        broker.store_message(topic, 0, str(value).encode(), a=str(value), **others)
    queue = broker.store.find_queue(topic, 0)
    broker.long_polling.arrived([] if queue is None else [queue])


def join(
    broker: BrokerUnderTest,
    expression: str | None = SQL,
    *,
    version: int = 1,
    kind: str = "SQL92",
    channel: MemoryChannel | None = None,
    topic: str = "T",
) -> tuple[MemoryChannel, Answer]:
    """A member of group g with a subscription; without one for None."""
    subscription = SubscriptionData(
        topic=topic, sub_string=expression or "", expression_type=kind, sub_version=version
    )
    subscriptions = [] if expression is None else [subscription]
    group = ConsumerData(group_name="g", subscription_data_set=subscriptions)
    body = HeartbeatData(client_id="c", consumer_data_set=[group]).encode()
    channel = channel or MemoryChannel()
    return channel, broker.ask(RequestCode.HEART_BEAT, body=body, channel=channel)


def pull(broker: BrokerUnderTest, offset: int = 0, **fields: Any) -> tuple[int, list[str], int]:
    """Pulls by the group's heartbeats until one finds something: code, bodies, next offset."""
    given = {"consumer_group": "g", "sys_flag": 0, "subscription": None, "sub_version": 1}
    while True:
        header = pull_header(offset, **{**given, **fields})
        answer = broker.ask(RequestCode.PULL_MESSAGE, header)
        if answer.code not in (ResponseCode.SUCCESS, ResponseCode.PULL_RETRY_IMMEDIATELY):
            return answer.code, [answer.remark or ""], -1
        head = answer.command.header(PullMessageResponseHeader)
        offset = head.next_begin_offset
        if answer.code == ResponseCode.SUCCESS or offset == head.max_offset:
            return answer.code, bodies(answer.body), offset


def bodies(records: bytes) -> list[str]:
    """The bodies of an answer's records."""
    return [record.body.decode() for record in decode_records(records)]


def own(expression: str, kind: str = "SQL92") -> dict[str, Any]:
    """The fields of a pull with a subscription of its own."""
    return {"sys_flag": SUBSCRIPTION, "subscription": expression, "expression_type": kind}


# -- CHECK_CLIENT_CONFIG ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "expression", "code", "remark"),
    [
        ("TAG", "a > 5", ResponseCode.SUCCESS, ""),
        ("SQL92", "a > 5", ResponseCode.SUCCESS, ""),
        ("SQL92", "a >\n> 5", ResponseCode.SUBSCRIPTION_PARSE_FAILED, "line 2, column 1"),
        ("SQL92", "", ResponseCode.SUBSCRIPTION_PARSE_FAILED, "it is empty"),
        ("SQL92", "x" * 100_000, ResponseCode.SUBSCRIPTION_PARSE_FAILED, "65536 bytes"),
        ("LUA", "a > 5", ResponseCode.SYSTEM_ERROR, "filter message by 'LUA': use SQL92"),
    ],
)
def test_a_subscription_is_checked(
    broker: BrokerUnderTest, kind: str, expression: str, code: int, remark: str
) -> None:
    subscription = SubscriptionData(sub_string=expression, expression_type=kind)
    body = CheckClientRequestBody(client_id="c", group="g", subscription_data=subscription)
    answer = broker.ask(RequestCode.CHECK_CLIENT_CONFIG, body=body.encode())
    assert answer.code == code
    assert remark in (answer.remark or "")


def test_filters_can_be_switched_off(tmp_path: Path) -> None:
    broker = BrokerUnderTest(tmp_path, broker_config(tmp_path, enable_property_filter=False))
    broker.create_topic("T", 1)
    _, answer = join(broker)
    expected = "The broker does not support consumer to filter message by SQL92"
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert expected in answer.remark
    for fields in (own(SQL), {}):
        code, (remark,), _ = pull(broker, **fields)
        assert code == ResponseCode.SYSTEM_ERROR
        assert expected in remark


# -- registration ----------------------------------------------------------------------------------


def saved(broker: BrokerUnderTest) -> dict[str, Any]:
    """The saved filter of group g on topic T."""
    text = (broker.config.store_path_root_dir / "config" / "consumerFilter.json").read_text()
    found: dict[str, Any] = json.loads(text)["filterDataByTopic"]["T"]["groupFilterData"]["g"]
    return found


def test_a_filter_of_heartbeats_is_saved_as_apache_saves_it(broker: BrokerUnderTest) -> None:
    _, answer = join(broker)
    assert answer.code == ResponseCode.SUCCESS
    assert saved(broker) == {
        "bloomFilterData": {"bitNum": 112, "bitPos": bit_positions("g", "T")},
        "bornTime": broker.clock.ms,
        "clientVersion": 1,
        "consumerGroup": "g",
        "dead": False,
        "deadTime": 0,
        "expression": SQL,
        "expressionType": "SQL92",
        "topic": "T",
    }


def test_the_bits_are_those_of_apache() -> None:
    """Seen in a file of RocketMQ 5.5.0; a name of over 16 bytes takes a whole block."""
    assert bit_positions("w_sql", "W_TOPIC") == [72, 61, 60]
    assert all(0 <= each < 112 for each in bit_positions("a group with a long name", "é"))


async def test_a_heartbeat_is_answered_when_its_filter_is_on_disk(broker: BrokerUnderTest) -> None:
    """Whether it is handled at once or in slices."""
    async with in_background(broker.core.filters.saved.run):
        await trio.testing.wait_all_tasks_blocked()
        for version, producers in ((1, 0), (2, 200)):
            subscription = SubscriptionData(
                topic="T", sub_string=SQL, expression_type="SQL92", sub_version=version
            )
            groups = [ConsumerData(group_name="g", subscription_data_set=[subscription])]
            groups += [ConsumerData(group_name=f"g{number}") for number in range(producers)]
            channel = MemoryChannel()
            body = HeartbeatData(client_id="c", consumer_data_set=groups).encode()
            broker.send(RequestCode.HEART_BEAT, None, body, channel)
            assert answers(channel) == []
            await broker.core.filters.saved.wait_saved()
            assert saved(broker)["clientVersion"] == version
            assert answers(channel) == [ResponseCode.SUCCESS]


def answers(channel: MemoryChannel) -> list[int]:
    """Codes of answers since the last time; notices do not count."""
    return [reply.code for reply, _ in channel.replies() if reply.is_response]


def test_a_heartbeat_with_a_bad_filter_names_its_place(broker: BrokerUnderTest) -> None:
    """And its pulls say that there is no filter."""
    channel, answer = join(broker, "a >")
    assert answer.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED
    assert "line 1, column 4: expected a property" in answer.remark
    put(broker, 1, 9)
    assert pull(broker)[0] == ResponseCode.SUBSCRIPTION_PARSE_FAILED
    _, answer = join(broker, SQL, version=2, channel=channel)
    assert answer.code == ResponseCode.SUCCESS
    assert pull(broker, sub_version=2) == (ResponseCode.SUCCESS, ["9"], 2)


def test_a_heartbeat_names_each_bad_filter_once_for_its_topic(broker: BrokerUnderTest) -> None:
    bad = [
        SubscriptionData(topic=f"T{number}", sub_string="a >", expression_type="SQL92")
        for number in range(12)
    ]
    groups = [
        ConsumerData(group_name="g", subscription_data_set=bad[:2]),
        ConsumerData(group_name="h", subscription_data_set=bad[2:]),
    ]
    body = HeartbeatData(client_id="c", consumer_data_set=groups).encode()
    answer = broker.ask(RequestCode.HEART_BEAT, body=body)
    assert answer.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED
    for group, number in [("g", 0), ("g", 1), ("h", 2), ("h", 9)]:
        assert answer.remark.count(f"group {group}, topic T{number}: ") == 1
    assert answer.remark.endswith(" and 2 more")


def test_a_newer_filter_replaces_an_older_one(broker: BrokerUnderTest) -> None:
    put(broker, 1, 9)
    channel, _ = join(broker)
    assert pull(broker) == (ResponseCode.SUCCESS, ["9"], 2)
    join(broker, "a < 5", version=1, channel=channel)
    assert pull(broker) == (ResponseCode.SUCCESS, ["9"], 2)
    join(broker, "a < 5", version=2, channel=channel)
    assert pull(broker, sub_version=2) == (ResponseCode.SUCCESS, ["1"], 2)
    join(broker, "a < 5", version=3, channel=channel)
    assert saved(broker)["clientVersion"] == 3
    assert saved(broker)["expression"] == "a < 5"


def test_a_pull_is_refused_until_the_group_has_said_what_it_wants(broker: BrokerUnderTest) -> None:
    """No subscription, no filter, an older subscription, an older filter."""
    put(broker, 9)
    assert pull(broker)[0] == ResponseCode.SUBSCRIPTION_NOT_EXIST
    join(broker)
    assert pull(broker, sub_version=2)[0] == ResponseCode.SUBSCRIPTION_NOT_LATEST
    broker.core.filters.left("g")
    broker.consumers.change_count += 1
    assert pull(broker)[0] == ResponseCode.FILTER_DATA_NOT_EXIST
    wanted = SubscriptionData(topic="T", sub_string=SQL, expression_type="SQL92", sub_version=2)
    join(broker)
    with pytest.raises(Exception, match="not latest") as raised:
        broker.core.filters.of_group("g", wanted, 2)
    assert getattr(raised.value, "code", None) == ResponseCode.FILTER_DATA_NOT_LATEST


def test_a_filter_dies_with_its_group_and_is_removed_a_day_later(broker: BrokerUnderTest) -> None:
    channel, _ = join(broker)
    broker.consumers.channel_closed(channel)
    assert saved(broker)["dead"]
    assert saved(broker)["deadTime"] == broker.clock.ms
    join(broker)
    assert not saved(broker)["dead"]
    join(broker, None, channel=channel)
    assert saved(broker)["dead"]
    broker.clock.ms += DEAD_LIFE_MS
    other, _ = join(broker, SQL, topic="other")
    with pytest.raises(KeyError):
        saved(broker)
    broker.consumers.channel_closed(other)
    assert broker.budget.kept_bytes(broker_host(other)) < 100_000


def test_dead_filters_are_looked_for_once_a_minute(broker: BrokerUnderTest) -> None:
    """Not at each heartbeat, which would walk all groups."""
    channel, _ = join(broker)
    broker.consumers.channel_closed(channel)
    for passed_ms, is_there in ((DEAD_LIFE_MS - 1, True), (1, True), (PRUNE_INTERVAL_MS, False)):
        broker.clock.ms += passed_ms
        join(broker, f"a > {broker.clock.ms}", topic="other", version=broker.clock.ms)
        assert ("T" in broker.core.filters._groups["g"]) is is_there


def broker_host(channel: MemoryChannel) -> Any:
    """What a client's entries count for."""
    from headrace_broker.host_budget import Host

    return Host.of(channel)


def test_after_a_restart_no_message_passes_unfiltered(tmp_path: Path) -> None:
    """Fields that another broker has written stay; what has been dead for a day does not."""
    broker = BrokerUnderTest(tmp_path)
    broker.create_topic("T", 1)
    put(broker, 1, 9)
    join(broker)
    file = broker.config.store_path_root_dir / "config" / "consumerFilter.json"
    content = json.loads(file.read_text())
    groups = content["filterDataByTopic"]["T"]["groupFilterData"]
    for fields in (content, content["filterDataByTopic"]["T"], groups["g"]):
        fields["compiledBy"] = {"x": [1]}
    groups["old"] = {**groups["g"], "dead": True, "deadTime": 1}
    broker.close()
    file.write_text(json.dumps(content))
    again = BrokerUnderTest(tmp_path)
    assert pull(again)[0] == ResponseCode.SUBSCRIPTION_NOT_EXIST
    channel, _ = join(again)
    assert pull(again) == (ResponseCode.SUCCESS, ["9"], 2)
    assert saved(again)["compiledBy"] == {"x": [1]}
    assert not saved(again)["dead"]
    assert "old" not in file.read_text()
    join(again, "a < 5", version=2, channel=channel)
    content = json.loads(file.read_text())
    for fields in (content, content["filterDataByTopic"]["T"], saved(again)):
        assert fields["compiledBy"] == {"x": [1]}


# As a ConsumerFilterManager of RocketMQ 5.5.0 has written it, which had read a file of ours.
OF_APACHE = """{
	"filterDataByTopic":{
		"T":{
			"groupFilterData":{
				"g":{
					"bloomFilterData":{
						"bitNum":112,
						"bitPos":[90,68,28]
					},
					"bornTime":1700000000000,
					"clientVersion":7,
					"consumerGroup":"g",
					"dead":true,
					"deadTime":1700000000000,
					"expression":"a > 5",
					"expressionType":"SQL92",
					"topic":"T"
				}
			},
			"topic":"T"
		}
	}
}"""


def test_a_file_of_apaches_broker_is_read(tmp_path: Path) -> None:
    """The filter is alive when its group is back, with its birth and its bits."""
    folder = tmp_path / "store" / "config"
    folder.mkdir(parents=True)
    (folder / "consumerFilter.json").write_text(OF_APACHE)
    broker = BrokerUnderTest(tmp_path)
    broker.clock.ms += 5000
    join(broker, version=8)
    expected = json.loads(OF_APACHE)["filterDataByTopic"]["T"]["groupFilterData"]["g"]
    changes = {"clientVersion": 8, "dead": False, "deadTime": 0}
    assert saved(broker) == {**expected, **changes}
    assert bit_positions("g", "T") == expected["bloomFilterData"]["bitPos"]


# -- pulls -----------------------------------------------------------------------------------------


def test_a_pull_with_its_own_filter(broker: BrokerUnderTest) -> None:
    put(broker, 1, 9, "bad", 7)
    assert pull(broker, **own(SQL)) == (ResponseCode.SUCCESS, ["9", "7"], 4)
    assert pull(broker, max_msg_nums=1, **own(SQL))[1] == ["9"]
    assert pull(broker, **own("a = 'x'")) == (ResponseCode.PULL_RETRY_IMMEDIATELY, [], 4)
    code, (remark,), _ = pull(broker, **own("a = 'x"))
    assert code == ResponseCode.SUBSCRIPTION_PARSE_FAILED
    assert "line 1, column 5: a text in quotes that has no end" in remark


@pytest.mark.parametrize("count", [0, -1, -(1 << 31)])
def test_a_pull_of_no_message_gets_one(broker: BrokerUnderTest, count: int) -> None:
    """As without a filter, whatever has been judged before."""
    put(broker, 1, 9, 8)
    for _ in range(2):
        assert pull(broker, max_msg_nums=count, **own(SQL)) == (ResponseCode.SUCCESS, ["9"], 2)
        assert pull(broker, 2, max_msg_nums=count, **own(SQL))[1] == ["8"]
    assert pull(broker, max_msg_nums=count, **own("*", "TAG"))[1] == ["1"]


async def test_a_held_pull_is_answered_by_what_passes(broker: BrokerUnderTest) -> None:
    """It moves past all else, and looks at each message once."""
    put(broker, 9)
    channel = MemoryChannel()
    fields = {**own(SQL), "sys_flag": SUSPEND | SUBSCRIPTION}
    broker.send(RequestCode.PULL_MESSAGE, pull_header(1, **fields), channel=channel)
    for value in range(5):
        put(broker, value)
        assert channel.replies() == []
    assert broker.long_polling.held_count == 1
    put(broker, 7)
    ((reply, body),) = channel.replies()
    assert reply.code == ResponseCode.SUCCESS
    assert [(each.body, each.queue_offset) for each in decode_records(body)] == [(b"7", 6)]


def test_offsets_outside_are_answered_as_without_a_filter(broker: BrokerUnderTest) -> None:
    put(broker, 1)
    assert pull(broker, 1, **own(SQL))[0] == ResponseCode.PULL_NOT_FOUND
    assert pull(broker, 9, **own(SQL))[0] == ResponseCode.PULL_OFFSET_MOVED


@pytest.mark.parametrize(
    "text",
    [
        "a IN (" + ",".join(f"'{chr(0x5000 + number)}'" for number in range(1000)) + ")",
        "a IN (" + ",".join(f"'{number}'" for number in range(1000)) + ")",
        " OR ".join(f"a{number} IN ('1')" for number in range(100)),
        "a = '" + "x" * 8000 + "'",
    ],
    ids=["characters", "numbers", "operands", "text"],
)
def test_the_memory_of_a_filter_counts(text: str) -> None:
    """What is compiled takes no more than what is counted, whatever the text is made of."""
    found: list[Filter] = []
    kept = kept_bytes(lambda: found.append(Filter(None, Expression(text, parse(text)))))
    assert 0 < kept <= filter_bytes(found[0])


# -- retries ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("is_on", "expected"), [(False, ["1", "9", "2"]), (True, ["9", "2"])])
def test_retries_pass_the_filter_of_their_topic(
    tmp_path: Path, *, is_on: bool, expected: list[str]
) -> None:
    """Where filterSupportRetry is on; those of other topics always pass."""
    broker = BrokerUnderTest(tmp_path, broker_config(tmp_path, filter_support_retry=is_on))
    broker.create_topic("T", 1)
    join(broker)
    retries = "%RETRY%g"
    put(broker, 1, 9, topic=retries, RETRY_TOPIC="T")
    put(broker, 2, topic=retries, RETRY_TOPIC="other")
    fields = {"topic": retries, **own("*", "TAG")}
    assert pull(broker, **fields) == (ResponseCode.SUCCESS, expected, 3)
