"""The table of rights: equal to Apache's where that is safe, without a hole where it is not."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from headrace_protocol.codes import RequestCode as C
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.header_codecs import SerializeType
from headrace_protocol.rights.rules import Action, Kind
from headrace_protocol.rights.wanted import (
    ADMINISTRATIVE,
    GET,
    OWN_CLUSTER,
    PUB,
    SUB,
    TABLE,
    UPDATE,
    Wanted,
    is_administrative,
    wanted,
    wanted_of_topic,
)
from headrace_protocol.system_topics import HALF_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC
from tests.abuse.hostile import plain_fields
from tests.support.broker import BrokerUnderTest, brokers_of_a_test
from tests.support.nameserver import NameServerUnderTest
from tests.support.rights import plain_request, request_of
from tests.support.wire_types import REQUEST_HEADERS

APACHE = Path(__file__).with_name("apache_rights.txt")

# What is asked here where Apache's broker asks otherwise, and why.
DIFFERENCES = {
    "what a consumer may read it may also find": {
        "SEARCH_OFFSET_BY_TIMESTAMP GET_MAX_OFFSET GET_MIN_OFFSET GET_EARLIEST_MSG_STORETIME"
        " VIEW_MESSAGE_BY_ID": "Topic Sub|Get",
        "QUERY_CONSUME_QUEUE": "Topic+Group Sub|Get",
    },
    "clients of a static topic need its mapping": {"GET_TOPIC_CONFIG": "Topic Pub|Sub|Get"},
    "judged by the half message, whose topic the header of a check-back does not name": {
        "END_TRANSACTION": "-"
    },
    "what is permitted of it is taken": {"HEART_BEAT": "-"},
    "a broker that may register may also ask": {
        "QUERY_DATA_VERSION GET_BROKER_MEMBER_GROUP": "Cluster Update|Get"
    },
    "progress is read from the other group": {
        "CLONE_GROUP_OFFSET": "Topic+Group Update, Group Update|Get"
    },
    "open in Apache RocketMQ to every user": {
        "UPDATE_AND_CREATE_TOPIC_LIST UPDATE_AND_CREATE_STATIC_TOPIC": "Topic Create",
        "UPDATE_AND_CREATE_SUBSCRIPTIONGROUP UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST": (
            "Group Create"
        ),
        "CLEAN_EXPIRED_CONSUMEQUEUE CLEAN_UNUSED_TOPIC SET_COMMITLOG_READ_MODE": "Cluster Update",
        "GET_SYSTEM_TOPIC_LIST_FROM_BROKER": "Cluster Get",
        "UPDATE_BROKER_CONFIG DELETE_EXPIRED_COMMITLOG": "Cluster Update",
        "SEND_REPLY_MESSAGE SEND_REPLY_MESSAGE_V2": "Topic Pub",
        "GET_BROKER_HA_STATUS": "Cluster Get",
        "SWITCH_TIMER_ENGINE": "Cluster Update",
        "GET_BROKER_CONFIG GET_BROKER_RUNTIME_INFO GET_ALL_CONSUMER_OFFSET GET_ALL_DELAY_OFFSET"
        " GET_TIMER_CHECK_POINT GET_TIMER_METRICS": "Cluster Get",
        "CHECK_CLIENT_CONFIG LITE_PULL_MESSAGE": "Topic+Group Sub",
        "QUERY_ASSIGNMENT BATCH_ACK_MESSAGE": "Topic+Group Sub",
        "SET_MESSAGE_REQUEST_MODE": "Topic+Group Update",
        "GET_ALL_MESSAGE_REQUEST_MODE": "Cluster Get",
    },
}
# Codes whose parts, or whose messages, their functions judge one by one.
JUDGED_INSIDE = {
    "END_TRANSACTION HEART_BEAT",
    "STAGE_ABORT STAGE_COMMIT STAGE_DECIDE STAGE_FORGET STAGE_SEAL STAGE_STATE",
    "GET_ALL_SUBSCRIPTIONGROUP_CONFIG GET_ALL_TOPIC_CONFIG LIST_TRANSACTIONS",
    "GET_ALL_TOPIC_LIST_FROM_NAMESERVER GET_BROKER_CLUSTER_INFO GET_TOPICS_BY_CLUSTER",
    "GET_SYSTEM_TOPIC_LIST_FROM_NS",
    "GET_HAS_UNIT_SUB_TOPIC_LIST GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST GET_UNIT_TOPIC_LIST",
}


def text_of(wants: Iterable[Wanted]) -> str:
    """Rights as in the file of Apache's."""
    kinds: dict[frozenset[Action], list[str]] = {}
    for want in wants:
        kinds.setdefault(want.actions, []).append(want.kind.value)
    return ", ".join(f"{'+'.join(kinds[each])} {actions_text(each)}" for each in kinds) or "-"


def actions_text(actions: frozenset[Action]) -> str:
    return "|".join(action.value for action in Action if action in actions)


def apaches() -> dict[int, str]:
    lines = APACHE.read_text().splitlines()
    rows = [line.split(" ") for line in lines if not line.startswith("#")]
    return {
        int(code): "-" if kinds == "-" else f"{kinds} {actions}" for code, _, kinds, actions in rows
    }


def codes(names: str) -> list[int]:
    return [C[name] for name in names.split()]


OURS = {
    code: rights
    for reason in DIFFERENCES.values()
    for names, rights in reason.items()
    for code in codes(names)
}


@pytest.mark.parametrize("codec", list(SerializeType))
def test_rows_ask_what_apache_asks_but_for_the_named_differences(codec: SerializeType) -> None:
    theirs = apaches()
    shared = TABLE.keys() & theirs.keys() & set(C)
    assert len(shared) > 60
    assert OURS.keys() <= shared
    fitting = [c for c in shared if codec is not SerializeType.ROCKETMQ or c < 2**15]
    for code in fitting:
        asked = text_of(wanted(plain_request(code, codec)))
        listed = code in codes(" ".join(JUDGED_INSIDE))
        assert asked == OURS.get(code, "-" if listed else theirs[code]), C(code).name
        assert asked != theirs[code] or code not in OURS, C(code).name


def test_every_routed_code_has_a_row(tmp_path: Path) -> None:
    with brokers_of_a_test():
        routed = {
            *BrokerUnderTest(tmp_path).registry.functions,
            *NameServerUnderTest().registry.functions,
        }
    assert not routed - TABLE.keys(), "these codes are for Super users only"


def test_rows_read_the_header_of_their_code() -> None:
    for code, row in TABLE.items():
        if row.header is not None:
            assert row.header is REQUEST_HEADERS[code], C(code).name


def test_nothing_is_open_but_what_is_judged_inside(tmp_path: Path) -> None:
    inside = set(codes(" ".join(JUDGED_INSIDE)))
    for code in {*TABLE} & set(C):
        if not TABLE[code].is_for_anybody:
            is_asked = bool(list(wanted(plain_request(code))))
            assert is_asked != (code in inside), C(code).name


def test_a_code_without_a_row_is_for_super_users() -> None:
    with pytest.raises(RequestError) as caught:
        wanted(request_of(29_999, {}))
    assert caught.value.code == ResponseCode.NO_PERMISSION
    assert "CODE_29999 is permitted to Super users only" in caught.value.remark


@pytest.mark.parametrize(
    ("code", "fields", "wants"),
    [
        # Names that are left out: the request's function judges what it finds instead.
        (C.VIEW_MESSAGE_BY_ID, {"offset": 0}, []),
        (C.UNREGISTER_CLIENT, {"clientID": "c", "producerGroup": "p"}, []),
        (C.GET_CONSUME_STATS, {"consumerGroup": "g"}, [Wanted(Kind.GROUP, "g", GET)]),
        (C.LIST_TIMERS, {"maxNum": 1}, []),
        (C.TIER_STATUS, {"maxNum": 1}, []),
        # ... or the request reaches all topics.
        (C.TIER_RESUME, {}, [Wanted(Kind.CLUSTER, OWN_CLUSTER, UPDATE)]),
        (C.TIER_RESUME, {"topic": "T"}, [Wanted(Kind.TOPIC, "T", UPDATE)]),
        (C.RESUME_CHECK_HALF_MESSAGE, {}, [Wanted(Kind.CLUSTER, OWN_CLUSTER, UPDATE)]),
        (C.DELETE_TOPIC_IN_NAMESRV, {"topic": "T"}, [Wanted(Kind.CLUSTER, OWN_CLUSTER, UPDATE)]),
        (
            C.DELETE_TOPIC_IN_NAMESRV,
            {"topic": "T", "clusterName": "c"},
            [Wanted(Kind.CLUSTER, "c", UPDATE)],
        ),
        # The template of new topics has no messages.
        (C.GET_ROUTEINFO_BY_TOPIC, {"topic": "TBW102"}, []),
        (C.GET_ROUTEINFO_BY_TOPIC, {"topic": "T"}, [Wanted(Kind.TOPIC, "T", PUB | SUB | GET)]),
    ],
)
def test_names_that_are_left_out(code: C, fields: dict[str, Any], wants: list[Wanted]) -> None:
    assert wanted(request_of(code, fields)) == wants


@pytest.mark.parametrize(
    ("topic", "actions", "want"),
    [
        ("%RETRY%g", PUB, Wanted(Kind.GROUP, "g", SUB)),
        ("%RETRY%g", SUB, Wanted(Kind.GROUP, "g", SUB)),
        ("%DLQ%ns%g", SUB | GET, Wanted(Kind.GROUP, "ns%g", SUB | GET)),
        ("%DLQ%g", UPDATE, Wanted(Kind.GROUP, "g", UPDATE)),
        ("%RETRY%", SUB, Wanted(Kind.GROUP, "", SUB)),
        ("RETRY%g", SUB, Wanted(Kind.TOPIC, "RETRY%g", SUB)),
        ("RMQ_SYS_TRACE_TOPIC", PUB, Wanted(Kind.TOPIC, "RMQ_SYS_TRACE_TOPIC", PUB)),
        *(
            (topic, actions, Wanted(Kind.CLUSTER, OWN_CLUSTER, cluster_actions))
            for topic in (HALF_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC, "%RETRY%CID_RMQ_SYS_TRANS")
            for actions, cluster_actions in ((SUB, GET), (SUB | GET, GET), (PUB, UPDATE))
        ),
    ],
)
def test_topics_that_count_as_something_else(
    topic: str, actions: frozenset[Action], want: Wanted
) -> None:
    assert wanted_of_topic(topic, actions) == want


@pytest.mark.parametrize("code", [C.PULL_MESSAGE, C.LITE_PULL_MESSAGE, C.BULK_PULL])
def test_a_retry_topic_is_that_of_its_own_group(code: C) -> None:
    fields = {**plain_fields(code), "topic": "%RETRY%theirs", "consumerGroup": "mine"}
    assert wanted(request_of(code, fields)) == [
        Wanted(Kind.GROUP, "theirs", SUB),
        Wanted(Kind.GROUP, "mine", SUB),
    ]


@pytest.mark.parametrize("code", [C.ACK_MESSAGE, C.CHANGE_MESSAGE_INVISIBLETIME])
@pytest.mark.parametrize(
    ("topic", "asked"),
    [
        ("T", Wanted(Kind.TOPIC, "T", SUB)),
        ("%RETRY%mine_T", Wanted(Kind.TOPIC, "T", SUB)),
        ("%RETRY%mine+T", Wanted(Kind.TOPIC, "T", SUB)),
        ("%RETRY%mine", Wanted(Kind.GROUP, "mine", SUB)),
        ("%RETRY%theirs_T", Wanted(Kind.GROUP, "theirs_T", SUB)),
    ],
)
def test_a_popped_message_needs_its_own_topic(code: C, topic: str, asked: Wanted) -> None:
    fields = {**plain_fields(code), "topic": topic, "consumerGroup": "mine"}
    wants = list(wanted(request_of(code, fields)))
    assert wants == [asked, Wanted(Kind.GROUP, "mine", SUB)]


def test_each_ack_of_a_batch_counts() -> None:
    acks = [{"t": topic, "c": group} for topic, group in (("T", "g"), ("T", "h"), ("U", "g"))]
    body = json.dumps({"acks": acks}).encode()
    wants = list(wanted(request_of(C.BATCH_ACK_MESSAGE, {}, body)))
    assert sorted(want.name for want in wants) == ["T", "U", "g", "h"]


def test_each_topic_of_a_body_counts() -> None:
    queues = [{"topic": topic, "brokerName": "b", "queueId": 0} for topic in ("T", "T", "U")]
    body = json.dumps({"consumerGroup": "g", "mqSet": queues}).encode()
    wants = list(wanted(request_of(C.LOCK_BATCH_MQ, {}, body)))
    assert sorted(want.name for want in wants) == ["T", "U", "g"]


def test_administration_is_what_changes_topics_groups_and_clusters() -> None:
    assert {C.PUT_KV_CONFIG, C.REGISTER_BROKER, C.CLONE_GROUP_OFFSET} <= ADMINISTRATIVE
    assert {C.COMPACT_TOPIC, C.AUTH_LIST_USER} <= ADMINISTRATIVE
    assert not ADMINISTRATIVE & {C.UPDATE_CONSUMER_OFFSET, C.SEND_MESSAGE_V2, C.HEART_BEAT}
    assert is_administrative(C.DELETE_TOPIC_IN_BROKER)
    assert not is_administrative(C.GET_BROKER_CONFIG)
