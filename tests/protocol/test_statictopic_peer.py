"""Static topics: the tables that Apache RocketMQ's own classes compute.

``static_tables.jsonl.gz`` is made by ``headrace.conformance.StaticTables`` of
tests/conformance/java, in ``tests.conformance.peer.java_build()``, and ``gzip -9n``:
``java -cp "classes:lib/*" headrace.conformance.StaticTables 150 static_tables.jsonl``.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from headrace_protocol.statictopic import offsets
from headrace_protocol.statictopic.checks import BadMapping, chains_of, check_chain, check_cluster
from headrace_protocol.statictopic.mapping import Chain, MappingItem, TopicMapping
from headrace_protocol.statictopic.plans import (
    Brokers,
    BrokerTopic,
    NoChange,
    Plan,
    plan_create,
    plan_remap,
)

TABLES = Path(__file__).with_name("static_tables.jsonl.gz")


@cache
def lines() -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(TABLES.read_bytes()).splitlines()]


def of_kind(*kinds: str) -> list[dict[str, Any]]:
    found = [line for line in lines() if line["kind"] in kinds]
    assert len(found) > 100 / len(kinds)
    return found


def brokers_of(table: dict[str, Any]) -> Brokers:
    return {
        name: BrokerTopic(
            mapping=msgspec.convert(each["mapping"], TopicMapping, str_keys=True),
            read_queues=each["read"],
            write_queues=each["write"],
        )
        for name, each in table.items()
    }


def chains_in(brokers: Brokers) -> dict[int, Chain]:
    return chains_of(each.mapping for each in brokers.values() if each.mapping)


def planned(line: dict[str, Any]) -> tuple[Brokers, Plan | None, Brokers]:
    """The state before, our plan if anything changes, and the peer's state after."""
    before = brokers_of(line["before"])
    every = dict.fromkeys(line["all"], BrokerTopic()) | before
    now_ms = line["epoch"]
    try:
        if line["kind"] == "remap":
            plan = plan_remap("T", line["targets"], every, now_ms)
        else:
            plan = plan_create("T", line["total"], line["targets"], every, now_ms)
    except NoChange:
        return every, None, brokers_of(line["after"])
    return every, plan, brokers_of(line["after"])


def leader_fields(chains: dict[int, Chain]) -> dict[int, tuple[int, int, int, int]]:
    return {
        queue: (chain[-1].gen, chain[-1].start_offset, chain[-1].end_offset, chain[-1].logic_offset)
        for queue, chain in chains.items()
    }


def test_changes_spread_queues_as_the_peers_do() -> None:
    for line in of_kind("create", "grow", "remap"):
        before, plan, after = planned(line)
        chains = plan.chains if plan else chains_in(before)
        ours = Counter(chain[-1].bname for chain in chains.values())
        theirs = Counter(chain[-1].bname for chain in chains_in(after).values())
        assert ours.total() == line["total"]
        assert sorted(ours.values()) == sorted(theirs.values()), line


def test_a_remap_moves_no_more_queues_than_the_peers() -> None:
    for line in of_kind("remap"):
        before, plan, after = planned(line)
        old, new = chains_in(before), chains_in(after)
        moved = [queue for queue in new if new[queue] != old[queue]]
        assert len(plan.moved() if plan else ()) <= len(moved), line


def test_new_items_have_the_peers_fields() -> None:
    for line in of_kind("create", "grow", "remap"):
        before, plan, after = planned(line)
        old, ours = chains_in(before), leader_fields(plan.chains) if plan else {}
        theirs = leader_fields(chains_in(after))
        for queue in ours:
            if all(fields[queue] != leader_fields(old).get(queue) for fields in (ours, theirs)):
                assert ours[queue] == theirs[queue], line


def test_the_peers_tables_are_whole() -> None:
    for line in of_kind("create", "grow"):
        mappings = [each.mapping for each in brokers_of(line["after"]).values() if each.mapping]
        assert len(check_cluster(mappings)) == line["total"]


def test_chains_are_accepted_as_by_the_peer() -> None:
    accepted = 0
    for line in of_kind("chain"):
        chain = tuple(msgspec.convert(line["items"], list[MappingItem]))
        try:
            check_chain("T", 0, chain)
        except BadMapping:
            assert not line["accepted"], line
        else:
            assert line["accepted"], line
            accepted += 1
    assert 0 < accepted < len(of_kind("chain"))


def test_offsets_are_the_peers() -> None:
    for line in of_kind("chain"):
        chain = tuple(msgspec.convert(line["items"], list[MappingItem]))
        for static, gen, physical, end, rounded in line.get("looks", ()):
            assert offsets.round_up(static) == rounded
            if gen is None:  # no item is decided
                continue
            item = offsets.item_of(chain, static)
            assert item.gen == gen, line
            assert offsets.physical_offset(item, static) == physical
            assert offsets.static_offset(item, physical) == static
            assert offsets.max_of(item) == end
