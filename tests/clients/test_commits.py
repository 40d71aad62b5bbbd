"""Commits of several queues of which one fails: the others are committed all the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from headrace import MessageQueue
from headrace.consumer.offset_store import OffsetStore
from headrace.errors import BrokerError, ConnectionLost, NoQueue
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.serving import Reply
from headrace_protocol.statictopic.mapping import logic_broker_name
from tests.support.scripted import close, open_instance, scripted_cluster, static_route

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.errors import HeadraceError
    from tests.support.scripted import Asked, Scripted

    Begin = Callable[[Scripted, list[Scripted]], list[MessageQueue]]

COMMIT = RequestCode.UPDATE_CONSUMER_OFFSET
PLAIN = [MessageQueue("T", f"broker-{number}", queue) for number in (0, 1) for queue in (0, 1)]
LOGIC = [MessageQueue("T", logic_broker_name(), queue) for queue in range(4)]


def refuse_a_queue(_: Scripted, brokers: list[Scripted]) -> list[MessageQueue]:
    def refuse(asked: Asked) -> Reply:
        is_first = asked.ext["queueId"] == "0"
        return Reply(code=ResponseCode.SYSTEM_ERROR if is_first else ResponseCode.SUCCESS)

    brokers[0].answer(COMMIT, refuse)
    return PLAIN


def end_a_broker(_: Scripted, brokers: list[Scripted]) -> list[MessageQueue]:
    brokers[0].answer(COMMIT, close)
    return PLAIN


def lose_leaders(nameserver: Scripted, brokers: list[Scripted]) -> list[MessageQueue]:
    """One is not registered, and a queue has none."""
    route = static_route(*brokers, leads=[[2, 3], [1]], total=4, away=1)
    nameserver.answer(RequestCode.GET_ROUTEINFO_BY_TOPIC, route)
    return LOGIC


@pytest.mark.parametrize(
    ("begin", "error", "is_oneway", "committed"),
    [
        (refuse_a_queue, BrokerError, False, [[0, 1], [2, 3]]),
        (end_a_broker, ConnectionLost, False, [[0], [2, 3]]),
        (lose_leaders, NoQueue, False, [[2, 3], []]),
        (lose_leaders, NoQueue, True, [[2, 3], []]),
    ],
    ids=["refused", "broker lost", "no leader", "no leader, one-way"],
)
async def test_a_queue_that_fails_holds_up_no_other(
    begin: Begin,
    error: type[HeadraceError],
    is_oneway: bool,
    committed: list[list[int]],
    autojump_clock: object,
) -> None:
    """committed: by broker, the numbers of the queues whose commits arrive, refused or not."""
    async with scripted_cluster(2, queues=2) as (nameserver, brokers, network):
        queues = begin(nameserver, brokers)
        async with open_instance(nameserver.address, network) as instance:
            offsets = OffsetStore(instance)
            commit = offsets.commit_oneway if is_oneway else offsets.commit
            with pytest.raises(error):
                await commit("g", {queue: number for number, queue in enumerate(queues)})
            await trio.sleep(1)
    arrived = [
        [int(asked.ext["commitOffset"]) for asked in broker.asked if asked.code == COMMIT]
        for broker in brokers
    ]
    assert arrived == committed
