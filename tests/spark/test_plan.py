from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from headrace import blocking
from headrace.embedded import Embedded
from headrace.spark.cluster import Cluster, Topics
from headrace.spark.errors import DataLoss, OffsetOutOfRange, OptionError, TopicNotFound
from headrace.spark.options import Limits, Point
from headrace.spark.plan.filters import Predicates, Span
from headrace.spark.plan.limits import limited, shared
from headrace.spark.plan.ranges import Range, drop_lost, extent, narrow, not_empty, resolve
from headrace.spark.plan.splits import SizeCurve, read_tasks, size_curves
from headrace.spark.plan.tasks import ReadTask
from headrace.spark.source import HeadraceSource
from headrace_protocol.bodies import MessageQueue
from tests.spark.brokers import broker
from tests.support.stores import SetClock


@pytest.fixture
def cluster(mq: Embedded) -> Iterator[Cluster]:
    with Cluster([mq.nameserver]) as running:
        yield running


def q(topic: str, queue_id: int, broker_name: str = "broker-a") -> MessageQueue:
    return MessageQueue(topic, broker_name, queue_id)


def pieces(tasks: list[ReadTask]) -> dict[int, list[tuple[int, int]]]:
    """Ranges by queue id."""
    found: dict[int, list[tuple[int, int]]] = {}
    for task in tasks:
        for each in task.ranges:
            found.setdefault(each.queue_id, []).append((each.start_offset, each.end_offset))
    return found


# -- topics and offsets ----------------------------------------------------------------------------


def test_patterns_fit_topics_of_users(cluster: Cluster, producer: blocking.Producer) -> None:
    for topic in ("flights-a", "flights-b", "weather"):
        producer.send_many([b"x"], topic=topic)
    assert {each.topic for each in cluster.queues(Topics((), ("flights-*",)))} == {
        "flights-a",
        "flights-b",
    }
    everything = {each.topic for each in cluster.queues(Topics((), ("*",)))}
    assert everything >= {"flights-a", "flights-b", "weather"}
    assert not {"TBW102", "SCHEDULE_TOPIC_XXXX", "broker-a", "SELF_TEST_TOPIC"} & everything


def test_topics_that_are_not_there_are_named(cluster: Cluster) -> None:
    with pytest.raises(TopicNotFound, match=r"topic nowhere is on no broker that 127.*spelling"):
        cluster.queues(Topics(("nowhere",)))
    with pytest.raises(TopicNotFound, match=r"no topic matches nowhere-\* at 127"):
        cluster.queues(Topics((), ("nowhere-*",)))


def test_points_are_offsets_of_each_queue(mq: Embedded, cluster: Cluster, tmp_path: Path) -> None:
    clock = SetClock()
    with broker(mq, tmp_path, "broker-p", clock), blocking.Producer(nameserver=mq.nameserver) as p:
        queue = q("points", 0, "broker-p")
        with blocking.Admin(nameserver=mq.nameserver) as admin:
            admin.create_topic("points", queues=1, broker="broker-p")
        for _ in range(5):
            p.send_many([b"a", b"b"], topic="points", queue=queue)
            clock.ms += 1000
        queues = cluster.queues(Topics(("points",)))
        has = extent(cluster, queues)
        assert has == ({queue: 0}, {queue: 10})

        def at(option: str, point: Point) -> int:
            return resolve(option, point, cluster, queues, has)[queue]

        assert at("starting", Point("earliest")) == 0
        assert at("ending", Point("latest")) == 10
        first_ms = 1_700_000_000_000
        assert at("starting", Point("time", first_ms)) == 0
        assert at("starting", Point("time", first_ms + 1)) == 2
        assert at("ending", Point("time", first_ms + 2000)) == 4
        assert at("ending", Point("time", first_ms + 60_000)) == 10
        assert at("starting", Point("offsets", offsets={queue: 7})) == 7
        assert cluster.store_times({queue: 3}, queues) == {queue: first_ms + 1000}

        with pytest.raises(OffsetOutOfRange, match="starting: offset 11 of points/broker-p/0"):
            at("starting", Point("offsets", offsets={queue: 11}))
        with pytest.raises(
            OptionError, match=r"points/broker-p/1.*the queues are points/broker-p/0$"
        ):
            at("starting", Point("offsets", offsets={q("points", 1, "broker-p"): 0}))

        ranges = {queue: Range(0, 10)}
        within = limited(cluster, queues, ranges, Limits(seconds=2))
        assert within == {queue: Range(0, 4)}
        assert limited(cluster, queues, {queue: Range(4, 10)}, Limits(seconds=60)) == {
            queue: Range(4, 10)
        }


def test_what_has_expired_is_a_loss_only_if_it_was_wanted() -> None:
    one, two = q("t", 0), q("t", 1)
    oldest = {one: 10, two: 10}
    whole = {one: Range(10, 20), two: Range(7, 7)}
    assert drop_lost(whole, oldest, fail=True) == whole
    with pytest.raises(
        DataLoss, match=r"t/broker-a/1 no longer has a message at offset 7.*oldest is 10"
    ):
        drop_lost({two: Range(7, 12)}, oldest, fail=True)
    skipping = drop_lost({one: Range(3, 8), two: Range(7, 12)}, oldest, fail=False)
    assert skipping == {one: Range(8, 8), two: Range(10, 12)}


# -- splits ----------------------------------------------------------------------------------------


def test_a_curve_finds_the_offset_with_so_many_bytes_before_it() -> None:
    curve = SizeCurve([10, 20, 20, 30], [0.0, 100.0, 100.0, 1100.0])
    assert [curve.offset_at(at) for at in (0, 50, 100, 600, 1100, 2000)] == [10, 15, 20, 25, 30, 30]


def test_tasks_have_about_equal_bytes_whatever_the_skew(
    cluster: Cluster, producer: blocking.Producer
) -> None:
    topic, split_bytes = "skewed", 256 * 1024
    bodies = [b"s" * 100] * 20_000 + [b"l" * 20_000] * 100 + [b"s" * 100] * 20_000
    producer.send_many([b"x"], topic=topic)
    producer.send_many(bodies, topic=topic, queue=q(topic, 1))
    producer.send_many([b"s" * 100] * 50, topic=topic, queue=q(topic, 2))
    producer.send_many([b"s" * 100] * 50, topic=topic, queue=q(topic, 3))
    queues = cluster.queues(Topics((topic,)))
    has = extent(cluster, queues)
    ranges = {each: Range(has.min[each], has.max[each]) for each in queues}
    tasks = read_tasks(cluster, queues, ranges, split_bytes)

    found = pieces(tasks)
    big = found[1]
    assert big[0][0] == has.min[q(topic, 1)]
    assert big[-1][1] == has.max[q(topic, 1)]
    assert all(one[1] == other[0] for one, other in pairwise(big))
    offset = has.max[q(topic, 1)] - len(bodies)
    sizes = [
        sum(len(body) + 100 for body in bodies[max(0, a - offset) : b - offset]) for a, b in big
    ]
    assert max(sizes) < 2 * split_bytes
    assert len(big) < 4 * sum(sizes) / split_bytes
    # Small queues share a task.
    assert [len(task.ranges) for task in tasks if task.ranges[-1].queue_id == 3] == [2]


def test_the_sizes_of_few_messages_are_exact(cluster: Cluster, producer: blocking.Producer) -> None:
    queue = q("exact", 0)
    producer.send_many([b"x"], topic="exact")
    producer.send_many([b"x" * n for n in range(1, 31)], topic="exact", queue=queue)
    queues = cluster.queues(Topics(("exact",)))
    max_offset = cluster.max_offsets(queues)[queue]
    some = {queue: Range(max_offset - 30, max_offset)}
    parts = cluster.parts(some, queues)[queue]
    curve = size_curves(cluster, parts, 1)[queue]
    units = cluster.units([(queue, max_offset - 30)], 30, queues)
    assert curve.total_bytes == sum(each.physic_size for units in units.values() for each in units)


# -- limits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "wanted", "shares"),
    [
        (10, {"a": 4, "b": 6}, {"a": 4, "b": 6}),
        (5, {"a": 4, "b": 6}, {"a": 2, "b": 3}),
        (10, {"a": 1_000_000, "b": 1, "c": 3}, {"a": 9, "b": 0, "c": 1}),
        (1, {"a": 5, "b": 7}, {"a": 0, "b": 1}),
        (7, {"a": 10, "b": 10, "c": 10}, {"a": 3, "b": 2, "c": 2}),
    ],
)
def test_shares_are_in_proportion_and_never_more_in_all(
    total: int, wanted: dict[str, int], shares: dict[str, int]
) -> None:
    assert shared(total, wanted) == shares


def test_limits_cut_what_a_trigger_reads(cluster: Cluster, producer: blocking.Producer) -> None:
    topic = "limits"
    producer.send_many([b"x"], topic=topic)
    for queue_id in (0, 1):
        producer.send_many([b"x" * 900] * 100, topic=topic, queue=q(topic, queue_id))
    queues = cluster.queues(Topics((topic,)))
    ranges = {q(topic, n): Range(0, 100) for n in (0, 1)} | {q(topic, 2): Range(5, 5)}

    assert limited(cluster, queues, ranges, Limits(rows=20)) == {
        q(topic, 0): Range(0, 10),
        q(topic, 1): Range(0, 10),
    }
    by_bytes = limited(cluster, queues, ranges, Limits(bytes=40_000))
    rows = sum(each.end - each.start for each in by_bytes.values())
    assert 30 <= rows <= 40
    assert limited(cluster, queues, ranges, Limits(rows=20, bytes=4000)).keys() <= ranges.keys()
    # A message that is larger than the limit comes nevertheless, alone.
    assert limited(cluster, queues, ranges, Limits(bytes=1)) == {q(topic, 0): Range(0, 1)}
    assert limited(cluster, queues, {q(topic, 2): Range(5, 5)}, Limits(1, 1, 1)) == {}


# -- the batch reader ------------------------------------------------------------------------------


def test_predicates_narrow_what_is_read(cluster: Cluster, producer: blocking.Producer) -> None:
    topic = "filtered"
    producer.send_many([b"x"], topic=topic)
    for queue_id in (1, 2):
        producer.send_many([b"x"] * 100, topic=topic, queue=q(topic, queue_id))
    queues = cluster.queues(Topics((topic,)))
    whole = {q(topic, n): Range(0, 100) for n in (1, 2)}

    def left(**predicates: Any) -> dict[MessageQueue, Range]:
        return not_empty(narrow(whole, Predicates(**predicates), cluster, queues))

    assert left() == whole
    assert left(queues=frozenset({1, 7})) == {q(topic, 1): Range(0, 100)}
    one = {"queues": frozenset({1})}
    assert left(**one, queue_offsets=Span(51, None)) == {q(topic, 1): Range(51, 100)}
    assert left(**one, queue_offsets=Span(None, 4)) == {q(topic, 1): Range(0, 4)}
    long_ago_ms = 1_600_000_000_000
    assert left(store_ms=Span(None, long_ago_ms)) == {}
    assert left(store_ms=Span(long_ago_ms, None)) == whole
    (stored_ms,) = cluster.store_times({q(topic, 1): 50}, queues).values()
    # Clocks may have been set back by some seconds: the task looks exactly.
    assert left(store_ms=Span(stored_ms, stored_ms + 1)) == whole
    assert left(store_ms=Span(stored_ms + 60_000, None)) == {}


def test_sql_that_a_broker_does_not_evaluate_is_refused_at_plan_time(
    mq: Embedded, admin: blocking.Admin, producer: blocking.Producer, tmp_path: Path
) -> None:
    with broker(mq, tmp_path, "no-sql", enable_property_filter=False):
        admin.create_topic("sql", queues=1, broker="no-sql")
        producer.send_many([b"x"], topic="sql")
        source = HeadraceSource({"nameserver": mq.nameserver, "topic": "sql", "filter": "a > 3"})
        with pytest.raises(OptionError, match=r"option filter='a > 3'.*does not support.*SQL92"):
            source.reader(source.schema()).partitions()
