"""Clients with a user at servers of every kind: with sessions, Apache RocketMQ's, and open ones."""

from __future__ import annotations

import pytest
import trio

from headrace import Message, Producer
from headrace.errors import AccessDenied, BrokerError, LogInFailed
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.rights.credentials import Credentials
from headrace_protocol.rights.signature import SIGNATURE
from headrace_protocol.serving import Reply
from tests.support.member import Apache, Headrace, Member
from tests.support.scripted import Asked, Scripted, producing, scripted_cluster, storing

ALICE = Credentials("alice", "secret")
UNSUPPORTED = Reply(code=ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark="not supported")


def others(script: Scripted) -> list[Asked]:
    """The requests but log-ins."""
    return [asked for asked in script.asked if asked.code != RequestCode.AUTH_SESSION]


def is_signed(asked: Asked) -> bool:
    fields = {name: value for name, value in asked.ext.items() if name != SIGNATURE}
    return ALICE.signed(fields, asked.body).get(SIGNATURE) == asked.ext.get(SIGNATURE)


async def test_each_request_to_apache_is_signed(autojump_clock: object) -> None:
    async with scripted_cluster() as (nameserver, [broker], network):
        nameserver.answer(RequestCode.AUTH_SESSION, UNSUPPORTED)
        broker.answer(
            RequestCode.AUTH_SESSION,
            Reply(code=ResponseCode.NO_PERMISSION, remark="username cannot be null."),
        )
        broker.answer_sends(storing())
        async with Producer(
            nameserver=nameserver.address, connect=network.connect, **ALICE._asdict()
        ) as producer:
            await producer.send(Message("T", b"one"))
            await producer.send_many([Message("T", b"many") for _ in range(3)])
    for server in (nameserver, broker):
        assert server.asked[0].code == RequestCode.AUTH_SESSION
        assert others(server)
        assert all(map(is_signed, others(server)))
    codes = {asked.code for asked in others(broker)}
    assert {RequestCode.HEART_BEAT, RequestCode.UNREGISTER_CLIENT} < codes


async def test_requests_to_an_open_daemon_of_ours_carry_nothing(autojump_clock: object) -> None:
    async with scripted_cluster(headrace=True) as (nameserver, [broker], network):
        nameserver.is_headrace = True
        for server in (nameserver, broker):
            server.answer(RequestCode.AUTH_SESSION, UNSUPPORTED)
        async with Producer(
            nameserver=nameserver.address, connect=network.connect, **ALICE._asdict()
        ) as producer:
            await producer.send(Message("T", b"one"))
    for server in (nameserver, broker):
        assert server.asked[0].code == RequestCode.AUTH_SESSION
        assert not any(SIGNATURE in asked.ext for asked in server.asked)


async def test_clients_without_a_user_send_no_byte_more(autojump_clock: object) -> None:
    async with producing() as (producer, nameserver, [broker]):
        await producer.send(Message("T", b"one"))
        for server in (nameserver, broker):
            assert others(server) == server.asked
            assert not any(SIGNATURE in asked.ext for asked in server.asked)


# -- what is rejected ------------------------------------------------------------------------------

NO_SUCH_LOGIN = Reply(code=ResponseCode.NO_PERMISSION, remark="log-in rejected: unknown user")


async def test_a_wrong_password_is_one_error_at_once(autojump_clock: object) -> None:
    async with scripted_cluster(headrace=True) as (nameserver, [broker], network):
        nameserver.answer(RequestCode.AUTH_SESSION, UNSUPPORTED)
        broker.answer(RequestCode.AUTH_SESSION, NO_SUCH_LOGIN)
        async with Producer(
            nameserver=nameserver.address, connect=network.connect, **ALICE._asdict()
        ) as producer:
            with pytest.raises(LogInFailed) as caught:
                await producer.send(Message("T", b"one"))
    text = str(caught.value)
    assert text.startswith(f"cannot log in to {broker.address} as 'alice': log-in rejected")
    assert ALICE.password not in text
    assert len(broker.asked) == 1


DENIALS = [
    "User:alice has no permission to access Topic:T from 127.0.0.1, no matched policies.",
    "User:alice has no permission to create Topic:T, which does not exist: that needs Create",
    "check signature failed.",
    "username cannot be null.",
    "User:alice is not found.",
    "User:alice is disabled.",
    "Authorization failed. Please verify your access rights and try again.",
]


@pytest.mark.parametrize("remark", DENIALS)
async def test_a_denied_send_is_not_tried_again(remark: str, autojump_clock: object) -> None:
    async with producing(2) as (producer, _, brokers):
        for broker in brokers:
            broker.answer_sends(Reply(code=ResponseCode.NO_PERMISSION, remark=remark))
        with pytest.raises(AccessDenied, match="grant the right"):
            await producer.send(Message("T", b"one"))
        assert sum(len(broker.sends) for broker in brokers) == 1


async def test_a_broker_that_takes_no_messages_is_no_denial(autojump_clock: object) -> None:
    remark = "the broker[127.0.0.1:10911] sending message is forbidden"
    async with producing(2) as (producer, _, [first, second]):
        for broker in (first, second):
            broker.answer_sends(Reply(code=ResponseCode.NO_PERMISSION, remark=remark))
        with pytest.raises(BrokerError) as caught:
            await producer.send(Message("T", b"one"))
        assert not isinstance(caught.value, AccessDenied)
        assert len(first.sends) + len(second.sends) > 1


# -- consumers -------------------------------------------------------------------------------------

PARTLY = (
    "User:alice has no permission to access Topic:U, Group:h from 10.0.0.1, no matched policies.; "
    "the rest of the heartbeat was taken"
)
PEERS = pytest.mark.parametrize("peer", [Apache(), Headrace()], ids=["apache", "headrace"])


@PEERS
async def test_a_part_of_a_heartbeat_that_is_denied_is_raised_once(
    peer: Apache | Headrace, autojump_clock: object
) -> None:
    async with Member(peer) as member:
        denied = Reply(code=ResponseCode.NO_PERMISSION, remark=PARTLY)
        member.broker.answer(RequestCode.HEART_BEAT, denied)
        async with member.consumer:
            with pytest.raises(AccessDenied, match="Topic:U, Group:h"):
                await member.take(1)
            await trio.sleep(100)
            assert await member.take(10) == list(range(10))
        assert member.broker.count(RequestCode.HEART_BEAT) > 3


@PEERS
async def test_a_heartbeat_that_is_denied_as_a_whole_ends_the_start(
    peer: Apache | Headrace, autojump_clock: object
) -> None:
    async with Member(peer) as member:
        denied = Reply(code=ResponseCode.NO_PERMISSION, remark=DENIALS[0])
        member.broker.answer(RequestCode.HEART_BEAT, denied)
        with pytest.raises(AccessDenied, match="no matched policies"):
            async with member.consumer:
                pass


@PEERS
async def test_pulls_that_become_denied_are_raised_once_and_resume(
    peer: Apache | Headrace, autojump_clock: object
) -> None:
    async with Member(peer) as member, member.consumer:
        assert await member.take(10) == list(range(10))
        member.log.count = 12
        denied = Reply(code=ResponseCode.NO_PERMISSION, remark=DENIALS[0])
        member.broker.answer(peer.pull_code, denied, denied, denied, member.log.pull)
        last = member.broker.last(peer.pull_code)
        member.reply(last, peer.pulled(10, 12), ResponseCode.PULL_NOT_FOUND)
        with pytest.raises(AccessDenied, match="no matched policies"):
            await member.take(1)
        assert await member.take(2) == [10, 11]
