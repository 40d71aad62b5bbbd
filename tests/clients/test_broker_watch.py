"""An absent broker is one line in a group member's log when it goes, and one when it returns."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec
import pytest
import trio

from headrace import Consumer
from headrace_protocol.bodies import LockBatchRequestBody, LockBatchResponseBody
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.command import FLAG_RESPONSE
from headrace_protocol.header_codecs import encode_frame
from headrace_protocol.serving import Reply
from tests.support.member import COMMIT, NO_TOPIC, Apache, Log
from tests.support.scripted import close, route, scripted_cluster

if TYPE_CHECKING:
    from trio.testing import MockClock

    from tests.support.scripted import Asked, Scripted

QUEUES = 4
MEMBERSHIP = (RequestCode.HEART_BEAT, RequestCode.GET_CONSUMER_LIST_BY_GROUP)


def lock_all(asked: Asked) -> Reply:
    queues = LockBatchRequestBody.decode(asked.body).mq_set
    return Reply(body=(LockBatchResponseBody(lock_ok_mq_set=queues).encode(),))


def hold_pulls(log: Log, tasks: trio.Nursery) -> None:
    """Answer a pull without messages after 15 s, as brokers do."""

    async def answer_later(asked: Asked) -> None:
        await trio.sleep(15)
        offset = int(asked.ext["queueOffset"])
        fields = msgspec.to_builtins(log.peer.pulled(offset, log.count))
        asked.channel.write(
            encode_frame(
                0, ResponseCode.PULL_NOT_FOUND, asked.opaque, flag=FLAG_RESPONSE, fields=fields
            )
        )

    def answer(asked: Asked) -> Reply | None:
        found = log.pull(asked)
        if found is None:
            tasks.start_soon(answer_later, asked)
        return found

    log.broker.answer(log.peer.pull_code, answer)


def take_down(broker: Scripted) -> None:
    """Close all connections, and each new one at its first request."""
    for code in {*MEMBERSHIP, COMMIT, *broker.answers}:
        broker.answer(code, close)
    for asked in broker.asked:
        asked.channel.close("")


def announce(nameserver: Scripted, *brokers: Scripted) -> None:
    """Let topic T be on these brokers, and no other topic anywhere."""
    known = route(*brokers, queues=QUEUES)
    nameserver.answer(
        RequestCode.GET_ROUTEINFO_BY_TOPIC,
        lambda asked: known if brokers and asked.ext["topic"] == "T" else NO_TOPIC,
    )


@pytest.mark.parametrize("ordered", [False, True], ids=["unordered", "ordered"])
@pytest.mark.parametrize("leaves_route", [False, True], ids=["in the route", "not in the route"])
@pytest.mark.parametrize("count", [1, 2], ids=["the only broker", "one of two"])
async def test_an_absent_broker_is_two_lines_whatever_is_tried_meanwhile(
    autojump_clock: MockClock,
    caplog: pytest.LogCaptureFixture,
    count: int,
    leaves_route: bool,
    ordered: bool,
) -> None:
    async with (
        trio.open_nursery() as tasks,
        scripted_cluster(count) as (nameserver, brokers, network),
    ):
        for broker in brokers:
            hold_pulls(Log(nameserver, broker, 10, Apache()), tasks)
            broker.answer(RequestCode.LOCK_BATCH_MQ, lock_all)
        announce(nameserver, *brokers)
        *others, last = brokers
        consumer = Consumer(
            "g",
            "T",
            nameserver=nameserver.address,
            connect=network.connect,
            start="earliest",
            ordered=ordered,
        )
        async with consumer:
            messages = aiter(consumer)
            for _ in range(10 * QUEUES * count):
                await anext(messages)
            with caplog.at_level(logging.WARNING):
                script = dict(last.answers)
                take_down(last)
                if leaves_route:
                    announce(nameserver, *others)
                await trio.sleep(100)
                (line,) = caplog.messages
                assert line.startswith(f"broker broker-{count - 1} does not answer, retrying: ")
                assert all(broker.count(COMMIT) >= QUEUES - 1 for broker in others)
                last.answers.clear()
                last.answers.update(script)
                announce(nameserver, *brokers)
                await trio.sleep(100)
            assert caplog.messages[1:] == [f"broker broker-{count - 1} answers again"]
            assert len(consumer.assignment) == QUEUES * count
        tasks.cancel_scope.cancel()
