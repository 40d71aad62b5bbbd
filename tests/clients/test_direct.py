"""What administrators ask of a member: to process a message again, and how far it has come."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing

import headrace
from headrace import Admin, Consumer, Message, ReceivedMessage, SimpleConsumer, blocking
from headrace.admin.group_view import strategy_of
from headrace.embedded import Embedded
from headrace.errors import BrokerError
from headrace_protocol.admin_headers import GetConsumerStatusHeader
from headrace_protocol.bodies import ConsumerRunningInfo, DirectResult
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.message import encode_record
from tests.support.cli import fail, succeed
from tests.support.fixtures import in_memory
from tests.support.member import Apache, Member
from tests.support.verbs import lag_of, produce

mq = pytest.fixture(in_memory)


async def success(_message: ReceivedMessage) -> None:
    """Take the message."""


async def retry(message: ReceivedMessage) -> None:
    await message.retry(after=1)


async def failure(_message: ReceivedMessage) -> None:
    raise KeyError("no such order")


async def member_id(admin: Admin) -> str:
    (connection,) = (await admin.members("g")).values()
    return connection.connection_set[0].client_id


@pytest.mark.parametrize(
    ("handle", "result"),
    [(success, "CR_SUCCESS"), (retry, "CR_LATER"), (failure, "CR_THROW_EXCEPTION")],
)
async def test_a_message_is_processed_again(
    mq: Embedded, handle: Callable[[ReceivedMessage], Awaitable[None]], result: str
) -> None:
    await produce(mq, 0, queues=1)
    results: list[DirectResult | None] = []
    bodies: list[bytes] = []
    async with mq.producer() as producer, mq.admin() as admin:
        sent = await producer.send(Message("T", b"order"))

        async def resend() -> None:
            results.append(await admin.resend(sent.offset_message_id, "g", await member_id(admin)))

        async def consume() -> None:
            with pytest.raises(KeyError) if result.endswith("EXCEPTION") else trio.CancelScope():
                async with mq.consumer("g", "T", start="earliest") as consumer:
                    async for message in consumer:
                        bodies.append(message.body)
                        if len(bodies) == 1:
                            tasks.start_soon(resend)
                            continue
                        await handle(message)
                        if result == "CR_LATER":
                            continue
                        break

        async with trio.open_nursery() as tasks:
            with trio.fail_after(20):
                tasks.start_soon(consume)
                while not results:  # noqa: ASYNC110
                    await trio.sleep(0.01)
            tasks.cancel_scope.cancel()
    (answer,) = results
    assert answer
    assert answer.consume_result == result
    assert bodies[:2] == [b"order", b"order"]
    assert answer.spent_time_mills < 20_000
    assert ("no such order" in (answer.remark or "")) == result.endswith("EXCEPTION")
    assert await lag_of(mq) == 0


async def test_a_message_that_the_program_has_not_seen_comes_later(mq: Embedded) -> None:
    await produce(mq, 0, queues=1)
    results: list[DirectResult | None] = []
    async with mq.producer() as producer, mq.admin() as admin, trio.open_nursery() as tasks:
        sent = await producer.send(Message("T", b"order"))
        async with mq.consumer("g", "T", start="earliest") as consumer:
            async for _ in consumer:
                break
            client_id = await member_id(admin)

            async def resend() -> None:
                results.append(await admin.resend(sent.offset_message_id, "g", client_id))

            tasks.start_soon(resend)
            await trio.testing.wait_all_tasks_blocked(0.005)
    (answer,) = results
    assert answer
    assert answer.consume_result == "CR_LATER"
    assert "before it came to the message" in (answer.remark or "")


async def test_who_cannot_be_asked(mq: Embedded) -> None:
    await produce(mq, 0, queues=1)
    async with mq.admin() as admin, mq.producer() as producer:
        sent = await producer.send(Message("T", b"order"))
        with pytest.raises(BrokerError, match="not online") as raised:
            await admin.resend(sent.message_id, "g", "nobody", "T")
        assert raised.value.code == ResponseCode.CONSUMER_NOT_ONLINE
        assert await admin.resend("0" * 32, "g", "nobody", "T") is None


async def test_members_tell_how_far_they_have_come(mq: Embedded) -> None:
    await produce(mq, 3, queues=1)
    async with mq.admin() as admin, mq.consumer("g", "T", start="earliest") as consumer:
        taken = 0
        async for _ in consumer:
            taken += 1
            if taken == 3:
                break
        await consumer.commit()
        client_id = await member_id(admin)
        (node,) = await admin.cluster()
        code = RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS
        for client_addr in (None, client_id):
            header = GetConsumerStatusHeader(topic="T", group="g", client_addr=client_addr)
            body: Any = (await ask(admin, node.address, code, header)).body
            assert client_id.encode() in bytes(body)
            assert b'"topic":"T"}:3' in bytes(body)
        header = GetConsumerStatusHeader(topic="T", group="none")
        answer = await ask(admin, node.address, code, header)
        assert answer.command.code == ResponseCode.CONSUMER_NOT_ONLINE


@pytest.mark.parametrize("popping", [SimpleConsumer, partial(Consumer, mode="pop")])
async def test_members_that_pop_report_about_themselves(
    mq: Embedded, popping: Callable[..., SimpleConsumer | Consumer]
) -> None:
    await produce(mq, 1, queues=1)
    async with (
        mq.admin() as admin,
        mq.producer() as producer,
        popping("g", "T", **mq.options()) as consumer,
    ):
        if isinstance(consumer, SimpleConsumer):
            await consumer.receive(wait=0)  # joins the group
        client_id = await member_id(admin)
        ((_, report),) = await admin.member_reports("g", await admin.members("g"))
        assert isinstance(report, ConsumerRunningInfo)
        assert report.properties["PROP_CONSUME_TYPE"] == "CONSUME_POP"
        assert (report.mq_table, strategy_of(report)) == ({}, None)
        (node,) = await admin.cluster()
        header = GetConsumerStatusHeader(topic="T", group="g")
        code = RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS
        assert client_id.encode() in bytes((await ask(admin, node.address, code, header)).body)
        sent = await producer.send(Message("T", b"order"))
        with pytest.raises(BrokerError, match="this member takes messages out"):
            await admin.resend(sent.offset_message_id, "g", client_id)


async def ask(admin: Admin, address: str, code: int, header: Any) -> Any:
    return await admin._instance.request(address, code, header)


async def test_a_member_takes_one_message_at_a_time() -> None:
    async with Member(Apache(), 1) as member, member.consumer:
        await member.take(1)
        record = encode_record(topic="T", queue_id=0, body=b"again")
        fields = {"consumerGroup": "g", "clientId": "c"}
        member.push(RequestCode.CONSUME_MESSAGE_DIRECTLY, fields, record + record, oneway=False)
        member.push(RequestCode.CONSUME_MESSAGE_DIRECTLY, fields, b"torn", oneway=False)
        with trio.fail_after(5):
            while len(member.broker.responses) < 2:  # noqa: ASYNC110
                await trio.sleep(0.01)
    codes = [command.code for command, _ in member.broker.responses]
    assert codes == [ResponseCode.SYSTEM_ERROR, ResponseCode.INVALID_PARAMETER]


@pytest.mark.slow
def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    with headrace.embedded() as running:
        monkeypatch.setenv("HEADRACE_NAMESERVER", running.nameserver)
        at: dict[str, Any] = {"nameserver": running.nameserver}
        with blocking.Admin(**at) as admin, blocking.Producer(**at) as producer:
            admin.create_topic("T", queues=1)
            sent = producer.send(Message("T", b"order"))
            to = ("--group", "g", "--to", "nobody")
            error = fail(3, "message", "resend", sent.offset_message_id, *to)
            assert "not online" in error
            assert "`headrace group members GROUP`" in error
            assert "does not exist" in fail(3, "message", "resend", "0" * 32, *to, "--topic", "T")
            assert succeed("message", "get", sent.offset_message_id)
