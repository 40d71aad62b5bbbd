"""Sends that are served together are judged like single ones, also after rules have changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from headrace_broker.access import feature as access_feature
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.drivers.errors import is_denial
from headrace_protocol.header_codecs import SerializeType, encode_frame
from headrace_protocol.headers import StageSendHeader
from headrace_protocol.rights.users import UserKind, UserStatus
from headrace_protocol.serving import Request
from tests.support.batches import block
from tests.support.broker import BrokerUnderTest
from tests.support.channel import MemoryChannel
from tests.support.rights import client_of, rights_of, rules_of, signed, user_of, users_of
from tests.support.wire import bulk_send_header, send_header

OK, REFUSED = ResponseCode.SUCCESS, ResponseCode.NO_PERMISSION
USERS = {"alice": ["Topic:T Pub"], "bob": ["Topic:U Pub"], "maker": ["Topic:* Pub,Create"]}
COUNT = 8


def fields(topic: str) -> dict[str, Any]:
    text = {"a": "p", "b": topic, "c": "TBW102", "i": ""}
    return {**text, "d": 1, "e": 0, "f": 0, "g": 1, "h": 0}


def frames(topic: str, user: str | None = None, secret: str = "secret") -> bytes:
    """Sends of one read; signed by a user if there is one."""
    sent = signed(user, fields(topic), b"body", secret) if user else fields(topic)
    encoded = [
        encode_frame(
            SerializeType.JSON, RequestCode.SEND_MESSAGE_V2, opaque, fields=sent, body_bytes=4
        )
        for opaque in range(COUNT)
    ]
    return b"".join(frame + b"body" for frame in encoded)


class Sends:
    """A broker with two topics, and what its clients send together."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.users = users_of(**USERS)
        rights = rights_of(self.users, **settings)
        sizes: dict[str, Any] = {"ring_rows": 4096, "commit_log_file_bytes": 1 << 20}
        self.broker = BrokerUnderTest(folder, rights=rights, **sizes)
        for topic in "TU":
            self.broker.create_topic(topic, 1)

    def send(self, channel: MemoryChannel, topic: str, *signer: str) -> list[int]:
        self.broker.take(frames(topic, *signer), channel)
        answers = sorted((answer.opaque, answer.code) for answer, _ in channel.replies())
        assert [opaque for opaque, _ in answers] == list(range(COUNT))
        return [code for _, code in answers]

    def count(self, topic: str) -> int:
        return self.broker.store.queue(topic, 0).next_offset


@pytest.fixture
def sends(tmp_path: Path) -> Sends:
    return Sends(tmp_path)


def test_a_topic_that_one_user_may_send_to_is_closed_to_the_next(sends: Sends) -> None:
    alice, bob = client_of("alice"), client_of("bob")
    for _ in range(2):
        assert sends.send(alice, "T") == [OK] * COUNT
        assert sends.send(bob, "T") == [REFUSED] * COUNT
        assert sends.send(alice, "U") == [REFUSED] * COUNT
        assert sends.send(bob, "U") == [OK] * COUNT
    assert sends.count("T") == sends.count("U") == 2 * COUNT


@pytest.mark.parametrize("is_signed", [False, True])
def test_sends_of_a_user_are_stored_together(sends: Sends, is_signed: bool) -> None:
    alice, signer = client_of("alice"), ["alice"] if is_signed else []
    alice.user = None if is_signed else "alice"
    sends.send(alice, "T", *signer)

    def fail(_request: Request) -> None:
        raise AssertionError("served singly")

    sends.broker.registry.functions[RequestCode.SEND_MESSAGE_V2] = fail
    assert sends.send(alice, "T", *signer) == [OK] * COUNT


@pytest.mark.parametrize("change", ["no rules", "other rules", "disabled", "deleted"])
def test_a_change_counts_from_the_next_request_on(sends: Sends, change: str) -> None:
    alice, users = client_of("alice"), sends.users
    for _ in range(2):
        assert sends.send(alice, "T") == [OK] * COUNT
    if change == "no rules":
        users.put_rules("alice", rules_of())
    elif change == "other rules":
        users.put_rules("alice", rules_of("Topic:T Sub", "Topic:T Pub Deny"))
    elif change == "disabled":
        users.put(user_of("alice", UserKind.NORMAL, UserStatus.DISABLE))
    else:
        users.remove("alice")
    assert sends.send(alice, "T") == [REFUSED] * COUNT
    assert sends.count("T") == 2 * COUNT
    users.put(user_of("alice"))
    users.put_rules("alice", rules_of("Topic:T Pub"))
    assert sends.send(alice, "T") == [OK] * COUNT


def test_each_signature_is_judged(sends: Sends) -> None:
    channel = MemoryChannel()
    channel.is_greeted = True
    for _ in range(2):
        assert sends.send(channel, "T", "alice") == [OK] * COUNT
        assert sends.send(channel, "T", "bob") == [REFUSED] * COUNT
        assert sends.send(channel, "T", "alice", "wrong") == [REFUSED] * COUNT
        assert sends.send(channel, "T") == [REFUSED] * COUNT


def test_a_new_topic_needs_create(sends: Sends) -> None:
    users, broker = sends.users, sends.broker
    users.put_rules("alice", rules_of("Topic:new Pub"))
    assert sends.send(client_of("alice"), "new") == [REFUSED] * COUNT
    answer = broker.ask(
        RequestCode.SEND_MESSAGE_V2, send_header(topic="new"), b"x", client_of("alice")
    )
    assert answer.remark == (
        "User:alice has no permission to access Topic:new: it does not exist, creating it needs "
        "Create"
    )
    assert is_denial(answer.code, answer.remark)  # so that clients do not try again
    assert broker.topics.get("new") is None
    assert sends.send(client_of("maker"), "new") == [OK] * COUNT
    assert sends.send(client_of("alice"), "new") == [OK] * COUNT


@pytest.mark.parametrize("code", [RequestCode.BULK_SEND, RequestCode.STAGE_SEND])
def test_no_block_has_a_message_of_another_topic(sends: Sends, code: RequestCode) -> None:
    header: Any = bulk_send_header(topic="T", count=1)
    if code == RequestCode.STAGE_SEND:
        staged: dict[str, Any] = {"query_id": "q", "batch_id": 0, "attempt": "a", "block_number": 0}
        header = StageSendHeader(**structs.asdict(header), **staged)
    alice = client_of("alice")
    sent = bytes(block(b"body", topic="U").body)
    answer = sends.broker.ask(code, header, sent, alice)
    assert answer.code == ResponseCode.MESSAGE_ILLEGAL
    assert "not all records are of topic T" in answer.remark
    assert sends.broker.ask(code, header, bytes(block(b"body").body), alice).code == OK
    assert sends.broker.ask(code, header, sent, client_of("bob")).code == REFUSED


def test_anonymous_sends_are_stored_together_where_they_are_permitted(tmp_path: Path) -> None:
    sends = Sends(tmp_path, authentication=False, authorization=False, anonymous="read")
    channel = MemoryChannel()
    channel.is_greeted = True
    assert not sends.broker.core.rights.access.is_open
    for _ in range(2):
        assert sends.send(channel, "T") == [OK] * COUNT


def test_an_open_broker_has_no_guard(broker: BrokerUnderTest) -> None:
    assert broker.core.rights.access.is_open
    assert access_feature.build(broker.core).guards == ()
