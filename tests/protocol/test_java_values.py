"""Values in JSON bodies as RocketMQ's reader takes them.

Each row of READS was decoded by RemotingSerializable of Apache RocketMQ 5.5.0 (fastjson2 2.0.59).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec import Struct

from headrace_protocol import fastjson
from headrace_protocol.bodies import (
    Body,
    ConsumerData,
    SubscriptionGroupConfig,
    TopicConfig,
    TopicRouteData,
)
from headrace_protocol.fastjson import MalformedJson
from headrace_protocol.java_values import ConsumeFromWhere, ConsumeType, MessageModel
from tests.protocol.test_bodies import body_type, json_frames
from tests.support.golden_frames import GoldenFrame

ACTIVELY, PASSIVELY, POP = "CONSUME_ACTIVELY", "CONSUME_PASSIVELY", "CONSUME_POP"

# Body, field on the wire, its JSON, our field, its value.
READS: list[tuple[type[Body], str, str, str, Any]] = [
    (ConsumerData, "consumeType", "0", "consume_type", ACTIVELY),
    (ConsumerData, "consumeType", "1.0", "consume_type", PASSIVELY),
    (ConsumerData, "consumeType", "2", "consume_type", POP),
    (ConsumerData, "consumeType", '"0"', "consume_type", ACTIVELY),
    (ConsumerData, "consumeType", '"consume_pop"', "consume_type", POP),
    (ConsumerData, "consumeType", '"xyz"', "consume_type", PASSIVELY),
    (ConsumerData, "consumeType", '""', "consume_type", PASSIVELY),
    (ConsumerData, "consumeType", "null", "consume_type", PASSIVELY),
    (ConsumerData, "messageModel", "0", "message_model", "BROADCASTING"),
    (ConsumerData, "messageModel", "1", "message_model", "CLUSTERING"),
    (ConsumerData, "consumeFromWhere", "0", "consume_from_where", "CONSUME_FROM_LAST_OFFSET"),
    (ConsumerData, "consumeFromWhere", "4", "consume_from_where", "CONSUME_FROM_FIRST_OFFSET"),
    (ConsumerData, "consumeFromWhere", "5", "consume_from_where", "CONSUME_FROM_TIMESTAMP"),
    (ConsumerData, "unitMode", "1", "unit_mode", True),
    (ConsumerData, "unitMode", "2", "unit_mode", False),
    (ConsumerData, "unitMode", '"Y"', "unit_mode", True),
    (ConsumerData, "unitMode", '"True"', "unit_mode", True),
    (ConsumerData, "unitMode", '"N"', "unit_mode", False),
    (ConsumerData, "unitMode", '""', "unit_mode", False),
    (ConsumerData, "groupName", "5", "group_name", "5"),
    (ConsumerData, "groupName", "5.5", "group_name", "5.5"),
    (ConsumerData, "groupName", "true", "group_name", "true"),
    (ConsumerData, "groupName", "null", "group_name", ""),
    (ConsumerData, "GroupName", '"x"', "group_name", ""),
    (ConsumerData, "nope", '{"a":[null]}', "group_name", ""),
    (ConsumerData, "subscriptionDataSet", "null", "subscription_data_set", []),
    (ConsumerData, "subscriptionDataSet", '""', "subscription_data_set", []),
    (SubscriptionGroupConfig, "retryMaxTimes", '"5"', "retry_max_times", 5),
    (SubscriptionGroupConfig, "retryMaxTimes", "5.7", "retry_max_times", 5),
    (SubscriptionGroupConfig, "retryMaxTimes", '"5.0"', "retry_max_times", 5),
    (SubscriptionGroupConfig, "retryMaxTimes", '""', "retry_max_times", 0),
    (SubscriptionGroupConfig, "retryMaxTimes", "true", "retry_max_times", 1),
    (SubscriptionGroupConfig, "consumeEnable", '"false"', "consume_enable", False),
    (SubscriptionGroupConfig, "attributes", '{"a":1}', "attributes", {"a": "1"}),
    (TopicConfig, "topicFilterType", "1", "topic_filter_type", "MULTI_TAG"),
    (TopicConfig, "attributes", '{"a":1,"b":null}', "attributes", {"a": "1"}),
]

# Body, field, and JSON that RocketMQ rejects as well.
REJECTS: list[tuple[type[Body], str, str]] = [
    (ConsumerData, "consumeType", "7"),
    (ConsumerData, "consumeType", "-1"),
    (ConsumerData, "consumeType", "true"),
    (ConsumerData, "consumeType", "1.23456e-10"),
    (ConsumerData, "consumeType", "1.00000000000001e+300"),
    (ConsumerData, "messageModel", "9" * 400),
    (ConsumerData, "unitMode", '"yes"'),
    (SubscriptionGroupConfig, "retryMaxTimes", '"x"'),
    (SubscriptionGroupConfig, "retryMaxTimes", '" 5"'),
    (SubscriptionGroupConfig, "retryMaxTimes", "99999999999"),
    (SubscriptionGroupConfig, "retryMaxTimes", '"99999999999"'),
]


@pytest.mark.parametrize(("kind", "field", "text", "name", "value"), READS)
def test_values_are_read_as_java_reads_them(
    kind: type[Body], field: str, text: str, name: str, value: Any
) -> None:
    assert getattr(kind.decode(f'{{"{field}":{text}}}'.encode()), name) == value


def test_a_value_that_may_be_missing_is_read_as_others_are() -> None:
    assert TopicRouteData.decode(b'{"orderTopicConf":5.5}').order_topic_conf == "5.5"
    assert TopicRouteData.decode(b'{"orderTopicConf":null}').order_topic_conf is None


@pytest.mark.parametrize(("kind", "field", "text"), REJECTS)
def test_other_values_are_rejected_with_their_field(
    kind: type[Body], field: str, text: str
) -> None:
    with pytest.raises(MalformedJson, match=rf"\$\.{field}|out of range"):
        kind.decode(f'{{"{field}":{text}}}'.encode())


def test_lists_hold_what_java_takes_for_items() -> None:
    data = ConsumerData.decode(
        b'{"subscriptionDataSet":{"topic":7,"subVersion":"12","tagsSet":[1,null,true],'
        b'"codeSet":["5",6.0]}}'
    )
    (subscription,) = data.subscription_data_set
    assert (subscription.topic, subscription.sub_version) == ("7", 12)
    assert (subscription.tags_set, subscription.code_set) == (["1", "true"], [5, 6])


# The ordinals of enums are those of their names in any body.
ORDINALS = {
    name: ordinal
    for kind in (ConsumeType, MessageModel, ConsumeFromWhere)
    for ordinal, name in enumerate(kind.__metadata__[0].extra["names"])  # type: ignore[attr-defined]
}


def quoted(value: Any) -> Any:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else value


def as_float(value: Any) -> Any:
    return float(value) if type(value) is int and abs(value) < 2**53 else value


def as_ordinal(value: Any) -> Any:
    return ORDINALS.get(value, value) if isinstance(value, str) else value


def as_number(value: Any) -> Any:
    """Text of digits, which a sender without types writes as a number."""
    is_digits = isinstance(value, str) and value.isdecimal() and str(int(value)) == value
    return int(value) if is_digits else value


def changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """The value with all its leaves changed."""
    if isinstance(value, dict):
        return {key: changed(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [changed(item, change) for item in value]
    return change(value)


@pytest.mark.parametrize("change", [quoted, as_float, as_ordinal, as_number])
def test_every_body_is_read_however_its_values_are_written(change: Callable[[Any], Any]) -> None:
    different = [
        frame.request_name
        for frame in json_frames()
        if _reread(frame, change) != fastjson.decode(frame.body, body_type(frame))
    ]
    assert different == []


def _reread(frame: GoldenFrame, change: Callable[[Any], Any]) -> Struct:
    text = fastjson.dumps(changed(fastjson.loads(frame.body), change))
    return fastjson.decode(text, body_type(frame))
