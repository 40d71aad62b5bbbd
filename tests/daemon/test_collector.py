"""Garbage collection in a daemon: long-lived objects are looked at no more."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from headrace_daemon import collector


class Node:
    def __init__(self) -> None:
        self.other: Node | None = None


@pytest.fixture(autouse=True)
def _settled() -> Iterator[None]:
    thresholds = gc.get_threshold()
    collector.settle()
    yield
    gc.callbacks.remove(collector.freeze_survivors)
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def test_what_is_there_is_looked_at_no_more() -> None:
    assert gc.get_freeze_count() > 10_000
    assert len(gc.get_objects()) < 1000


def test_what_lives_long_joins_it() -> None:
    before = gc.get_freeze_count()
    nodes = [Node() for _ in range(1000)]
    gc.collect()
    assert gc.get_freeze_count() >= before + 1000
    del nodes
    assert gc.get_freeze_count() < before + 1000


def test_young_garbage_in_cycles_still_goes() -> None:
    node, other = Node(), Node()
    node.other, other.other = other, node
    gone = weakref.ref(node)
    del node, other
    gc.collect()
    assert gone() is None


def test_settling_twice_changes_nothing() -> None:
    collector.settle()
    assert gc.callbacks.count(collector.freeze_survivors) == 1
