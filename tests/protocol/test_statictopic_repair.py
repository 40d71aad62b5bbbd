"""Repair of static topics: changes that ended in the middle, and brokers that are gone."""

from __future__ import annotations

import copy
from contextlib import suppress

import msgspec
import pytest

from headrace_protocol.statictopic.checks import BadMapping
from headrace_protocol.statictopic.plans import (
    BrokerTopic,
    InvalidChange,
    Mode,
    NoChange,
    Plan,
    plan_create,
    plan_rebalance,
    plan_remap,
)
from headrace_protocol.statictopic.repair import LOST_OFFSETS, plan_repair
from tests.support.static_cluster import Cluster

NOW = 1_700_000_000_000
LATER = NOW + 60_000


def written(queues: int = 4, brokers: str = "abc", targets: str = "ab") -> Cluster:
    """A topic on some of the brokers, with messages in each queue but the first."""
    cluster = Cluster(brokers)
    cluster.carry_out(plan_create("T", queues, targets, cluster.brokers(), NOW))
    for queue, chain in cluster.whole().items():
        cluster.write(chain[-1].bname, chain[-1].queue_id, 10 * queue)
    return cluster


def change(cluster: Cluster, name: str) -> Plan:
    brokers = cluster.brokers()
    if name == "grow":
        return plan_create("T", 7, "abc", brokers, NOW)
    if name == "rebalance":
        return plan_rebalance("T", brokers, NOW)
    mode = Mode.AVAILABLE if name == "available" else Mode.STRICT
    return plan_remap("T", ["c", "b"], brokers, NOW, mode=mode)


def requests_of(name: str) -> int:
    cluster = written()
    return cluster.carry_out(change(cluster, name))


def test_a_creation_that_only_claimed_its_name_is_finished() -> None:
    cluster = Cluster("abc")
    cluster.carry_out(plan_create("T", 4, "ab", cluster.brokers(), NOW), requests=3)
    with pytest.raises(BadMapping, match=r"dirty is set on a: .*topic repair T"):
        cluster.whole()
    repair(cluster)
    assert len(cluster.whole()) == 4


def write_to_leaders(cluster: Cluster) -> None:
    for places in cluster.leaders().values():
        for broker, physical in places:
            cluster.write(broker, physical, 3)


def repair(cluster: Cluster, forget: str = "", now: int = LATER + 60_000) -> Plan | None:
    try:
        plan = plan_repair("T", cluster.brokers(), now, forget=forget)
    except NoChange:
        return None
    cluster.carry_out(plan)
    return plan


@pytest.mark.parametrize("name", ["grow", "strict", "available", "rebalance"])
def test_a_repair_that_ends_between_any_two_requests(name: str) -> None:
    for sent in range(1, requests_of(name)):
        for again in range(1, 12):
            cluster = written()
            cluster.carry_out(change(cluster, name), requests=sent)
            write_to_leaders(cluster)
            with suppress(NoChange):
                cluster.carry_out(plan_repair("T", cluster.brokers(), LATER), requests=again)
                write_to_leaders(cluster)
                repair(cluster)
            cluster.whole()
            cluster.check_readable()


def test_a_strict_remap_ends_without_a_gap() -> None:
    cluster = written(1, "ab", "a")
    cluster.write("a", 0, 5)
    cluster.carry_out(plan_remap("T", ["b"], cluster.brokers(), NOW), requests=3)
    assert cluster.leaders() == {}
    repair(cluster)
    assert [item.logic_offset for item in cluster.whole()[0]] == [0, 5]


def test_a_whole_topic_needs_no_repair() -> None:
    with pytest.raises(NoChange, match="is whole"):
        plan_repair("T", written().brokers(), NOW)
    with pytest.raises(InvalidChange, match="not a static topic"):
        plan_repair("T", {"a": BrokerTopic()}, NOW)


def test_a_broker_that_joined_gets_its_entry() -> None:
    cluster = written()
    before = cluster.whole()
    cluster.join("d")
    repair(cluster)
    assert cluster.whole() == before
    assert cluster.brokers()["d"].mapping is not None


def test_a_lost_mapping_is_restored_from_the_second_leader() -> None:
    cluster = written(2, "ab", "a")
    cluster.carry_out(plan_remap("T", ["b"], cluster.brokers(), NOW))
    before = cluster.whole()
    cluster.lose_mapping("b")
    repair(cluster)
    assert cluster.whole() == before
    assert cluster.brokers()["b"].write_queues == 2


def test_an_undecided_backup_of_a_lost_mapping_jumps() -> None:
    """Apache's tools leave the backup undecided, so the offsets of the leader are unknown."""
    cluster = written(1, "ab", "a")
    cluster.write("a", 0, 5)
    plan = plan_remap("T", ["b"], cluster.brokers(), NOW, mode=Mode.AVAILABLE)
    cluster.carry_out(plan, requests=4)
    cluster.lose_mapping("b")
    repair(cluster)
    assert cluster.whole()[0][-1].logic_offset == 10_000


def test_a_lost_mapping_without_a_copy_is_not_invented() -> None:
    cluster = written(2, "ab", "ab")
    cluster.lose_mapping("b")
    with pytest.raises(BadMapping, match=r"queue 1: .*lost with the mapping of b.*forget-broker b"):
        repair(cluster)


def test_a_broker_that_is_away_is_waited_for() -> None:
    cluster = written(2, "abc", "ab")
    cluster.carry_out(plan_remap("T", ["c"], cluster.brokers(), NOW, queues=[1]))
    away = cluster.remove("b")
    cluster.carry_out(plan_create("T", 5, "a", cluster.brokers(), LATER), requests=3)
    for known in ([], ["b"]):
        with pytest.raises(BadMapping, match="b is away: start it"):
            plan_repair("T", cluster.brokers(), LATER, known=known)
    cluster.put("b", away)
    repair(cluster)
    assert len(cluster.whole()) == 5


def test_a_queue_that_no_broker_leads_is_not_invented() -> None:
    cluster = written(2, "abc", "ab")
    cluster.remove("b")
    with pytest.raises(BadMapping, match=r"queue 1: .*no leader.*forget-broker"):
        repair(cluster)


def test_a_forgotten_leader_is_replaced_behind_all_offsets_it_gave() -> None:
    cluster = written(2, "abc", "ab")
    cluster.carry_out(plan_remap("T", ["c"], cluster.brokers(), NOW, queues=[1]))
    leader = cluster.whole()[1][-1]
    assert (leader.bname, leader.logic_offset) == ("c", 10)
    cluster.write("c", 0, 25_000)
    cluster.remove("c")
    plan = repair(cluster, forget="c")
    assert plan is not None
    assert [(gone.queue, gone.broker, gone.start, gone.end) for gone in plan.gone] == [
        (1, "c", 10, None)
    ]
    first, second = cluster.whole()[1]
    assert (first.bname, first.end_offset) == ("b", 10)
    assert second.logic_offset > LOST_OFFSETS
    assert second.gen == leader.gen + 1
    cluster.check_readable(gone="c")


def test_a_forgotten_broker_leaves_no_item() -> None:
    cluster = written(1, "abc", "a")
    for now, target in enumerate("bca", NOW):
        leader = cluster.whole()[0][-1]
        cluster.write(leader.bname, leader.queue_id, 5)
        cluster.carry_out(plan_remap("T", [target], cluster.brokers(), now + 9000))
    before = cluster.whole()[0]
    cluster.remove("b")
    plan = repair(cluster, forget="b")
    assert plan is not None
    assert [(gone.broker, gone.start, gone.end) for gone in plan.gone] == [("b", 5, 10)]
    first, *rest = before
    assert cluster.whole()[0] == (msgspec.structs.replace(first, end_offset=5), *rest[1:])


def test_a_queue_that_only_a_forgotten_broker_knew_starts_anew() -> None:
    cluster = written(2, "ab", "ab")
    cluster.remove("b")
    plan = repair(cluster, forget="b")
    assert plan is not None
    assert [(gone.queue, gone.broker, gone.start) for gone in plan.gone] == [(1, None, 0)]
    assert cluster.whole()[1][-1].logic_offset > LOST_OFFSETS


@pytest.mark.parametrize("name", ["grow", "strict", "available", "rebalance"])
@pytest.mark.parametrize("dead", ["a", "b", "c"])
def test_a_broker_dies_with_the_tool(name: str, dead: str) -> None:
    for sent in range(1, requests_of(name)):
        cluster = written()
        cluster.carry_out(change(cluster, name), requests=sent)
        write_to_leaders(cluster)
        saved = copy.deepcopy(cluster)
        cluster.remove(dead)
        repair(cluster, forget=dead)
        cluster.whole()
        cluster.check_readable(gone=dead)
        # It comes back instead.
        repair(saved)
        saved.whole()
        saved.check_readable()


def test_a_forgotten_broker_that_comes_back_leads_nothing() -> None:
    cluster = written(1, "ab", "a")
    cluster.carry_out(
        plan_remap("T", ["b"], cluster.brokers(), NOW, mode=Mode.AVAILABLE), requests=4
    )
    stale = cluster.remove("b")
    repair(cluster, forget="b")
    cluster.put("b", stale)
    repair(cluster, now=LATER + 120_000)
    assert cluster.whole()[0][-1].bname == "a"


def test_a_half_done_delete_names_the_broker() -> None:
    cluster = written(1, "ab", "a")
    cluster.carry_out(plan_remap("T", ["b"], cluster.brokers(), NOW))
    cluster.put("b", BrokerTopic())
    with pytest.raises(
        BadMapping, match=r"queueId 0 is gone on b.*topic delete T.*forget-broker b"
    ):
        repair(cluster)
