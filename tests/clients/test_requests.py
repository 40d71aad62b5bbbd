"""Requests between clients: a message whose sender waits for the reply of its consumer."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import trio

import headrace
from headrace import Consumer, Message, Producer, ReceivedMessage, SimpleConsumer, blocking
from headrace.embedded import Embedded
from headrace.errors import BrokerError, ClientClosed, ConfigurationError, InvalidMessage, NoReply
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.command import header_fields
from headrace_protocol.header_codecs import encode_frame
from headrace_protocol.headers import PushReplyHeader
from headrace_protocol.serving import Reply
from tests.support.fixtures import in_memory
from tests.support.scripted import Asked, producing
from tests.support.until import until
from tests.support.verbs import produce

mq = pytest.fixture(in_memory)

PUSH = RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT


async def serve(consumer: Consumer, count: int = 1) -> None:
    """Reply to messages with their bodies, turned round."""
    async for message in consumer:
        await message.reply(message.body[::-1])
        count -= 1
        if not count:
            return


@pytest.mark.parametrize("options", [{}, {"broadcast": True}, {"ordered": True}])
async def test_a_request_gets_the_reply_of_its_consumer(
    mq: Embedded, tmp_path: Any, options: dict[str, Any]
) -> None:
    if "broadcast" in options:
        options = options | {"offsets_dir": tmp_path}
    await produce(mq, 0, queues=1)
    async with (
        mq.consumer("g", "T", start="earliest", **options) as consumer,
        mq.producer() as producer,
        trio.open_nursery() as tasks,
    ):
        tasks.start_soon(serve, consumer)
        with trio.fail_after(10):
            reply = await producer.request(Message("T", b"abc", key="k"), timeout=9)
    assert reply.body == b"cba"
    assert reply.topic == "DefaultCluster_REPLY_TOPIC"
    system = reply.system_properties
    assert (system["MSG_TYPE"], system["TTL"]) == ("reply", "9000")
    assert system["ARRIVE_TIME"] >= system["PUSH_REPLY_TIME"]
    assert producer.late_replies == 0


async def serve_popped(nameserver: str, connect: Any) -> None:
    async with SimpleConsumer("g", "T", nameserver=nameserver, connect=connect) as consumer:
        (message,) = await consumer.receive(wait=9)
        await message.reply(message.body[::-1])
        await message.ack()
    with pytest.raises(ClientClosed):
        await message.reply(b"late")


async def test_a_request_gets_the_reply_of_a_simple_consumer(mq: Embedded) -> None:
    await produce(mq, 0, queues=1)
    async with mq.producer() as producer, trio.open_nursery() as tasks:
        tasks.start_soon(serve_popped, mq.nameserver, mq.connect)
        with trio.fail_after(10):
            reply = await producer.request(Message("T", b"abc", key="k"), timeout=9)
    assert reply.body == b"cba"


async def test_requests_wait_side_by_side_for_their_own_replies(mq: Embedded) -> None:
    await produce(mq, 0, queues=2)
    bodies = [b"%03d" % number for number in range(20)]
    replies: dict[bytes, bytes] = {}

    async def ask(producer: Producer, body: bytes) -> None:
        replies[body] = (await producer.request(Message("T", body), timeout=9)).body

    async with (
        mq.consumer("g", "T", start="earliest") as consumer,
        mq.producer() as producer,
        trio.open_nursery() as tasks,
    ):
        tasks.start_soon(serve, consumer, len(bodies))
        for body in bodies:
            tasks.start_soon(ask, producer, body)
    assert replies == {body: body[::-1] for body in bodies}


async def abandoned(producer: Producer, consumer: Consumer) -> ReceivedMessage:
    """A message that has arrived, and whose sender no longer waits for a reply."""
    async with trio.open_nursery() as tasks:
        tasks.start_soon(partial(producer.request, Message("T", b"abc"), timeout=600))
        message = await anext(aiter(consumer))
        tasks.cancel_scope.cancel()
    return message


async def test_a_late_reply_is_dropped_and_counted(mq: Embedded) -> None:
    await produce(mq, 0, queues=1)
    async with mq.consumer("g", "T", start="earliest") as consumer, mq.producer() as producer:
        message = await abandoned(producer, consumer)
        await message.reply(b"cba")
        assert producer.late_replies == 1


async def test_the_reply_to_a_requester_that_has_left_is_an_error(mq: Embedded) -> None:
    await produce(mq, 0, queues=1)
    async with mq.consumer("g", "T", start="earliest") as consumer:
        async with mq.producer() as producer:
            message = await abandoned(producer, consumer)
        with pytest.raises(BrokerError, match=r"channel of <.*> not found"):
            await message.reply(b"cba")


async def test_a_message_whose_sender_does_not_wait_cannot_be_replied_to(mq: Embedded) -> None:
    await produce(mq, 1, queues=1)
    async with mq.consumer("g", "T", start="earliest") as consumer:
        async for message in consumer:
            with pytest.raises(ConfigurationError, match="did not ask for a reply"):
                await message.reply(b"no")
            with pytest.raises(InvalidMessage, match="not bytes"):
                await message.reply("text")  # type: ignore[arg-type]
            break


async def test_a_reply_needs_a_body(mq: Embedded) -> None:
    await produce(mq, 0, queues=1)
    async with mq.consumer("g", "T", start="earliest") as consumer, mq.producer() as producer:
        message = await abandoned(producer, consumer)
        with pytest.raises(InvalidMessage, match="0 bytes"):
            await message.reply(b"")


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "3", float("inf"), None])
async def test_times_that_cannot_be(mq: Embedded, timeout: Any) -> None:
    async with mq.producer() as producer:
        with pytest.raises(ConfigurationError, match="timeout"):
            await producer.request(Message("T", b"abc"), timeout=timeout)


async def test_full_properties_leave_no_room_for_a_request(mq: Embedded) -> None:
    message = Message("T", b"abc", properties={"big": "x" * 32_700})
    async with mq.producer() as producer:
        with pytest.raises(InvalidMessage, match="fit in a request"):
            await producer.request(message)


# -- scripted brokers ------------------------------------------------------------------------------


def push(asked: Asked, correlation_id: str | None = None, **fields: Any) -> None:
    """A reply to a request, as a broker pushes it."""
    given = asked.properties
    properties = f"CORRELATION_ID\x01{correlation_id or given['CORRELATION_ID']}\x02"
    values: dict[str, Any] = {
        "producer_group": "replier",
        "topic": "c_REPLY_TOPIC",
        "default_topic": "TBW102",
        "default_topic_queue_nums": 1,
        "queue_id": 0,
        "sys_flag": 0,
        "born_timestamp": 1,
        "flag": 0,
        "properties": properties,
        "born_host": "127.0.0.1:5",
        "store_host": "/127.0.0.1:6",
        "store_timestamp": 2,
    }
    header = header_fields(PushReplyHeader(**values | fields))
    frame = encode_frame(0, PUSH, 77, fields=header, body_bytes=2)
    asked.channel.write(frame + b"ok")


async def test_replies_of_any_broker_are_taken_and_confirmed(autojump_clock: object) -> None:
    async with producing(2) as (producer, _, masters), trio.open_nursery() as tasks:
        replies: list[ReceivedMessage] = []

        async def ask() -> None:
            replies.append(await producer.request(Message("T", b"abc"), timeout=5))

        tasks.start_soon(ask)
        await trio.sleep(0.5)
        assert [each.count(RequestCode.HEART_BEAT) >= 1 for each in masters] == [True, True]
        (sent,) = [asked for each in masters for asked in each.sends]
        other = next(each for each in masters if not each.sends)
        heartbeat = other.last(RequestCode.HEART_BEAT)
        sent.channel = heartbeat.channel
        push(sent, "somebody else's")
        push(sent, born_host="nowhere")
        push(sent, born_host="127.0.0.1:99999999999")
        push(sent, topic="t" * 40_000)
        push(sent, born_host="requester.example/127.0.0.1:5")
        push(sent)
    assert [reply.body for reply in replies] == [b"ok"]
    assert producer.late_replies == 2
    codes = sorted(command.code for command, _ in other.responses)
    assert codes == [0, 0, 0, *[ResponseCode.INVALID_PARAMETER] * 3]


async def test_a_reply_that_comes_after_the_timeout_is_a_late_one(autojump_clock: object) -> None:
    async with producing() as (producer, _, (broker,)):
        with pytest.raises(NoReply, match="no consumer replied") as raised:
            await producer.request(Message("T", b"abc"), timeout=0.2)
        assert raised.value.is_sent
        (sent,) = broker.sends
        sent.channel = broker.last(RequestCode.HEART_BEAT).channel
        push(sent)
        await until(lambda: producer.late_replies == 1)


async def test_a_requester_stays_connected_while_it_waits(autojump_clock: object) -> None:
    async with producing() as (producer, _, (broker,)), trio.open_nursery() as tasks:

        async def ask() -> None:
            with pytest.raises(NoReply):
                await producer.request(Message("T", b"abc"), timeout=5)

        tasks.start_soon(ask)
        await trio.sleep(0.5)
        first = broker.last(RequestCode.HEART_BEAT).channel
        first.close("the broker restarts")
        await trio.sleep(3)
        assert broker.last(RequestCode.HEART_BEAT).channel is not first


async def test_a_request_that_no_broker_takes_says_so(autojump_clock: object) -> None:
    async with producing() as (producer, _, (broker,)):
        broker.answer_sends(Reply(code=ResponseCode.SYSTEM_BUSY))
        with pytest.raises(NoReply, match="no broker has confirmed") as raised:
            await producer.request(Message("T", b"abc"), timeout=2)
        assert not raised.value.is_sent


# -- blocking --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_blocking_clients_request_and_reply() -> None:
    with headrace.embedded() as mq:
        at: dict[str, Any] = {"nameserver": mq.nameserver}
        with blocking.Admin(**at) as admin:
            admin.create_topic("T", queues=1)
        with (
            blocking.Consumer("g", "T", start="earliest", **at) as consumer,
            blocking.Producer(**at) as producer,
        ):

            def serve_one() -> None:
                for message in consumer:
                    message.reply(message.body[::-1])
                    break

            thread = threading.Thread(target=serve_one)
            thread.start()
            assert producer.request(Message("T", b"abc"), timeout=9).body == b"cba"
            thread.join()
            assert producer.late_replies == 0
