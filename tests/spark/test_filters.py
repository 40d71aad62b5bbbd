"""Filters of Spark that the source carries out, exactly."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import datasource as ds

from headrace import blocking
from headrace.embedded import Embedded
from headrace.spark.plan.filters import Predicates, Span, push

if not hasattr(ds, "Filter"):
    pytest.skip("PySpark pushes filters from 4.1 on", allow_module_level=True)

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
NOON = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)
NOON_MS = int(NOON.timestamp() * 1000)
HALF = dt.timedelta(microseconds=500)
COMPARISONS = {
    ds.EqualTo: lambda one, other: one == other,
    ds.EqualNullSafe: lambda one, other: one == other,
    ds.GreaterThan: lambda one, other: one > other,
    ds.GreaterThanOrEqual: lambda one, other: one >= other,
    ds.LessThan: lambda one, other: one < other,
    ds.LessThanOrEqual: lambda one, other: one <= other,
}


def taken(*filters: Any) -> Predicates:
    predicates, remaining = push(filters)
    assert remaining == []
    return predicates


def has(span: Span, number: int) -> bool:
    start, end = span.clip(number, number + 1)
    return start < end


def test_what_lists_values() -> None:
    assert taken(ds.EqualTo(("queue",), 3)).queues == {3}
    assert taken(ds.In(("queue",), (3, 4))).queues == {3, 4}
    assert taken(ds.EqualTo(("tags",), "a")).tags == {"a"}
    assert taken(ds.In(("keys",), ("a", "b c"))).keys == {"a", "b c"}
    assert taken(ds.EqualNullSafe(("keys",), "a")).keys == {"a"}


def test_all_filters_hold() -> None:
    predicates = taken(
        ds.In(("queue",), (1, 2, 3)),
        ds.In(("queue",), (2, 3, 4)),
        ds.GreaterThan(("queue_offset",), 9),
        ds.LessThanOrEqual(("queue_offset",), 20),
        ds.EqualTo(("tags",), "a"),
    )
    assert predicates.queues == {2, 3}
    assert predicates.queue_offsets == Span(10, 21)
    assert not predicates.matches_nothing
    assert taken(ds.EqualTo(("tags",), "a"), ds.EqualTo(("tags",), "b")).matches_nothing


@pytest.mark.parametrize("kind", COMPARISONS)
@given(st.integers(-50, 50), st.integers(-50, 50))
def test_bounds_of_offsets_are_exact(kind: Any, value: int, offset: int) -> None:
    predicates = taken(kind(("queue_offset",), value))
    assert has(predicates.queue_offsets, offset) == COMPARISONS[kind](offset, value)


@pytest.mark.parametrize("kind", COMPARISONS)
@given(st.integers(-6000, 6000), st.integers(-5, 5))
def test_bounds_of_times_are_exact(kind: Any, value_us: int, message_ms: int) -> None:
    value = NOON + dt.timedelta(microseconds=value_us)
    span = taken(kind(("store_timestamp",), value)).store_ms
    message = NOON + dt.timedelta(milliseconds=message_ms)
    assert has(span, NOON_MS + message_ms) == COMPARISONS[kind](message, value)


@pytest.mark.parametrize(
    "each",
    [
        ds.Not(ds.EqualTo(("tags",), "a")),
        ds.StringStartsWith(("keys",), "order-"),
        ds.GreaterThan(("queue",), 1),
        ds.EqualTo(("queue",), True),
        ds.EqualTo(("queue",), None),
        ds.In(("queue_offset",), (1, 2)),
        ds.EqualTo(("queue_offset",), 1.5),
        ds.GreaterThan(("store_timestamp",), NOON.replace(tzinfo=None)),
        ds.GreaterThan(("tags",), "a"),
        ds.In(("tags",), ("a", None)),
        ds.IsNull(("keys",)),
        ds.IsNotNull(("keys",)),
        ds.EqualTo(("value",), b"x"),
        ds.EqualTo(("born_timestamp",), NOON),
        ds.EqualTo(("properties", "queue"), 1),
        ds.EqualTo((), 1),
    ],
    ids=repr,
)
def test_the_rest_stays_with_spark(each: Any) -> None:
    predicates, remaining = push([each])
    assert predicates == Predicates()
    assert len(remaining) == 1
    assert remaining[0] is each


def test_a_prescribed_column_is_not_null() -> None:
    assert taken(ds.IsNotNull(("keys",)), ds.EqualTo(("keys",), "a")).keys == {"a"}
    not_null = ds.IsNotNull(("tags",))
    assert push([not_null, ds.EqualTo(("keys",), "a")])[1] == [not_null]


def test_columns_of_the_bodies_are_not_ours() -> None:
    filters = [ds.EqualTo(("queue",), 1), ds.EqualTo(("_queue",), 2), ds.EqualTo(("tags",), "a")]
    predicates, remaining = push(filters, {"_queue": "queue"})
    assert predicates == Predicates(queues=frozenset({2}))
    assert remaining == [filters[0], filters[2]]


def test_no_message_has_an_empty_tag() -> None:
    assert taken(ds.EqualTo(("tags",), "")).matches_nothing
    assert taken(ds.In(("keys",), ("", "a"))).keys == {"a"}


def test_it_can_be_read() -> None:
    predicates = Predicates(
        queues=frozenset({2, 1}), store_ms=Span(5), queue_offsets=Span(1, 9), keys=frozenset("k")
    )
    assert str(predicates) == (
        "queue in (1, 2), queue_offset >= 1, queue_offset < 9, store_ms >= 5, keys in (k)"
    )
    assert str(Predicates()) == ""


# --- in Spark ------------------------------------------------------------------------------

COUNT = 3000
# What is asked for, and the same of a row.
ASKED: dict[str, Callable[[Any], bool]] = {
    "queue = 1": lambda row: row.queue == 1,
    "queue in (0, 2) and queue_offset >= 100": lambda row: (
        row.queue in {0, 2} and row.queue_offset >= 100
    ),
    "tags = 'Aa'": lambda row: row.tags == "Aa",
    "keys in ('order-7', 'order-8', 'nobody')": lambda row: row.keys in {"order-7", "order-8"},
    "keys like 'order-1%' and tags = 'BB'": lambda row: (
        row.keys.startswith("order-1") and row.tags == "BB"
    ),
    "tags <> 'Aa' or queue = 1": lambda row: row.tags != "Aa" or row.queue == 1,
}


@pytest.fixture(scope="module")
def load(spark: SparkSession, mq: Embedded) -> Callable[[], DataFrame]:
    """Makes a frame of a topic with two tags of one hash code."""
    with blocking.Producer(nameserver=mq.nameserver) as producer:
        producer.send_many(
            [b"%d" % number for number in range(COUNT)],
            topic="Filtered",
            keys=[f"order-{number}" for number in range(COUNT)],
            tags=["Aa" if number % 2 else "BB" for number in range(COUNT)],
        )
    reader = spark.read.format("headrace").options(nameserver=mq.nameserver, topic="Filtered")
    return reader.load


@pytest.fixture
def pushing(spark: SparkSession) -> Iterator[None]:
    """Filters go to the source, as they do not in a session as it comes."""
    spark.conf.set(PUSHDOWN, "true")
    yield
    spark.conf.set(PUSHDOWN, "false")


@pytest.mark.slow
@pytest.mark.usefixtures("pushing")
def test_spark_gets_what_it_asked_for(load: Callable[[], DataFrame]) -> None:
    rows = load().select("queue", "queue_offset", "tags", "keys", "store_timestamp").collect()
    assert len(rows) == COUNT
    for sql, is_wanted in ASKED.items():
        found = [row.keys for row in load().filter(sql).select("keys").collect()]
        assert sorted(found) == sorted(row.keys for row in rows if is_wanted(row)), sql
    middle = sorted(row.store_timestamp for row in rows)[COUNT // 2]
    frame = load()
    later = frame.filter(frame.store_timestamp > middle).count()
    assert later == sum(row.store_timestamp > middle for row in rows)


@pytest.mark.slow
@pytest.mark.usefixtures("pushing")
def test_explain_shows_which(
    load: Callable[[], DataFrame], capsys: pytest.CaptureFixture[str]
) -> None:
    load().filter("tags = 'Aa' and keys like 'order-1%'").explain("formatted")
    plan = capsys.readouterr().out
    assert "PushedFilters: [IsNotNull(tags), EqualTo(tags,Aa)]" in plan
    assert "Condition : (isnotnull(keys" in plan


@pytest.mark.slow
def test_a_frame_that_is_filtered_twice_unless_filters_are_pushed(
    load: Callable[[], DataFrame],
) -> None:
    frame = load()
    assert frame.filter("queue = 1").filter("tags = 'Aa'").count() < COUNT
    assert frame.count() == COUNT
    both = frame.filter("tags = 'Aa'").union(frame.filter("tags = 'BB'"))
    assert both.count() == COUNT
