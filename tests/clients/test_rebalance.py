"""Shares of a group: the official clients' average allocation, computed by each member alone."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.consumer.rebalance import allocate, java_order
from headrace.consumer.strategies import averagely
from headrace_protocol.bodies import MessageQueue


def queues(count: int) -> list[MessageQueue]:
    return [MessageQueue("T", "b", number) for number in range(count)]


def shares(queue_count: int, member_count: int) -> list[list[int]]:
    members = [f"c{number:03}" for number in range(member_count)]
    return [
        sorted(q.queue_id for q in allocate(averagely, queues(queue_count), members, member))
        for member in members
    ]


@pytest.mark.parametrize(
    ("queue_count", "member_count", "expected"),
    [
        (4, 1, [[0, 1, 2, 3]]),
        (4, 2, [[0, 1], [2, 3]]),
        (5, 2, [[0, 1, 2], [3, 4]]),
        (8, 3, [[0, 1, 2], [3, 4, 5], [6, 7]]),
        (3, 3, [[0], [1], [2]]),
        (2, 4, [[0], [1], [], []]),
        (0, 2, [[], []]),
    ],
)
def test_shares_are_neighbouring_and_the_first_members_get_more(
    queue_count: int, member_count: int, expected: list[list[int]]
) -> None:
    assert shares(queue_count, member_count) == expected


@given(st.integers(0, 50), st.integers(1, 20))
def test_every_queue_has_exactly_one_member(queue_count: int, member_count: int) -> None:
    given_out = itertools.chain.from_iterable(shares(queue_count, member_count))
    assert list(given_out) == list(range(queue_count))


@given(st.permutations(queues(7)), st.permutations(["a", "b", "c"]))
def test_the_order_in_which_members_see_things_does_not_matter(
    some_queues: list[MessageQueue], members: list[str]
) -> None:
    assert allocate(averagely, some_queues, members, "b") == set(queues(7)[3:5])


def test_who_is_not_a_member_gets_nothing() -> None:
    assert allocate(averagely, queues(4), ["a"], "b") == set()


def test_members_are_in_the_order_of_java_strings() -> None:
    # Java compares UTF-16 units: U+1F600 (D83D DE00) comes before U+FF5E.
    astral, wide = "\U0001f600", "～"
    assert sorted([wide, astral], key=java_order) == [astral, wide]
    assert allocate(averagely, queues(2), [wide, astral], astral) == set(queues(2)[:1])
