"""Offset arithmetic on the chains of static topics."""

from __future__ import annotations

import random

import pytest

from headrace_protocol.statictopic import offsets
from headrace_protocol.statictopic.mapping import MappingItem
from headrace_protocol.statictopic.offsets import UndecidedOffset

FIRST = MappingItem(bname="a", gen=0, logic_offset=0)
JUMPED = MappingItem(bname="b", gen=1, logic_offset=100, end_offset=50)
LAST = MappingItem(bname="a", gen=3, logic_offset=10_000, queue_id=1)
UNDECIDED = MappingItem(bname="b", gen=4, queue_id=1)
CHAIN = (FIRST, JUMPED, LAST)


@pytest.mark.parametrize(
    ("static", "item"),
    [(-5, FIRST), (0, FIRST), (99, FIRST), (100, JUMPED), (9999, JUMPED), (10_000, LAST)],
)
def test_the_item_of_an_offset(static: int, item: MappingItem) -> None:
    assert offsets.item_of(CHAIN, static) is item
    assert offsets.item_of((*CHAIN, UNDECIDED), static) is item


def test_the_last_decided_item_holds_what_follows() -> None:
    assert offsets.item_of((*CHAIN, UNDECIDED), 10**12) is LAST


def test_physical_and_static_offsets_are_inverse() -> None:
    item = MappingItem(bname="a", logic_offset=100, start_offset=7)
    assert offsets.offset_delta(item) == 93
    assert offsets.static_offset(item, 7) == 100
    assert offsets.physical_offset(item, 101) == 8


def test_nothing_is_computed_with_an_undecided_item() -> None:
    for compute in (offsets.static_offset, offsets.physical_offset):
        with pytest.raises(UndecidedOffset, match=r"queue 1 on b \(gen 4\).*topic repair"):
            compute(UNDECIDED, 5)
    with pytest.raises(UndecidedOffset):
        offsets.max_of(UNDECIDED)


def test_ends_follow_from_the_next_item_unless_decided() -> None:
    chain = (*CHAIN, UNDECIDED)
    assert [offsets.end_of(chain, index) for index in range(4)] == [100, 50, None, None]
    assert offsets.end_of(CHAIN, 2) is None


def test_the_end_of_a_queue() -> None:
    assert offsets.max_of(JUMPED) == 150
    assert offsets.max_of(LAST) == 10_000


@pytest.mark.parametrize(
    ("static", "rounded"),
    [(0, 10_000), (4999, 10_000), (5000, 20_000), (10_000, 20_000), (15_000, 30_000)],
)
def test_round_up_leaves_room_for_half_a_block(static: int, rounded: int) -> None:
    assert offsets.round_up(static) == rounded


def test_the_item_agrees_with_a_walk_along_the_chain() -> None:
    for seed in range(300):
        choice = random.Random(seed)
        starts = sorted(choice.sample(range(1000), choice.randint(1, 30)))
        chain = tuple(MappingItem(bname="a", gen=g, logic_offset=s) for g, s in enumerate(starts))
        if choice.random() < 0.5:
            chain = (*chain, MappingItem(bname="b", gen=99))
        static = choice.randint(-1, 1100)
        walked = [item for item in chain if 0 <= item.logic_offset <= static]
        assert offsets.item_of(chain, static) is (walked[-1] if walked else chain[0]), seed


def test_only_an_undecided_leader_has_no_static_offsets() -> None:
    assert offsets.decided((*CHAIN, UNDECIDED)) == CHAIN
    assert offsets.decided(CHAIN) == CHAIN
    assert offsets.decided((UNDECIDED,)) == ()


@pytest.mark.parametrize(
    ("index", "lowest", "highest", "extent"),
    [
        (0, 0, 30, (0, 30)),
        (0, 20, 30, (20, 30)),
        # Messages behind the end of a closed item are not the queue's, wherever that is stated.
        (0, 20, 300, (20, 100)),
        (1, 10, 60, (110, 150)),
        (1, 55, 60, (150, 150)),
        (2, 7, 7, (10_007, 10_007)),
    ],
)
def test_the_extent_of_an_item(
    index: int, lowest: int, highest: int, extent: tuple[int, int]
) -> None:
    assert offsets.extent_of((*CHAIN, UNDECIDED), index, lowest, highest) == extent
