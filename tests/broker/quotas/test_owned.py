"""Topics, groups and staged bytes of a user: counted over deletions and restarts, and limited."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace_broker.quotas.owners import Owners
from headrace_protocol.admin_headers import (
    CreateTopicHeader,
    DeleteSubscriptionGroupHeader,
    DeleteTopicHeader,
)
from headrace_protocol.bodies import SubscriptionGroupConfig
from headrace_protocol.codes import RequestCode as Code
from headrace_protocol.codes import ResponseCode
from headrace_protocol.headers import StageAbortHeader, StageSendHeader
from headrace_protocol.staging import encode_names
from tests.support.batches import block
from tests.support.broker import Answer, BrokerUnderTest, heartbeat
from tests.support.channel import MemoryChannel
from tests.support.paused_clients import quota
from tests.support.rights import client_of
from tests.support.wire import send_header

OK, REFUSED = ResponseCode.SUCCESS, ResponseCode.NO_PERMISSION


@contextmanager
def broker_of(folder: Path) -> Iterator[BrokerUnderTest]:
    broker = BrokerUnderTest(folder)
    try:
        yield broker
    finally:
        broker.close()


def limit(broker: BrokerUnderTest, user: str, **limits: Any) -> None:
    assert broker.ask(Code.SET_QUOTA, body=quota("user", user, **limits)).code == OK


def new_topic(broker: BrokerUnderTest, name: str, channel: MemoryChannel) -> Answer:
    header = CreateTopicHeader(
        topic=name, read_queue_nums=1, write_queue_nums=1, perm=6, topic_filter_type="SINGLE_TAG"
    )
    broker.send(Code.UPDATE_AND_CREATE_TOPIC, header, channel=channel)
    return _last(channel)


def sent_topic(broker: BrokerUnderTest, name: str, channel: MemoryChannel) -> Answer:
    return broker.ask(Code.SEND_MESSAGE_V2, send_header(topic=name), b"x", channel)


def new_group(broker: BrokerUnderTest, name: str, channel: MemoryChannel) -> Answer:
    body = SubscriptionGroupConfig(group_name=name).encode()
    return broker.ask(Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, None, body, channel)


def joined_group(broker: BrokerUnderTest, name: str, channel: MemoryChannel) -> Answer:
    return broker.ask(Code.HEART_BEAT, None, heartbeat(name, "c", "T"), channel)


def delete_topic(broker: BrokerUnderTest, name: str) -> Answer:
    return broker.ask(Code.DELETE_TOPIC_IN_BROKER, DeleteTopicHeader(topic=name))


def delete_group(broker: BrokerUnderTest, name: str) -> Answer:
    header = DeleteSubscriptionGroupHeader(group_name=name)
    return broker.ask(Code.DELETE_SUBSCRIPTIONGROUP, header)


def _last(channel: MemoryChannel) -> Answer:
    """The answer; one that waits for the nameservers is good."""
    answers = [Answer(*reply) for reply in channel.replies() if reply[0].is_response]
    return answers[-1] if answers else GOOD


class _Good:
    code, remark = OK, ""


GOOD: Any = _Good()
KINDS = {
    "topics": (new_topic, delete_topic),
    "topics by sending": (sent_topic, delete_topic),
    "groups": (new_group, delete_group),
    "groups by joining": (joined_group, delete_group),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_user_makes_no_more_than_its_quota(tmp_path: Path, kind: str) -> None:
    make, delete = KINDS[kind]
    what = kind.partition(" ")[0]
    ann = client_of("ann")
    with broker_of(tmp_path) as broker:
        broker.create_topic("T")
        # Those from before the quota count.
        assert make(broker, "a", ann).code == OK
        limit(broker, "ann", **{what: 2})
        assert make(broker, "b", ann).code == OK
        refused = make(broker, "c", ann)
        assert refused.code == REFUSED
        assert f"[quota] user ann: 2 {what} at this broker" in refused.remark
        # What is there may be used and changed, and others are not limited.
        assert make(broker, "b", ann).code == OK
        assert make(broker, "d", client_of("bob")).code == OK
        assert delete(broker, "a").code == OK
        assert make(broker, "c", ann).code == OK
        assert make(broker, "e", ann).code == REFUSED
    with broker_of(tmp_path) as broker:
        assert make(broker, "e", ann).code == REFUSED
        limit(broker, "ann", **{what: 3})
        assert make(broker, "e", ann).code == OK
        assert make(broker, "f", ann).code == REFUSED
        limit(broker, "ann")
        assert make(broker, "f", ann).code == OK


async def test_clients_without_a_user_own_things_by_their_address(tmp_path: Path) -> None:
    client = MemoryChannel()
    with broker_of(tmp_path) as broker:
        assert new_topic(broker, "a", client).code == OK
        assert not (tmp_path / "store" / "config" / "owners.json").exists()
        limit(broker, "*", topics=1)
        assert new_topic(broker, "b", client).code == OK
        assert new_topic(broker, "c", client).code == REFUSED
    with broker_of(tmp_path) as broker:
        assert new_topic(broker, "c", client).code == REFUSED


async def test_retry_topics_count_as_their_group(tmp_path: Path) -> None:
    with broker_of(tmp_path) as broker:
        limit(broker, "ann", topics=1, groups=1)
        broker.topics.create_retry_topic("g")
        ann = client_of("ann")
        assert new_group(broker, "g", ann).code == OK
        assert sent_topic(broker, "%RETRY%g", ann).code == OK
        assert new_topic(broker, "a", ann).code == OK
        assert new_topic(broker, "b", ann).code == REFUSED


async def test_what_a_crash_has_left_in_the_file_is_forgotten(tmp_path: Path) -> None:
    with broker_of(tmp_path) as broker:
        new_topic(broker, "a", client_of("ann"))
    config = tmp_path / "store" / "config"
    for file in config.glob("topics.json*"):
        file.unlink()
    with broker_of(tmp_path) as broker:
        owners = broker.budget.makers
        assert isinstance(owners, Owners)
        assert owners.count("ann", "topics") == 0


def staged(broker: BrokerUnderTest, query: str, attempt: str, channel: MemoryChannel) -> Answer:
    sent = block(b"x" * 1000)
    header = StageSendHeader(
        producer_group="spark",
        topic="T",
        default_topic="TBW102",
        default_topic_queue_nums=2,
        queue_id=0,
        count=sent.record_count,
        query_id=query,
        batch_id=0,
        attempt=attempt,
        block_number=0,
    )
    return broker.ask(Code.STAGE_SEND, header, bytes(sent.body), channel)


async def test_staged_bytes_of_a_user_are_limited(tmp_path: Path) -> None:
    ann, bob = client_of("ann"), client_of("bob")
    with broker_of(tmp_path) as broker:
        broker.create_topic("T")
        limit(broker, "ann", staged_bytes=2500)
        assert staged(broker, "q1", "a", ann).code == OK
        assert staged(broker, "q2", "b", ann).code == OK
        refused = staged(broker, "q3", "c", ann)
        assert refused.code == ResponseCode.SYSTEM_BUSY
        assert "[quota] user ann: 2500 bytes staged; again in 1000 ms" in refused.remark
        assert refused.command.ext()["retryAfterMs"] == "1000"
        assert staged(broker, "q4", "d", bob).code == OK
        header = StageAbortHeader(query_id="q1", batch_id=0)
        broker.ask(Code.STAGE_ABORT, header, encode_names(["a"]))
        assert staged(broker, "q3", "c", ann).code == OK
        assert staged(broker, "q3", "d", ann).code == ResponseCode.SYSTEM_BUSY
