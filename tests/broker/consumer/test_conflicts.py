"""Members of one group with different subscriptions: a warning, or a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from headrace_broker.consumer.conflicts import subscribed
from headrace_protocol.bodies import (
    ConsumerData,
    HeartbeatData,
    SubscriptionData,
    SubscriptionGroupConfig,
)
from headrace_protocol.codes import RequestCode, ResponseCode
from tests.support.broker import Answer, BrokerUnderTest, broker_config
from tests.support.channel import MemoryChannel
from tests.support.wire import pull_header

TEXT = (
    "group g: client c2 subscribes to t (b || c), client c1 to t (a), u (*); "
    "all members of a group must have the same subscriptions"
)


@pytest.fixture
def refusing(tmp_path: Path) -> BrokerUnderTest:
    return BrokerUnderTest(tmp_path, broker_config(tmp_path, subscription_conflict="refuse"))


def beat(
    broker: BrokerUnderTest,
    client_id: str,
    channel: MemoryChannel | None = None,
    /,
    model: str = "CLUSTERING",
    **tags: str,
) -> Answer:
    subscriptions = [SubscriptionData(topic=topic, sub_string=text) for topic, text in tags.items()]
    data = ConsumerData(group_name="g", message_model=model, subscription_data_set=subscriptions)
    body = HeartbeatData(client_id=client_id, consumer_data_set=[data]).encode()
    return broker.ask(RequestCode.HEART_BEAT, body=body, channel=channel)


def warnings(broker: BrokerUnderTest, *beats: tuple[Any, ...]) -> list[str]:
    with capture_logs() as logs:
        for client_id, channel, subscriptions in beats:
            assert beat(broker, client_id, channel, **subscriptions).code == ResponseCode.SUCCESS
    return [line["reason"] for line in logs if line["event"] == "subscriptions differ"]


def test_a_conflict_is_logged_once(broker: BrokerUnderTest) -> None:
    one, two = MemoryChannel(), MemoryChannel()
    first, second = {"t": "a", "u": "*"}, {"t": "c||b"}
    beats = [("c1", one, first), ("c2", two, second), ("c1", one, first), ("c2", two, second)]
    assert warnings(broker, *beats) == [TEXT]
    assert warnings(broker, ("c2", MemoryChannel(), second)) == []
    assert len(warnings(broker, ("c3", MemoryChannel(), {"t": "d"}))) == 1


def test_heartbeats_are_answered_with_the_conflict(broker: BrokerUnderTest) -> None:
    one, two = MemoryChannel(), MemoryChannel()
    assert beat(broker, "c1", one, t="a", u="*").remark == ""
    for _ in range(2):
        remark = beat(broker, "c2", two, t="c||b").remark
        assert "client c1 subscribes to t (a), u (*), client c2 to t (b || c)" in remark
    assert beat(broker, "c2", two, t="a", u="*").remark == ""


def test_the_same_subscriptions_are_no_conflict(broker: BrokerUnderTest) -> None:
    beats = [
        ("c1", MemoryChannel(), {"t": "a||b", "u": "*"}),
        ("c2", MemoryChannel(), {"u": "", "t": " b || a "}),
        # It assigns itself queues.
        ("c3", MemoryChannel(), {}),
    ]
    assert warnings(broker, *beats) == []


def test_a_client_does_not_conflict_with_itself_or_those_that_left(
    broker: BrokerUnderTest,
) -> None:
    one, again = MemoryChannel(), MemoryChannel()
    assert warnings(broker, ("c1", one, {"t": "a"}), ("c1", again, {"t": "b"})) == []
    for channel in (one, again):
        broker.consumers.channel_closed(channel)
    assert warnings(broker, ("c2", MemoryChannel(), {"t": "c"})) == []


def test_a_newcomer_is_refused(refusing: BrokerUnderTest) -> None:
    assert beat(refusing, "c1", t="a", u="*").code == ResponseCode.SUCCESS
    two = MemoryChannel()
    for _ in range(2):
        answer = beat(refusing, "c2", two, t="b || c")
        assert (answer.code, answer.remark) == (ResponseCode.NO_PERMISSION, TEXT)
    assert [member.client_id for member in refusing.consumers.members("g")] == ["c1"]
    assert beat(refusing, "c2", two, t="a", u="*").code == ResponseCode.SUCCESS


def pull(broker: BrokerUnderTest) -> Answer:
    header = pull_header(topic="t", max_msg_nums=1, sys_flag=0)
    return broker.ask(RequestCode.PULL_MESSAGE, header)


def test_a_group_that_must_not_broadcast(broker: BrokerUnderTest) -> None:
    broker.create_topic("t")
    broker.store_message("t", 0)
    broker.groups.put(SubscriptionGroupConfig(group_name="g", consume_broadcast_enable=False))
    channel = MemoryChannel()
    beat(broker, "c1", channel, t="*")
    assert pull(broker).code == ResponseCode.SUCCESS
    beat(broker, "c1", channel, model="BROADCASTING", t="*")
    answer = pull(broker)
    assert answer.code == ResponseCode.NO_PERMISSION
    assert "consumeBroadcastEnable is false" in answer.remark
    assert answer.command.ext()["forbiddenType"] == "4"
    broker.groups.put(SubscriptionGroupConfig(group_name="g"))
    assert pull(broker).code == ResponseCode.SUCCESS


def test_a_subscription_without_a_type_is_by_tag() -> None:
    """As clients of old versions send it."""
    of = [
        subscribed(
            ConsumerData(
                group_name="g",
                subscription_data_set=[
                    SubscriptionData(topic="t", sub_string=text, expression_type=kind)
                ],
            )
        )
        for kind, text in (("", "a||b"), ("TAG", "b || a"), ("SQL92", "b || a"))
    ]
    assert of[0] == of[1] != of[2]
