"""Heartbeats, pulls and the groups that they create; held pulls and rules that change."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from headrace_protocol.bodies import ConsumerData, HeartbeatData, ProducerData, SubscriptionData
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.columns import RecordColumns
from headrace_protocol.headers import BulkPullResponseHeader
from headrace_protocol.rights.users import UserKind, Users, UserStatus
from tests.support.broker import Answer, BrokerUnderTest
from tests.support.channel import MemoryChannel
from tests.support.memory import HOST
from tests.support.rights import client_of, rights_of, rules_of, user_of, users_of
from tests.support.running import in_background
from tests.support.wire import bulk_pull_header, pull_header

OK, REFUSED = ResponseCode.SUCCESS, ResponseCode.NO_PERMISSION
USERS = {
    "alice": ["Topic:T Sub", "Topic:mine* Sub", "Group:g Sub", "Group:mine* Sub,Create"],
    "bob": ["Topic:T Pub"],
}
SUSPEND = 0x2 | 0x4


@pytest.fixture
def users() -> Users:
    return users_of(**USERS)


@pytest.fixture
def broker(tmp_path: Path, users: Users) -> BrokerUnderTest:
    broker = BrokerUnderTest(tmp_path, rights=rights_of(users), commit_log_file_bytes=1 << 20)
    for topic in ("T", "U", "mine"):
        broker.create_topic(topic, 1)
    for group in ("g", "other"):
        broker.groups.get_or_create(group, HOST)
    return broker


def beat(groups: dict[str, list[str]], *producers: str) -> bytes:
    consumers = [
        ConsumerData(
            group_name=group,
            subscription_data_set=[
                SubscriptionData(topic=topic, sub_string="*", sub_version=1) for topic in topics
            ],
        )
        for group, topics in groups.items()
    ]
    return HeartbeatData(
        client_id="c",
        consumer_data_set=consumers,
        producer_data_set=[ProducerData(group_name=name) for name in producers],
    ).encode()


# -- heartbeats ------------------------------------------------------------------------------------


def sent(broker: BrokerUnderTest, user: str, body: bytes) -> Answer:
    return broker.ask(RequestCode.HEART_BEAT, body=body, channel=client_of(user))


def test_a_permitted_heartbeat_is_answered_as_ever(broker: BrokerUnderTest) -> None:
    answer = sent(broker, "alice", beat({"g": ["T", "mine", "%RETRY%g"]}, "producers"))
    assert (answer.code, answer.remark) == (OK, "")
    group = broker.consumers.group("g")
    assert group is not None
    assert group.subscriptions.keys() == {"T", "mine", "%RETRY%g"}


def test_what_is_permitted_is_taken_and_the_rest_is_named(broker: BrokerUnderTest) -> None:
    body = beat({"g": ["T", "U", "%RETRY%other"], "other": ["T"], "mine": ["mine"]}, "producers")
    answer = sent(broker, "alice", body)
    assert answer.code == REFUSED
    assert answer.remark == (
        "User:alice has no permission to access Topic:U, Topic:%RETRY%other, Group:other from "
        "127.0.0.1; the rest of the heartbeat was taken"
    )
    taken = {name: set(broker.consumers.group(name).subscriptions) for name in ("g", "mine")}  # type: ignore[union-attr]
    assert taken == {"g": {"T"}, "mine": {"mine"}}
    assert broker.consumers.group("other") is None
    assert len(broker.producers.members("producers")) == 1


def test_an_answer_names_ten_and_counts_the_rest(broker: BrokerUnderTest) -> None:
    answer = sent(broker, "alice", beat({"g": [f"no{number}" for number in range(13)]}))
    assert "Topic:no9 and 3 more from 127.0.0.1" in answer.remark


def test_other_rejections_are_named_as_well(broker: BrokerUnderTest) -> None:
    answer = sent(broker, "alice", beat({"other": [], "mine!": ["mine"]}))
    assert answer.code == REFUSED
    assert "Group:other from 127.0.0.1; the rest of the heartbeat was taken, except: " in (
        answer.remark
    )
    assert "mine!" in answer.remark


def test_producers_need_no_rule(broker: BrokerUnderTest) -> None:
    assert sent(broker, "bob", beat({}, "producers")).code == OK


# -- pulls -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topic", "group", "code"),
    [
        ("T", "g", ResponseCode.PULL_NOT_FOUND),
        ("%RETRY%g", "g", ResponseCode.PULL_NOT_FOUND),
        ("U", "g", REFUSED),
        ("T", "other", REFUSED),
        ("%RETRY%other", "g", REFUSED),
        ("%DLQ%other", "g", REFUSED),
    ],
)
@pytest.mark.parametrize("is_bulk", [False, True])
def test_pulls(broker: BrokerUnderTest, topic: str, group: str, code: int, is_bulk: bool) -> None:
    broker.topics.create_system_topic(topic)
    make = bulk_pull_header if is_bulk else pull_header
    asked = RequestCode.BULK_PULL if is_bulk else RequestCode.PULL_MESSAGE
    # An earlier pull of another user finds the way to the queue, and opens it to nobody.
    for user in ("root", "alice"):
        header = make(topic=topic, consumer_group=group)
        answer = broker.ask(asked, header, channel=client_of(user))
    assert answer.code == code


def test_a_bulk_pull_has_no_records_of_topics_in_between(broker: BrokerUnderTest) -> None:
    """One range of the log is sent where the records wanted fill most of it."""
    for _ in range(3):
        broker.store_message("T", 0, bytes(2000))
        broker.store_message("U", 0, b"secret")
    broker.store_message("T", 0, bytes(2000))
    header = bulk_pull_header(max_msg_nums=99, max_msg_bytes=1 << 20)
    for user in ("alice", "root"):
        answer = broker.ask(RequestCode.BULK_PULL, header, channel=client_of(user))
        found = answer.command.header(BulkPullResponseHeader)
        records = RecordColumns.from_bulk(found, answer.body)
        records.check_bodies()
        assert len(records) == found.count == 4
        assert records.has_topic("T")
        assert b"secret" not in answer.body


CHANGES = {
    "other rules": lambda users: users.put_rules("alice", rules_of("Topic:U Sub")),
    "disabled": lambda users: users.put(user_of("alice", UserKind.NORMAL, UserStatus.DISABLE)),
    "deleted": lambda users: users.remove("alice"),
}


def hold(broker: BrokerUnderTest, code: RequestCode) -> MemoryChannel:
    make = bulk_pull_header if code == RequestCode.BULK_PULL else pull_header
    channel = client_of("alice")
    broker.send(code, make(sys_flag=SUSPEND), channel=channel)
    assert channel.replies() == []
    return channel


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("code", [RequestCode.PULL_MESSAGE, RequestCode.BULK_PULL])
async def test_a_held_pull_gets_nothing_after_its_rights_are_gone(
    broker: BrokerUnderTest, users: Users, change: str, code: RequestCode
) -> None:
    channel = hold(broker, code)
    CHANGES[change](users)
    broker.store_message("T", 0, b"secret")
    broker.long_polling.arrived([broker.store.queue("T", 0)])
    ((answer, body),) = channel.replies()
    assert (answer.code, body) == (REFUSED, b"")
    assert channel.charged_bytes == 0


async def test_a_held_pull_is_refused_at_its_deadline_without_messages(
    broker: BrokerUnderTest, users: Users
) -> None:
    channel = hold(broker, RequestCode.PULL_MESSAGE)
    users.remove("alice")
    broker.long_polling.answer_all()
    ((answer, _),) = channel.replies()
    assert answer.code == REFUSED


@pytest.mark.parametrize("change", CHANGES)
async def test_held_pulls_are_judged_within_half_a_second(
    broker: BrokerUnderTest, users: Users, change: str, autojump_clock: object
) -> None:
    async with in_background(broker.long_polling.run):
        channel, *others = (hold(broker, RequestCode.PULL_MESSAGE) for _ in range(3))
        users.put_rules("bob", rules_of())
        await trio.sleep(1)
        assert channel.replies() == []
        others[0].is_open = False
        CHANGES[change](users)
        await trio.sleep(0.6)
        ((answer, _),) = channel.replies()
        assert answer.code == REFUSED
        assert channel.charged_bytes == 0
        assert len(others[1].replies()) == 1
        assert broker.long_polling.held_count == 0


async def test_a_held_pull_waits_on_through_changes_of_other_rules(
    broker: BrokerUnderTest, users: Users
) -> None:
    channel = hold(broker, RequestCode.PULL_MESSAGE)
    users.put_rules("bob", rules_of())
    broker.long_polling.arrived([broker.store.queue("T", 0)])
    assert channel.replies() == []
    broker.store_message("T", 0, b"news")
    broker.long_polling.arrived([broker.store.queue("T", 0)])
    ((answer, body),) = channel.replies()
    assert answer.code == OK
    assert b"news" in body
