"""Delayed messages on every way of sending them, and their recall: against scripted brokers."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

import headrace
from headrace import Message, blocking
from headrace.errors import (
    BrokerError,
    ConfigurationError,
    DelayRejected,
    HeadraceError,
    InvalidMessage,
    PipelineError,
    RecallRejected,
)
from headrace.producer.encoding import check_timer
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.command import Command
from headrace_protocol.drivers.response import Response
from headrace_protocol.headers import SendMessageResponseHeader
from headrace_protocol.serving import Reply
from tests.support.scripted import (
    Asked,
    producing,
    route,
    scripted_in_thread,
    sent_bodies,
)

SEND, RECALL = RequestCode.SEND_MESSAGE_V2, RequestCode.RECALL_MESSAGE
AT = dt.datetime(2026, 11, 23, 6, 0, 0, 250_000, dt.UTC)
AT_MS = 1_795_413_600_250
AnyMessage: Any = Message  # takes what a type checker would refuse


def waiting(handle: str | None = "djEgVA==") -> Reply:
    """The answer to a send of a message that waits."""
    header = SendMessageResponseHeader(
        msg_id="0" * 32, queue_id=0, queue_offset=7, recall_handle=handle
    )
    return Reply(header)


def delay_of(asked: Asked) -> dict[str, str]:
    return {
        name: value for name, value in asked.properties.items() if name not in {"UNIQ_KEY", "KEYS"}
    }


@pytest.mark.parametrize(
    ("options", "property_"),
    [
        ({"delay": 1.5}, {"TIMER_DELAY_MS": "1500"}),
        ({"delay": 3}, {"TIMER_DELAY_MS": "3000"}),
        ({"delay": 0.0004}, {"TIMER_DELAY_MS": "0"}),
        ({"delay": 0}, {}),
        ({"deliver_at": AT}, {"TIMER_DELIVER_MS": str(AT_MS)}),
        ({"deliver_at": AT_MS}, {"TIMER_DELIVER_MS": str(AT_MS)}),
        ({"delay_level": 3}, {"DELAY": "3"}),
    ],
)
async def test_a_delay_is_a_property_on_every_way(
    options: dict[str, Any], property_: dict[str, str]
) -> None:
    message = Message("T", b"later", key="k", **options)
    async with producing() as (p, _, (broker,)):
        broker.answer_sends(waiting())
        sent = await p.send(message)
        async with p.pipeline() as pipeline:
            await pipeline.send(message)
        await p.send_oneway(message)
    assert [delay_of(asked) for asked in broker.sends] == [property_] * 3
    assert sent.recall_handle == "djEgVA=="
    assert [each.recall_handle for each in sent.of_each()] == ["djEgVA=="]


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("options", [{"delay": 0.5}, {"deliver_at": AT}])
async def test_a_pipeline_sends_delayed_messages_singly(
    ours: bool, options: dict[str, Any]
) -> None:
    results = []
    async with (
        producing(headrace=ours) as (p, _, (broker,)),
        p.pipeline(on_result=lambda _, result: results.append(result)) as pipeline,
    ):
        for n in range(6):
            await pipeline.send(Message("T", b"%d" % n, **(options if n in {2, 3} else {})))
        await pipeline.flush()
    assert [len(sent_bodies(asked)) for asked in broker.sends] == [2, 1, 1, 2]
    assert len(results) == 6


@pytest.mark.parametrize("options", [{"delay": 0.5}, {"deliver_at": AT}, {"delay_level": 1}])
@pytest.mark.parametrize("key", ["", "k"])
async def test_bulk_sends_reject_delayed_messages(options: dict[str, Any], key: str) -> None:
    messages = [Message("T", b"x", key=key), Message("T", b"y", **options)]
    async with producing() as (p, _, (broker,)):
        with pytest.raises(InvalidMessage, match="a delayed message for T: send it singly"):
            await p.send_many(messages)
    assert broker.sends == []


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Message("T", b"x", delay=-1), "delay=-1 .*seconds from now"),
        (Message("T", b"x", delay=float("nan")), "delay=nan"),
        (Message("T", b"x", delay=float("inf")), "delay=inf"),
        (AnyMessage("T", b"x", delay="5s"), "delay='5s'"),
        (AnyMessage("T", b"x", deliver_at="noon"), "deliver_at='noon'.*datetime or milliseconds"),
        (Message("T", b"x", deliver_at=-1), "deliver_at=-1"),
        (Message("T", b"x", deliver_at=AT.replace(tzinfo=None)), "needs a time zone"),
        (Message("T", b"x", delay=1, deliver_at=AT), "set only one"),
        (Message("T", b"x", delay=1, delay_level=1), "set only one"),
        (Message("T", b"x", properties={"TIMER_DELAY_MS": "5"}), "delay="),
    ],
)
def test_delays_that_cannot_be(message: Message, reason: str) -> None:
    with pytest.raises(InvalidMessage, match=reason):
        message.check()


@pytest.mark.parametrize(
    "answer",
    [
        Reply(code=ResponseCode.MESSAGE_ILLEGAL, remark="timer message illegal, the delay ..."),
        Reply(code=ResponseCode.SYSTEM_ERROR, remark="accurate timer message is not enabled"),
        Reply(code=ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark="not served"),
    ],
)
async def test_a_broker_that_rejects_the_delay_is_an_error_of_its_own(answer: Reply) -> None:
    async with producing() as (p, _, (broker,)):
        broker.answer_sends(answer)
        with pytest.raises(DelayRejected, match=str(answer.remark)):
            await p.send(Message("T", b"x", delay=5))
        with pytest.raises(PipelineError) as failed:
            async with p.pipeline() as pipeline:
                await pipeline.send(Message("T", b"x", delay=5))
        assert isinstance(failed.value.failures[0][1], DelayRejected)
    assert len(broker.sends) == 2, "no retries"


async def test_other_errors_of_a_delayed_message_are_the_brokers() -> None:
    async with producing() as (p, _, (broker,)):
        broker.answer_sends(Reply(code=ResponseCode.MESSAGE_ILLEGAL, remark="properties"))
        with pytest.raises(BrokerError, match="properties"):
            await p.send(Message("T", b"x", delay=5))


def test_an_old_broker_that_ignores_the_delay_is_an_error() -> None:
    for version, is_old in ((401, True), (413, False)):
        command = Command(code=0, version=version)
        response = Response("1.2.3.4:10911", SEND, command, memoryview(b""))
        if is_old:
            with pytest.raises(DelayRejected, match=r"1\.2\.3\.4.*before 5\.0.*at once"):
                check_timer(response)
        else:
            check_timer(response)


# -- recall ----------------------------------------------------------------------------------------


async def test_a_message_is_recalled_at_its_broker() -> None:
    async with producing(group="pg") as (p, _, (broker,)):
        broker.answer_sends(waiting())
        await p.recall(await p.send(Message("T", b"x", delay=5)))
        assert broker.last(RECALL).ext == {
            "topic": "T",
            "recallHandle": "djEgVA==",
            "producerGroup": "pg",
        }


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (ResponseCode.ILLEGAL_OPERATION, RecallRejected),
        (ResponseCode.NO_PERMISSION, RecallRejected),
        (ResponseCode.REQUEST_CODE_NOT_SUPPORTED, RecallRejected),
        (ResponseCode.SYSTEM_BUSY, BrokerError),
    ],
)
async def test_a_rejected_recall(code: ResponseCode, error: type[HeadraceError]) -> None:
    async with producing() as (p, _, (broker,)):
        broker.answer_sends(waiting())
        broker.answer(RECALL, Reply(code=code, remark="too late"))
        sent = await p.send(Message("T", b"x", delay=5))
        with pytest.raises(BrokerError, match="too late") as raised:
            await p.recall(sent)
    assert type(raised.value) is error
    assert raised.value.retryable is (error is BrokerError)


async def test_only_a_message_with_a_handle_can_be_recalled() -> None:
    async with producing() as (p, _, _):
        sent = await p.send(Message("T", b"x"))
        with pytest.raises(ConfigurationError, match="cannot be recalled: it was sent without"):
            await p.recall(sent)


def test_blocking_producers_delay_and_recall() -> None:
    with scripted_in_thread(2) as (nameserver, broker):
        nameserver.answer(RequestCode.GET_ROUTEINFO_BY_TOPIC, route(broker))
        broker.answer_sends(waiting())
        with blocking.Producer(nameserver=nameserver.address) as p:
            p.recall(p.send(Message("T", b"x", delay=5)))
        assert broker.count(RECALL) == 1


async def test_a_real_broker_delays_by_level() -> None:
    async with headrace.embedded(memory=True) as mq, mq.producer() as p:
        sent = await p.send(Message("T", b"x", delay_level=1))
        assert sent.recall_handle is None
        async with mq.consumer("g", "T") as consumer:
            async for message in consumer:
                assert message.body == b"x"
                assert message.store_timestamp_ms - message.born_timestamp_ms >= 990
                break
