"""Plans that create, grow, remap and rebalance static topics, on brokers that are dictionaries."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from headrace_protocol.statictopic.checks import BadMapping
from headrace_protocol.statictopic.plans import (
    BrokerTopic,
    Closed,
    InvalidChange,
    LostMapping,
    Mode,
    NoChange,
    plan_create,
    plan_rebalance,
    plan_remap,
)
from tests.support.seeds import seeds
from tests.support.static_cluster import Cluster

NOW = 1_700_000_000_000


def created(queues: int = 4, brokers: str = "ab", targets: str = "") -> Cluster:
    cluster = Cluster(brokers)
    plan = plan_create("T", queues, targets or brokers, cluster.brokers(), NOW)
    cluster.carry_out(plan)
    return cluster


def test_a_topic_is_spread_over_its_brokers() -> None:
    cluster = created(5, "abc", "ab")
    chains = cluster.whole()
    assert [(chain[0].bname, chain[0].queue_id) for chain in chains.values()] == [
        ("a", 0),
        ("b", 0),
        ("a", 1),
        ("b", 1),
        ("a", 2),
    ]
    assert {chain[0].logic_offset for chain in chains.values()} == {0}
    mapping = cluster.brokers()["c"].mapping
    assert mapping is not None
    assert (mapping.hosted, mapping.total_queues, mapping.epoch) == ({}, 5, NOW)


def test_a_topic_grows_where_fewest_queues_are() -> None:
    cluster = created(3, "ab")
    before = cluster.whole()
    cluster.carry_out(plan_create("T", 6, "ab", cluster.brokers(), NOW))
    chains = cluster.whole()
    assert {queue: chains[queue] for queue in before} == before
    assert Counter(chain[-1].bname for chain in chains.values()) == {"a": 3, "b": 3}
    assert {each.mapping.epoch for each in cluster.brokers().values() if each.mapping} == {
        NOW + 1000
    }


@pytest.mark.parametrize(("queues", "message"), [(2, "only added"), (0, "1 to"), (65_537, "1 to")])
def test_a_topic_never_shrinks(queues: int, message: str) -> None:
    with pytest.raises(InvalidChange, match=message):
        plan_create("T", queues, "a", created(3).brokers(), NOW)


def test_a_topic_that_is_as_wanted_is_not_changed() -> None:
    with pytest.raises(NoChange, match="only added"):
        plan_create("T", 3, "a", created(3).brokers(), NOW)


def test_a_strict_remap_leaves_no_gap() -> None:
    cluster = created(2, "ab", "a")
    cluster.write("a", 0, 7)
    plan = plan_remap("T", ["b"], cluster.brokers(), NOW)
    assert [[step.broker for step in stage] for stage in plan.closing()] == [[], ["a"]]
    cluster.carry_out(plan)
    chains = cluster.whole()
    first, second = chains[0]
    assert (second.bname, second.gen, second.logic_offset, second.queue_id) == ("b", 1, 7, 0)
    assert first.end_offset == -1
    # The other queue was empty, so its first item is gone.
    assert [(item.bname, item.gen, item.logic_offset) for item in chains[1]] == [("b", 1, 0)]
    assert cluster.brokers()["a"].mapping.hosted == chains  # type: ignore[union-attr]


def test_an_available_remap_jumps_and_opens_the_new_leader_first() -> None:
    cluster = created(1, "ab", "a")
    cluster.write("a", 0, 7)
    plan = plan_remap("T", ["b"], cluster.brokers(), NOW, mode=Mode.AVAILABLE)
    (opened,), (closed,) = plan.closing()
    assert (opened.broker, closed.broker) == ("b", "a")
    assert opened.mapping.hosted[0][-1].logic_offset == -1
    cluster.carry_out(plan)
    first, second = cluster.whole()[0]
    assert (first.end_offset, second.logic_offset) == (7, 10_000)


def test_behind_an_apache_broker_offsets_jump_in_any_mode() -> None:
    cluster = created(1, "ab", "a")
    cluster.write("a", 0, 7)
    cluster.exact.remove("a")
    cluster.carry_out(plan_remap("T", ["b"], cluster.brokers(), NOW))
    first, second = cluster.whole()[0]
    assert (first.end_offset, second.logic_offset) == (-1, 10_000)


def test_a_new_leader_knows_the_empty_item_that_it_replaces() -> None:
    cluster = created(2, "abc", "a")
    cluster.write("a", 0, 7)
    plan = plan_remap("T", ["b"], cluster.brokers(), NOW)
    closed = {queue: Closed(item, 7 - 7 * queue) for queue, item in plan.closed_items().items()}
    steps = [step for stage in plan.final(closed, "abc") for step in stage]
    assert {step.broker: step.emptied for step in steps} == {
        "a": {},
        "b": {1: plan.closed_items()[1]},
        "c": {},
    }


def test_chosen_queues_move_and_others_stay() -> None:
    cluster = created(6, "abc", "ab")
    before = cluster.whole()
    cluster.carry_out(plan_remap("T", ["c", "b"], cluster.brokers(), NOW, queues=[0, 1, 2]))
    chains = cluster.whole()
    assert {queue for queue in chains if chains[queue][-1] != before[queue][-1]} == {0, 2}
    assert {chains[queue][-1].bname for queue in (0, 2)} == {"c"}
    with pytest.raises(InvalidChange, match="queues 0 to 5, not 6"):
        plan_remap("T", ["c"], cluster.brokers(), NOW, queues=[6])
    with pytest.raises(NoChange, match="already"):
        plan_remap("T", ["c"], cluster.brokers(), NOW, queues=[0])


def test_a_new_broker_gets_its_share_by_the_fewest_moves() -> None:
    cluster = created(8, "ab")
    cluster.join("c")
    plan = plan_rebalance("T", cluster.brokers(), NOW)
    assert len(plan.moved()) == 2
    cluster.carry_out(plan)
    led = Counter(chain[-1].bname for chain in cluster.whole().values())
    assert led == {"a": 3, "b": 3, "c": 2}
    with pytest.raises(NoChange, match="already"):
        plan_rebalance("T", cluster.brokers(), NOW)


def test_a_target_must_be_a_master() -> None:
    cluster = created()
    with pytest.raises(InvalidChange, match="no master named x"):
        plan_remap("T", ["x"], cluster.brokers(), NOW)
    with pytest.raises(InvalidChange, match="no broker"):
        plan_remap("T", [], cluster.brokers(), NOW)


def test_a_topic_that_is_not_whole_is_not_changed() -> None:
    cluster = created(2, "ab", "a")
    plan = plan_remap("T", ["b"], cluster.brokers(), NOW)
    cluster.carry_out(plan, requests=1)
    with pytest.raises(BadMapping, match="topic repair T"):
        plan_remap("T", ["b"], cluster.brokers(), NOW)
    lost = created().brokers() | {"a": BrokerTopic(write_queues=2, is_lost=True)}
    with pytest.raises(LostMapping, match="broker a has the topic without its mapping"):
        plan_create("T", 9, ["b"], lost, NOW)


def test_no_physical_queue_is_used_twice() -> None:
    brokers = created(1, "ab", "a").brokers()
    brokers["b"] = BrokerTopic(mapping=brokers["b"].mapping, read_queues=5, write_queues=3)
    plan = plan_remap("T", ["b"], brokers, NOW)
    ends = {0: Closed(plan.closed_items()[0], 1)}
    _, (step,), _ = plan.final(ends, "ab")
    assert step.mapping.hosted[0][-1].queue_id == 5
    assert (step.read_queues, step.write_queues) == (6, 6)


@pytest.mark.parametrize("seed", seeds(100))
def test_offsets_go_on_through_random_remaps(seed: int) -> None:
    """Queues stay evenly spread, written offsets stay readable, and ends never fall."""
    choice = random.Random(seed)
    cluster = created(choice.randint(1, 9), "abcd", "ab")
    ends: dict[int, int] = {}
    for now in range(NOW, NOW + 30_000, 3000):
        for chain in cluster.whole().values():
            cluster.write(chain[-1].bname, chain[-1].queue_id, choice.choice([0, 0, 3, 12_000]))
        targets = choice.sample("abcd", choice.randint(1, 4))
        mode = choice.choice([*Mode])
        try:
            cluster.carry_out(plan_remap("T", targets, cluster.brokers(), now, mode=mode))
        except NoChange:
            continue
        chains = cluster.whole()
        led = Counter(chain[-1].bname for chain in chains.values())
        assert led.keys() <= {*targets}
        assert max(led.values()) - min(led[name] for name in targets) <= 1
        for queue, chain in chains.items():
            end = cluster.end(chain)
            assert end >= ends.get(queue, 0)
            ends[queue] = end
        cluster.check_readable()
