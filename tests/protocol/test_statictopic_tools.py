"""Two tools that change a static topic at once, their requests in any order."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from headrace_protocol.statictopic.checks import BadMapping
from headrace_protocol.statictopic.plans import (
    Brokers,
    InvalidChange,
    Mode,
    NoChange,
    Plan,
    plan_create,
    plan_rebalance,
    plan_remap,
)
from headrace_protocol.statictopic.repair import plan_repair
from tests.support.static_cluster import Cluster

NOW = 1_700_000_000_000
LATER = NOW + 60_000

CHANGES: dict[str, Callable[[Brokers], Plan]] = {
    "create": lambda brokers: plan_create("T", 3, "ab", brokers, NOW),
    "create elsewhere": lambda brokers: plan_create("T", 4, "c", brokers, NOW),
    "grow": lambda brokers: plan_create("T", 5, "ab", brokers, LATER),
    "grow elsewhere": lambda brokers: plan_create("T", 6, "c", brokers, LATER),
    "strict": lambda brokers: plan_remap("T", "b", brokers, LATER),
    "strict elsewhere": lambda brokers: plan_remap("T", "c", brokers, LATER),
    "available": lambda brokers: plan_remap("T", "b", brokers, LATER, mode=Mode.AVAILABLE),
    "available elsewhere": lambda brokers: plan_remap(
        "T", "c", brokers, LATER, mode=Mode.AVAILABLE
    ),
    "rebalance": lambda brokers: plan_rebalance("T", brokers, LATER),
    "repair": lambda brokers: plan_repair("T", brokers, LATER),
}
CREATIONS = ("create", "create elsewhere", "repair")


def tool(cluster: Cluster, name: str) -> Iterator[None]:
    """A tool that reads, and sends its requests, with a break after each."""
    before = cluster.brokers()
    yield
    with suppress(BadMapping, NoChange, InvalidChange):
        yield from cluster.requests(CHANGES[name](before))


def run(cluster: Cluster, tools: list[Iterator[None]], order: random.Random) -> None:
    """Requests of several tools in any order, each leader taking messages in between.

    Some tools die in the middle.
    """
    while tools:
        next_one = order.choice(tools)
        if next(next_one, StopIteration) is StopIteration or order.random() < 0.03:
            tools.remove(next_one)
        for places in cluster.leaders().values():
            for broker, physical in places:
                cluster.write(broker, physical, 1)


def pairs() -> list[tuple[str, str]]:
    names = [*CHANGES]
    return [
        (one, other)
        for number, one in enumerate(names)
        for other in names[number:]
        if (one in CREATIONS) == (other in CREATIONS) or other == "repair"
    ]


@pytest.mark.parametrize(("one", "other"), pairs())
def test_two_tools_at_once(one: str, other: str) -> None:
    for seed in range(40):
        order = random.Random(f"{one} {other} {seed}")
        cluster = Cluster("abc")
        if one not in CREATIONS:
            cluster.carry_out(plan_create("T", 3, "a", cluster.brokers(), NOW))
        run(cluster, [tool(cluster, one), tool(cluster, other)], order)
        for _ in range(3):
            run(cluster, [tool(cluster, "repair"), tool(cluster, other)], order)
        if any(each.mapping for each in cluster.brokers().values()):
            with suppress(NoChange):
                cluster.carry_out(plan_repair("T", cluster.brokers(), LATER))
            cluster.whole()
            cluster.check_readable()
