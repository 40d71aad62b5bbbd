"""An absent broker is a line in a group member's log per half minute, and one when it returns."""

from __future__ import annotations

import logging

import pytest
import trio

from headrace import Consumer
from headrace_protocol.codes import RequestCode
from tests.support.member import COMMIT, NO_TOPIC, Apache, Log, hold_pulls, lock_all
from tests.support.scripted import Scripted, close, route, scripted_cluster

QUEUES = 4
MEMBERSHIP = (RequestCode.HEART_BEAT, RequestCode.GET_CONSUMER_LIST_BY_GROUP)


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
async def test_an_absent_broker_is_few_lines_whatever_is_tried_meanwhile(
    autojump_clock: object,
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
                (line, *later) = caplog.messages
                assert line.startswith(f"broker broker-{count - 1} is unavailable, retrying: ")
                # Nobody asks for a broker that has left the route, except for its last queues.
                is_asked = not (leaves_route and others)
                assert [text.partition(" (")[0] for text in later] == [
                    f"broker broker-{count - 1} has been unavailable for {seconds} s"
                    for seconds in (30, 60, 90)
                    if is_asked
                ]
                assert all(broker.count(COMMIT) >= QUEUES - 1 for broker in others)
                last.answers.clear()
                last.answers.update(script)
                announce(nameserver, *brokers)
                await trio.sleep(100)
            (end,) = caplog.messages[len(later) + 1 :]
            told, _, duration = end.partition(" again after ")
            assert told == f"broker broker-{count - 1} is available"
            # Until the member asks for the route again and takes its queues over.
            assert 100 <= int(duration.removesuffix(" s")) <= (100 if is_asked else 150)
            assert len(consumer.assignment) == QUEUES * count
        tasks.cancel_scope.cancel()
