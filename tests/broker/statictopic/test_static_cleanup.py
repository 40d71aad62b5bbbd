"""Clean-up of mappings: items that it drops, and items that it must keep."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from headrace_broker.consumer.unconsumed import InnerConsumer
from headrace_broker.peers.callers import Caller
from headrace_broker.peers.peers import Ask, Then
from headrace_broker.statictopic.cleanup import MappingCleanup
from headrace_broker.statictopic.left_groups import LeftGroups
from headrace_broker.store.settings import Retention
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.drivers.errors import ConnectFailed
from headrace_protocol.headers import (
    OffsetResponseHeader,
    QueryConsumerOffsetHeader,
    UpdateConsumerOffsetHeader,
)
from tests.support.broker import BrokerUnderTest
from tests.support.static_brokers import GROUP, TOPIC, Brokers, item
from tests.support.stores import put

ANY_HOUR = Retention(
    delete_hours=frozenset(range(24)), clean_ratio=1.0, force_ratio=1.0, refuse_ratio=1.0
)
DAY_S = 24 * 3600
FIRST = item("c", 0, 0)
SECOND = item("b", 1, 10_000)
LEADER = item("a", 2, 20_000)


@pytest.fixture
def brokers(tmp_path: Path) -> Brokers:
    """A queue that has moved from c to b to a, with messages in each item."""
    brokers = Brokers(tmp_path, "abc")
    for *older, leader in ((FIRST,), (FIRST, SECOND), (FIRST, SECOND, LEADER)):
        brokers.map((*older, leader), only="".join(each.bname[-1] for each in (*older, leader)))
        for _ in range(4):
            brokers.send(leader.bname[-1], bytes(900))
    return brokers


def chain(brokers: Brokers, name: str) -> list[int]:
    """The gens that a broker has."""
    mapping = brokers[name].mappings.get(TOPIC)
    assert mapping is not None
    return [each.gen for each in mapping.chain(0) or ()]


async def expire(broker: BrokerUnderTest, end: int = 4) -> None:
    """Remove all messages so far."""
    store = broker.store
    for _ in range(12):
        put(store, store.queue("FILLER", 0), bytes(900))
    store.index_tick()
    store.flusher.flush_now()
    store.cleaner.retention = ANY_HOUR
    written_s = broker.clock.ms / 1000
    for file in store.commit_log.files.files[:-1]:
        os.utime(file.path, times=(written_s, written_s))
    broker.clock.ms += 10 * DAY_S * 1000
    await store.cleaner.round()
    assert store.source(store.queue(TOPIC, 0)).min_offset() == end


async def clean(brokers: Brokers, names: str, *waiting: InnerConsumer) -> None:
    for name in names:
        broker = brokers[name]
        cleanup = MappingCleanup(
            broker.mappings,
            broker.store,
            broker.peers,
            broker.mapping_changes.is_changing,
            lambda: waiting,
            LeftGroups(broker.mappings.broker_name, broker.offsets, broker.peers),
            broker.directory.source_to_list,
        )
        await cleanup.clean()


async def test_nothing_with_data_is_dropped(brokers: Brokers) -> None:
    before = [chain(brokers, name) for name in "abc"]
    assert before[:2] == [[0, 1, 2], [0, 1, 2]]
    await clean(brokers, "abc")
    assert [chain(brokers, name) for name in "abc"] == before


async def test_the_earliest_item_goes_with_its_data_in_both_copies(brokers: Brokers) -> None:
    await expire(brokers["c"])
    await clean(brokers, "ab")
    assert [chain(brokers, name) for name in "ab"] == [[1, 2], [1, 2]]
    await expire(brokers["b"])
    await clean(brokers, "ab")
    assert [chain(brokers, name) for name in "ab"] == [[2], [2]]


@pytest.mark.parametrize(
    ("committed", "resumed"), [(4, 10_000), (10_002, 10_002), (20_001, 20_001)]
)
async def test_a_group_goes_on_behind_an_item_that_goes(
    brokers: Brokers, committed: int, resumed: int
) -> None:
    """Without an offset it would begin anew, and skip what it has not read."""
    commit(brokers, committed)
    await expire(brokers["c"])
    await clean(brokers, "ab")
    assert chain(brokers, "a") == [1, 2]
    assert committed_offset(brokers) == resumed


async def test_an_item_stays_while_the_broker_of_a_group_s_offset_is_away(brokers: Brokers) -> None:
    commit(brokers, 4)
    await expire(brokers["c"])
    brokers["a"].peers.begin = offsets_are_away(brokers)  # type: ignore[method-assign]
    await clean(brokers, "a")
    assert chain(brokers, "a") == [0, 1, 2]


def offsets_are_away(brokers: Brokers) -> Any:
    """``Peers.begin`` without answers about groups' offsets."""

    def begin(caller: Caller, ask: Ask, then: Then) -> None:
        if ask.code == RequestCode.QUERY_CONSUMER_OFFSET:
            then(ConnectFailed(ask.peer, "it is away"))
        else:
            brokers.begin(caller, ask, then)

    return begin


def commit(brokers: Brokers, offset: int) -> None:
    for broker in brokers.values():
        broker.join(GROUP, "c", TOPIC)
    header = UpdateConsumerOffsetHeader(
        consumer_group=GROUP, topic=TOPIC, queue_id=0, commit_offset=offset
    )
    answer = brokers["a"].ask(RequestCode.UPDATE_CONSUMER_OFFSET, header)
    assert answer.code == ResponseCode.SUCCESS, answer.remark


def committed_offset(brokers: Brokers) -> int:
    header = QueryConsumerOffsetHeader(
        consumer_group=GROUP, topic=TOPIC, queue_id=0, set_zero_if_not_found=False
    )
    answer = brokers["a"].ask(RequestCode.QUERY_CONSUMER_OFFSET, header)
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return answer.command.header(OffsetResponseHeader).offset


async def test_an_item_in_the_middle_waits_for_those_before_it(brokers: Brokers) -> None:
    await expire(brokers["b"])
    await clean(brokers, "ab")
    assert [chain(brokers, name) for name in "ab"] == [[0, 1, 2], [0, 1, 2]]


async def test_nothing_is_dropped_on_a_guess(brokers: Brokers) -> None:
    await expire(brokers["c"])
    brokers.away.add("c")
    await clean(brokers, "ab")
    assert chain(brokers, "a") == [0, 1, 2]


async def test_the_leader_stays_without_data(brokers: Brokers) -> None:
    for name in "abc":
        await expire(brokers[name])
    await clean(brokers, "ab")
    assert chain(brokers, "a") == [2]
    assert brokers["a"].mappings.leads(TOPIC, 0) == 0


async def test_a_broker_that_led_earlier_drops_its_chain(brokers: Brokers) -> None:
    brokers.map((FIRST, SECOND, LEADER), only="c")
    await clean(brokers, "c")
    assert chain(brokers, "c")  # it has data
    await expire(brokers["c"])
    await clean(brokers, "c")
    assert chain(brokers, "c") == []


async def test_a_broker_that_missed_the_last_move_asks_the_leader_that_it_knows(
    tmp_path: Path,
) -> None:
    brokers = Brokers(tmp_path, "abc")
    brokers.map((FIRST,))
    brokers.send("c", bytes(900))
    brokers.map((FIRST, SECOND))
    brokers.map((FIRST, SECOND, LEADER), only="ab")
    brokers.away.add("b")
    await clean(brokers, "c")
    assert chain(brokers, "c") == [0, 1]
    brokers.away.clear()
    await clean(brokers, "c")
    assert chain(brokers, "c") == [0, 1]  # it has data
    await expire(brokers["c"], end=1)
    await clean(brokers, "c")
    assert chain(brokers, "c") == []


async def test_an_item_stays_while_messages_wait_that_may_name_it(brokers: Brokers) -> None:
    broker = brokers["c"]
    put(broker.store, broker.store.queue("WAITING", 0))
    await expire(broker)
    brokers.map((FIRST, SECOND, LEADER), only="c")
    waiting = InnerConsumer("WAITING", "x", lambda _queue_id: 0)
    await clean(brokers, "c", waiting)
    assert chain(brokers, "c") != []
    delivered = InnerConsumer("WAITING", "x", lambda _queue_id: 1)
    await clean(brokers, "c", delivered)
    assert chain(brokers, "c") == []
