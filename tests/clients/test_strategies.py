"""Strategies: the shares that Java's classes compute for the same groups.

``allocations.txt.gz`` is made by tests/conformance/java's ``headrace.conformance.Allocations``:
``java -cp "classes:lib/*" headrace.conformance.Allocations 10000 allocations.txt`` in
``tests.conformance.peer.java_build()``, and ``gzip -9n``.
"""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

import headrace
from headrace.consumer import strategies
from headrace.consumer.rebalance import allocate, queue_order
from headrace.consumer.strategies import Strategy
from headrace.errors import ConfigurationError
from headrace_protocol.bodies import MessageQueue
from tests.support.verbs import produce, take

JAVA = Path(__file__).with_name("allocations.txt.gz")
LETTERS = ("", "a", "Z", "-", "\u00e9", "\uff5e", "\U0001f600")


def broker_room(queue: MessageQueue) -> str:
    return queue.broker_name.partition("@")[0]


def client_room(client_id: str) -> str:
    return client_id.partition("@")[0]


def strategies_of(queues: Sequence[MessageQueue]) -> list[Strategy]:
    def nearby(inner: Strategy) -> Strategy:
        return strategies.machine_room_nearby(inner, broker_room, client_room)

    return [
        strategies.averagely,
        strategies.averagely_by_circle,
        strategies.config(queues[: (len(queues) + 1) // 2]),
        strategies.machine_room({"r0", "r2"}),
        nearby(strategies.averagely),
        nearby(strategies.averagely_by_circle),
        strategies.consistent_hash(),
        strategies.consistent_hash(3),
    ]


def group(
    brokers: int, queue_count: int, member_count: int, rooms: int, salt: int
) -> tuple[list[MessageQueue], list[str]]:
    queues = [
        MessageQueue(f"topic-{salt}", f"r{broker % rooms}@b{broker}", queue_id)
        for broker in range(brokers)
        for queue_id in range(queue_count)
    ]
    members = [
        f"r{(salt + n) % (rooms + 1)}@{LETTERS[(salt + n) % 7]}{salt * (n + 7) % 10_007}"
        for n in range(member_count)
    ]
    return queues, members


@pytest.mark.parametrize("step", [10, pytest.param(1, marks=pytest.mark.long)])
def test_all_shares_are_javas(step: int) -> None:
    lines = gzip.decompress(JAVA.read_bytes()).decode().splitlines()
    assert len(lines) == 10_000
    for line in lines[::step]:
        fields = line.split()
        brokers, queue_count, member_count, rooms, me, salt = map(int, fields[:6])
        queues, members = group(brokers, queue_count, member_count, rooms, salt)
        ordered = sorted(queues, key=queue_order)
        for strategy, expected in zip(strategies_of(ordered), fields[6:], strict=True):
            mine = allocate(strategy, queues, members, members[me])
            bits = sum(1 << index for index, queue in enumerate(ordered) if queue in mine)
            assert f"{bits:x}" == expected, (strategy, line)


@pytest.mark.parametrize("number", [0, 1, 4, 5, 6, 7])
def test_each_queue_has_one_member(number: int) -> None:
    queues, members = group(4, 5, 7, 3, 2026)
    strategy = strategies_of(queues)[number]
    owners = Counter(
        queue for member in members for queue in allocate(strategy, queues, members, member)
    )
    assert owners == Counter(queues)


def test_strategies_that_cannot_be() -> None:
    with pytest.raises(ConfigurationError, match="virtual_nodes=0"):
        strategies.consistent_hash(0)
    queues, members = group(1, 1, 1, 1, 1)
    homeless = strategies.machine_room_nearby(strategies.averagely, lambda _: "", client_room)
    with pytest.raises(ConfigurationError, match="has no room"):
        allocate(homeless, queues, members, members[0])


def test_strategies_have_names() -> None:
    for name in ("averagely", "averagely_by_circle", "consistent_hash"):
        assert strategies.name_of(strategies.named(name)) == name
    for made in (strategies.config([]), strategies.machine_room({"r0"})):
        assert strategies.named(made) is made
    assert strategies.name_of(strategies.machine_room(())) == "machine_room"
    with pytest.raises(ConfigurationError, match=r"give headrace.*strategies\.config\(\.\.\.\)"):
        headrace.Consumer("g", "t", strategy="config")
    with pytest.raises(ConfigurationError, match="'avg': must be one of averagely, "):
        headrace.Consumer("g", "t", strategy="avg")


async def test_a_consumer_uses_its_strategy() -> None:
    def second_half(
        queues: Sequence[MessageQueue], _members: Sequence[str], _me: str
    ) -> Sequence[MessageQueue]:
        # A queue that the topic does not have is nobody's.
        return [*queues[len(queues) // 2 :], MessageQueue("T", "elsewhere", 0)]

    async with headrace.embedded(memory=True) as mq:
        await produce(mq, 40)
        async with mq.consumer("g", "T", strategy=second_half) as consumer:
            assert [q.queue_id for q in consumer.assignment if q.topic == "T"] == [2, 3]
        async with mq.consumer("g", "T", strategy="consistent_hash") as consumer:
            assert sorted(await take(consumer, 40)) == list(range(40))
