"""Messages that requests name by their place are judged by what is found there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio.testing

from headrace_protocol.admin_headers import ResumeCheckHalfMessageHeader
from headrace_protocol.bodies import HeartbeatData, ProducerData
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import (
    ConsumerSendMsgBackHeader,
    EndTransactionHeader,
    QueryMessageHeader,
    RecallMessageHeader,
    ViewMessageHeader,
)
from headrace_protocol.message import TRANSACTION_COMMIT, TRANSACTION_ROLLBACK, decode_record
from headrace_protocol.message_ids import encode_offset_message_id
from headrace_protocol.recall_handle import RecallHandle
from headrace_protocol.system_topics import (
    CHECK_MAX_TIME_TOPIC,
    HALF_TOPIC,
    SCHEDULE_TOPIC,
    TIMER_TOPIC,
    UNDELIVERED_TOPIC,
)
from tests.support.broker import Answer, BrokerUnderTest
from tests.support.ledger import GROUP, Half, Ledger, checks
from tests.support.memory import HOST
from tests.support.rights import client_of, rights_of, users_of

OK, REFUSED = ResponseCode.SUCCESS, ResponseCode.NO_PERMISSION
USERS = {
    "alice": ["Topic:T Pub,Sub,Update", "Group:g Sub,Create"],
    "bob": ["Topic:U Pub,Sub,Update", "Group:g Sub,Create"],
    "tools": ["Topic:T Get", "Cluster:DefaultCluster Get,Update"],
}
REAL: dict[str, Any] = {"REAL_TOPIC": "T", "REAL_QID": "0"}


@pytest.fixture
def broker(tmp_path: Path) -> BrokerUnderTest:
    broker = BrokerUnderTest(tmp_path, rights=rights_of(users_of(**USERS)))
    for topic in ("T", "U", "%RETRY%g", "%RETRY%other", "%DLQ%other"):
        broker.create_topic(topic, 1)
    return broker


def asked(broker: BrokerUnderTest, user: str, code: int, header: Any) -> Answer:
    return broker.ask(code, header, channel=client_of(user))


# -- VIEW_MESSAGE_BY_ID and QUERY_MESSAGE ----------------------------------------------------------


def view(broker: BrokerUnderTest, user: str, offset: int, topic: str | None = None) -> Answer:
    header = ViewMessageHeader(offset=offset, topic=topic)
    return asked(broker, user, RequestCode.VIEW_MESSAGE_BY_ID, header)


@pytest.mark.parametrize(
    ("topic", "properties", "readers"),
    [
        ("T", {}, {"root", "alice", "tools"}),
        ("U", {"REAL_TOPIC": "T"}, {"root", "bob"}),
        ("%RETRY%g", {"RETRY_TOPIC": "U"}, {"root", "alice", "bob"}),
        ("%RETRY%other", {"RETRY_TOPIC": "T"}, {"root"}),
        ("%DLQ%other", {"RETRY_TOPIC": "T"}, {"root"}),
        (HALF_TOPIC, REAL, {"root", "alice", "tools"}),
        (SCHEDULE_TOPIC, REAL, {"root", "alice", "tools"}),
        (TIMER_TOPIC, REAL, {"root", "alice", "tools"}),
        (SCHEDULE_TOPIC, {}, {"root", "tools"}),
        (UNDELIVERED_TOPIC, {}, {"root", "tools"}),
    ],
)
def test_a_record_is_shown_to_those_who_may_read_its_topic(
    broker: BrokerUnderTest,
    topic: str,
    properties: dict[str, str],
    readers: set[str],
) -> None:
    broker.topics.create_system_topic(topic)
    offset = broker.store_message(topic, 0, b"secret", **properties)
    for user in ("root", *USERS):
        answer = view(broker, user, offset)
        assert answer.code == (OK if user in readers else REFUSED), user
        assert (b"secret" in answer.body) == (user in readers)
        if user not in readers:  # whatever topic a client names
            assert {view(broker, user, offset, named).code for named in "TU"} == {REFUSED}


def test_a_query_by_key_finds_messages_of_its_topic_only(broker: BrokerUnderTest) -> None:
    for topic in "TU":
        broker.store_message(topic, 0, topic.encode(), KEYS="k")
    for user, topic, code in (
        ("alice", "T", OK),
        ("alice", "U", REFUSED),
        ("tools", "T", OK),
        ("bob", "T", REFUSED),
    ):
        header = QueryMessageHeader(
            topic=topic, key="k", max_num=9, begin_timestamp=0, end_timestamp=1 << 60
        )
        answer = asked(broker, user, RequestCode.QUERY_MESSAGE, header)
        assert answer.code == code
        assert code == REFUSED or decode_record(answer.body).topic == topic


# -- CONSUMER_SEND_MSG_BACK ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("user", "topic", "group", "code"),
    [
        ("alice", "T", "g", OK),
        ("alice", "%RETRY%g", "g", OK),
        ("alice", "U", "g", REFUSED),
        ("alice", "T", "other", REFUSED),
        ("alice", "%RETRY%other", "g", REFUSED),
        ("bob", "T", "g", REFUSED),
    ],
)
@pytest.mark.parametrize("level", [-1, 0, 3])
def test_nobody_copies_messages_of_others_into_a_group(
    broker: BrokerUnderTest, user: str, topic: str, group: str, code: int, level: int
) -> None:
    offset = broker.store_message(topic, 0, b"secret")
    for name in ("g", "other"):
        broker.groups.get_or_create(name, HOST)
    end = broker.store.commit_log.max_offset
    header = ConsumerSendMsgBackHeader(offset=offset, group=group, delay_level=level)
    answer = asked(broker, user, RequestCode.CONSUMER_SEND_MSG_BACK, header)
    assert answer.code == code, answer.remark
    assert (broker.store.commit_log.max_offset > end) == (code == OK)


# -- transactions ----------------------------------------------------------------------------------


def end_by(ledger: Ledger, user: str, half: Half, decision: int, topic: str | None) -> Answer:
    header = EndTransactionHeader(
        producer_group=GROUP,
        tran_state_table_offset=half.queue_offset,
        commit_log_offset=half.physical_offset,
        commit_or_rollback=decision,
        msg_id=half.transaction_id,
        topic=topic,
    )
    return asked(ledger.broker, user, RequestCode.END_TRANSACTION, header)


def begin_by(ledger: Ledger, user: str, topic: str = "T") -> Half:
    channel = client_of(user)
    produce = ledger.produce
    ledger.produce = lambda body, **fields: produce(body, channel, **fields)  # type: ignore[method-assign]
    try:
        return ledger.send(b"paid")
    finally:
        del ledger.produce


@pytest.mark.parametrize("decision", [TRANSACTION_COMMIT, TRANSACTION_ROLLBACK])
@pytest.mark.parametrize("topic", [None, "T", "U", HALF_TOPIC])
async def test_a_half_is_decided_by_those_who_may_send_to_its_real_topic(
    tmp_path: Path, decision: int, topic: str | None
) -> None:
    ledger = Ledger(tmp_path, rights=rights_of(users_of(**USERS)))
    ledger.broker.create_topic("T", 2)
    async with ledger.running():
        half = begin_by(ledger, "alice")
        for user in ("bob", "tools"):
            answer = end_by(ledger, user, half, decision, topic)
            assert answer.code == REFUSED
            assert f"User:{user} has no permission to access Topic:T from" in answer.remark
        # Its honest producer answers a check, which names the topic of halves.
        assert end_by(ledger, "alice", half, decision, topic).code == OK
    assert ledger.bodies() == ([b"paid"] if decision == TRANSACTION_COMMIT else [])


async def test_a_check_goes_to_those_who_may_send_to_the_real_topic(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """Anybody may join a producer group, and a check has the message."""
    ledger = Ledger(tmp_path, rights=rights_of(users_of(**USERS)))
    ledger.broker.create_topic("T", 2)
    body = HeartbeatData(client_id="p", producer_data_set=[ProducerData(group_name=GROUP)]).encode()
    channels = {user: client_of(user) for user in ("bob", "alice", "tools")}
    async with ledger.running():
        begin_by(ledger, "alice")
        for channel in channels.values():
            ledger.broker.ask(RequestCode.HEART_BEAT, body=body, channel=channel)
        for _ in range(3):
            await ledger.check_later()
    assert {user for user, channel in channels.items() if checks(channel)} == {"alice"}


@pytest.mark.parametrize(("user", "code"), [("bob", REFUSED), ("tools", REFUSED)])
def test_a_discarded_half_is_resumed_by_those_who_may_change_its_topic(
    broker: BrokerUnderTest, user: str, code: int
) -> None:
    broker.topics.create_system_topic(CHECK_MAX_TIME_TOPIC)
    offset = broker.store_message(CHECK_MAX_TIME_TOPIC, 0, **REAL)
    message_id = encode_offset_message_id(broker.store.settings.store_host, offset)
    header = ResumeCheckHalfMessageHeader(topic="U", msg_id=message_id)
    answer = asked(broker, user, RequestCode.RESUME_CHECK_HALF_MESSAGE, header)
    assert answer.code == code
    assert "Topic:T" in answer.remark or "Topic:U" in answer.remark


def test_a_handle_recalls_messages_of_its_own_topic_only(broker: BrokerUnderTest) -> None:
    handle = RecallHandle("U", "broker-a", 1, "key").encode()
    for user, topic, code in (
        ("alice", "U", REFUSED),
        ("alice", "T", ResponseCode.ILLEGAL_OPERATION),
        ("bob", "U", ResponseCode.ILLEGAL_OPERATION),
    ):
        header = RecallMessageHeader(topic=topic, recall_handle=handle)
        assert asked(broker, user, RequestCode.RECALL_MESSAGE, header).code == code
