"""Checks of mappings before a broker stores them, and before a tool changes them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_protocol.statictopic import checks
from headrace_protocol.statictopic.checks import BadMapping
from headrace_protocol.statictopic.mapping import (
    MappingItem,
    TopicMapping,
    decode_detail,
    encode_detail,
)

FIRST = MappingItem(bname="a", gen=0, logic_offset=0)
SECOND = MappingItem(bname="b", gen=1, logic_offset=100)
THIRD = MappingItem(bname="a", gen=2, logic_offset=300, queue_id=1)
OPEN = MappingItem(bname="b", gen=3, queue_id=1)
EPOCH = 1_700_000_000_000


def mapping(*chain: MappingItem, bname: str = "a", **fields: Any) -> TopicMapping:
    hosted = {0: chain} if chain else {}
    values: dict[str, Any] = {
        "hosted": hosted,
        "topic": "T",
        "bname": bname,
        "epoch": EPOCH,
        "total_queues": 1,
    }
    return TopicMapping(**(values | fields))


def item(before: MappingItem, **fields: Any) -> MappingItem:
    return msgspec.structs.replace(before, **fields)


def test_whole_chains_are_accepted() -> None:
    checks.check_detail(mapping(FIRST, SECOND, THIRD, OPEN), "a")
    checks.check_detail(mapping(), "a")
    checks.check_detail(mapping(item(FIRST, end_offset=99), SECOND))
    checks.check_detail(mapping(OPEN))


@pytest.mark.parametrize(
    ("bad", "field", "queue", "gen"),
    [
        (mapping(FIRST, bname="b"), "bname", None, None),
        (mapping(FIRST, topic=""), "topic", None, None),
        (mapping(FIRST, topic="a b"), "topic", None, None),
        (mapping(FIRST, total_queues=0), "totalQueues", None, None),
        (mapping(FIRST, total_queues=2**31 - 1), "totalQueues", None, None),
        (mapping(FIRST, epoch=-1), "epoch", None, None),
        (mapping(hosted={1: (FIRST,)}), "hostedQueues", 1, None),
        (mapping(hosted={-1: (FIRST,)}), "hostedQueues", -1, None),
        (mapping(hosted={0: ()}), "hostedQueues", 0, None),
        (mapping(item(FIRST, gen=-1)), "gen", 0, -1),
        (mapping(item(FIRST, bname="")), "bname", 0, 0),
        (mapping(item(FIRST, queue_id=-1)), "queueId", 0, 0),
        (mapping(item(FIRST, queue_id=2**31 - 1)), "queueId", 0, 0),
        (mapping(item(FIRST, start_offset=-1)), "startOffset", 0, 0),
        (mapping(item(FIRST, logic_offset=-2)), "logicOffset", 0, 0),
        (mapping(item(FIRST, logic_offset=2**63 - 1)), "logicOffset", 0, 0),
        (mapping(item(FIRST, start_offset=5, end_offset=4)), "endOffset", 0, 0),
        (mapping(item(FIRST, time_of_end=-2)), "timeOfEnd", 0, 0),
        (mapping(item(FIRST, gen=1), SECOND), "gen", 0, 1),
        (mapping(item(FIRST, logic_offset=-1), SECOND), "logicOffset", 0, 0),
        (mapping(FIRST, item(SECOND, logic_offset=-1), OPEN), "logicOffset", 0, 1),
        (mapping(FIRST, item(SECOND, logic_offset=0)), "logicOffset", 0, 1),
        (mapping(item(FIRST, end_offset=100), SECOND), "endOffset", 0, 0),
        (mapping(FIRST, item(SECOND, bname="a")), "queueId", 0, 1),
        (mapping(hosted={0: (FIRST,), 1: (FIRST,)}, total_queues=2), "queueId", 1, 0),
    ],
)
def test_a_bad_mapping_is_refused_by_place_and_field(
    bad: TopicMapping, field: str, queue: int | None, gen: int | None
) -> None:
    with pytest.raises(BadMapping) as caught:
        checks.check_detail(bad, "a")
    assert (caught.value.field, caught.value.queue, caught.value.gen) == (field, queue, gen)
    assert bad.topic in str(caught.value)
    assert field in str(caught.value)


def test_an_epoch_far_ahead_of_the_clock_is_refused() -> None:
    checks.check_epoch(mapping(epoch=EPOCH + 3_600_000), 0, EPOCH)
    checks.check_epoch(mapping(epoch=EPOCH + 1000), EPOCH, 0)
    with pytest.raises(BadMapping, match="clocks"):
        checks.check_epoch(mapping(epoch=2**62), EPOCH, EPOCH)


# -- a change --------------------------------------------------------------------------------------


def change(old: TopicMapping | None, new: TopicMapping, *, force: bool = False) -> TopicMapping:
    return checks.check_change(old, new, force=force)


def test_the_first_mapping_is_taken() -> None:
    new = mapping(FIRST)
    assert change(None, new) is new


def test_a_remap_goes_through_all_its_states() -> None:
    closed = mapping(FIRST, item(SECOND, logic_offset=-1), epoch=EPOCH + 1)
    decided = mapping(FIRST, SECOND, epoch=EPOCH + 1)
    assert change(mapping(FIRST), closed) == closed
    assert change(closed, decided) == decided


def test_what_was_decided_stays_decided() -> None:
    times = {"time_of_start": 5, "time_of_end": 6}
    old = mapping(item(FIRST, end_offset=50, **times), item(SECOND, time_of_start=6))
    new = mapping(FIRST, item(SECOND, logic_offset=-1), epoch=EPOCH + 1)
    assert change(old, new) == msgspec.structs.replace(old, epoch=EPOCH + 1)


def test_a_missing_queue_is_kept_at_a_higher_epoch_only() -> None:
    old = mapping(FIRST, total_queues=2)
    another = {1: (item(FIRST, queue_id=1),)}
    new = mapping(hosted=another, total_queues=2, epoch=EPOCH + 1)
    assert change(old, new).hosted == {0: (FIRST,), **another}
    with pytest.raises(BadMapping, match="queue 0: hostedQueues lacks the queue"):
        change(old, msgspec.structs.replace(new, epoch=EPOCH))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"bname": "c"}, "bname"),
        ({"queue_id": 9}, "queueId"),
        ({"start_offset": 1}, "startOffset"),
        ({"logic_offset": 101}, "logicOffset"),
        ({"end_offset": 51}, "endOffset"),
        ({"time_of_start": 1}, "timeOfStart"),
        ({"time_of_end": 1}, "timeOfEnd"),
    ],
)
def test_a_decided_field_never_changes(fields: dict[str, Any], field: str) -> None:
    decided = item(SECOND, end_offset=50, time_of_start=5, time_of_end=6)
    old = mapping(FIRST, decided, THIRD)
    new = mapping(FIRST, item(decided, **fields), THIRD, epoch=EPOCH + 1)
    with pytest.raises(BadMapping) as caught:
        change(old, new)
    assert (caught.value.field, caught.value.queue, caught.value.gen) == (field, 0, 1)


def test_scope_epoch_and_number_of_queues() -> None:
    old = mapping(FIRST)
    for force in (False, True):
        with pytest.raises(BadMapping, match="scope"):
            change(old, mapping(FIRST, scope="other"), force=force)
    with pytest.raises(BadMapping, match="another tool"):
        change(old, mapping(FIRST, epoch=EPOCH - 1))
    with pytest.raises(BadMapping, match="only added"):
        change(mapping(FIRST, total_queues=2), mapping(FIRST, epoch=EPOCH + 1))


def test_an_equal_epoch_changes_no_leader() -> None:
    with pytest.raises(BadMapping, match="queue 0, gen 1: gen is the new leader"):
        change(mapping(FIRST), mapping(FIRST, SECOND))
    assert change(mapping(FIRST), mapping(FIRST)) == mapping(FIRST)


def test_items_are_dropped_where_they_hold_no_offsets() -> None:
    newer: dict[str, Any] = {"epoch": EPOCH + 1}
    # Expired items at the start, and an empty leader with its successor in its place.
    old, new = mapping(FIRST, SECOND, THIRD), mapping(THIRD, **newer)
    assert change(old, new) == new
    assert checks.dropped(old, new) == [(0, FIRST), (0, SECOND)]
    change(old, mapping(FIRST, SECOND, item(OPEN, logic_offset=300), **newer))


@pytest.mark.parametrize("last", [OPEN, SECOND])
def test_a_chain_from_before_the_last_move_changes_nothing(last: MappingItem) -> None:
    old = mapping(FIRST, last)
    assert change(old, mapping(FIRST, epoch=EPOCH + 1)).hosted == old.hosted


@pytest.mark.parametrize("chain", [(FIRST, THIRD), (FIRST, SECOND, item(OPEN, logic_offset=301))])
def test_items_that_hold_offsets_are_not_dropped(chain: tuple[MappingItem, ...]) -> None:
    with pytest.raises(BadMapping, match="gen is missing"):
        change(mapping(FIRST, SECOND, THIRD), mapping(*chain, epoch=EPOCH + 1))


def test_force_replaces_and_keeps_what_is_missing() -> None:
    other = item(FIRST, queue_id=5)
    old = mapping(hosted={0: (FIRST, SECOND), 1: (other,)}, total_queues=2, epoch=EPOCH + 9)
    new = mapping(item(FIRST, queue_id=7), total_queues=2)
    stored = change(old, new, force=True)
    assert stored.hosted == {0: new.hosted[0], 1: (other,)}
    assert stored.epoch == EPOCH


def test_what_is_stored_uses_no_physical_queue_twice() -> None:
    old = mapping(hosted={0: (FIRST,)}, total_queues=2)
    new = mapping(hosted={1: (FIRST,)}, total_queues=2, epoch=EPOCH + 1)
    with pytest.raises(BadMapping, match="queueId 0 on a is used twice, first by queue 0"):
        change(old, new)


# -- a cluster -------------------------------------------------------------------------------------


def cluster() -> dict[str, TopicMapping]:
    """Queue 0 has moved from a to b, c leads nothing."""
    chain = {0: (FIRST, SECOND), 1: (item(FIRST, queue_id=4),)}
    return {
        "a": mapping(hosted=chain, total_queues=2),
        "b": mapping(FIRST, SECOND, bname="b", total_queues=2),
        "c": mapping(bname="c", total_queues=2),
    }


def test_a_whole_topic_has_each_chain_from_its_leader() -> None:
    chains = checks.check_cluster(cluster().values())
    assert chains == {0: (FIRST, SECOND), 1: (item(FIRST, queue_id=4),)}


@pytest.mark.parametrize(
    ("broker", "broken", "message"),
    [
        (
            "c",
            mapping(bname="c", total_queues=2, epoch=EPOCH + 5),
            "epoch is .* on c and .* on a: a change was left half done.*topic repair T",
        ),
        ("c", mapping(bname="c", total_queues=3), "totalQueues is 3 on c"),
        ("c", mapping(bname="c", total_queues=2, scope="x"), "scope is x on c"),
        ("c", mapping(bname="c", total_queues=2, topic="U"), "topic is U on c"),
        ("c", mapping(bname="", total_queues=2), "bname"),
        ("b", mapping(bname="b", total_queues=2), "queue 0: hostedQueues has no leader"),
        (
            "b",
            mapping(FIRST, item(SECOND, logic_offset=-1), bname="b", total_queues=2),
            "queue 0, gen 1: logicOffset is undecided",
        ),
        (
            "c",
            mapping(FIRST, item(SECOND, bname="c"), bname="c", total_queues=2),
            "queue 0: hostedQueues is led by b and c",
        ),
        (
            "b",
            mapping(item(FIRST, queue_id=4), SECOND, bname="b", total_queues=2),
            "queue 1, gen 0: queueId 4 on a is used twice",
        ),
    ],
)
def test_a_topic_that_is_not_whole_is_refused(
    broker: str, broken: TopicMapping, message: str
) -> None:
    with pytest.raises(BadMapping, match=message):
        checks.check_cluster((cluster() | {broker: broken}).values())


# -- any input -------------------------------------------------------------------------------------

_NUMBERS = st.sampled_from([-(2**63), -2, -1, 0, 1, 5, 100, 2**31 - 1, 2**61, 2**63 - 1])
_IDS = st.sampled_from([-(2**31), -1, 0, 1, 2, 65_535, 65_536, 2**31 - 1])
_NAMES = st.sampled_from(["a", "b", "", "a b", "\x00", "ä", "x" * 300])
_ITEMS = st.builds(
    MappingItem,
    bname=_NAMES,
    gen=_IDS,
    queue_id=_IDS,
    logic_offset=_NUMBERS,
    start_offset=st.sampled_from([0, 0, -1, 7]),
    end_offset=_NUMBERS,
    time_of_start=_NUMBERS,
    time_of_end=_NUMBERS,
)
_MAPPINGS = st.builds(
    TopicMapping,
    topic=_NAMES,
    bname=_NAMES,
    scope=_NAMES,
    epoch=_NUMBERS,
    total_queues=_IDS,
    hosted=st.dictionaries(_IDS, st.lists(_ITEMS, max_size=4).map(tuple), max_size=3),
)


@given(old=_MAPPINGS, new=_MAPPINGS, force=st.booleans())
def test_any_mapping_is_taken_or_refused_by_name(
    old: TopicMapping, new: TopicMapping, *, force: bool
) -> None:
    for each in (old, new):
        assert decode_detail(encode_detail(each)) == each
    try:
        checks.check_detail(new, new.bname)
        stored = checks.check_change(old, new, force=force)
    except BadMapping as error:
        assert error.field in str(error)  # noqa: PT017 - most mappings are refused
    else:
        checks.check_detail(stored)
        assert stored.hosted.keys() == old.hosted.keys() | new.hosted.keys()
    with suppress(BadMapping):
        checks.check_cluster([old, new])
