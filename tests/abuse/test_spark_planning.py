"""Spark's driver plans with figures from brokers, which may be nonsense."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("pyspark")

from collections.abc import Callable, Iterator

from headrace.errors import ConnectFailed, MalformedAnswer
from headrace.spark.cluster import Cluster
from headrace.spark.errors import OptionError
from headrace.spark.options import SPLIT_BYTES
from headrace.spark.plan.ranges import Range, extent
from headrace.spark.plan.splits import read_tasks
from headrace.spark.write.commits import Committer
from headrace_protocol.bodies import (
    BrokerData,
    ClusterInfo,
    ConsumeQueueData,
    MessageQueue,
    QueryConsumeQueueResponseBody,
)
from headrace_protocol.codes import RequestCode
from headrace_protocol.headers import OffsetResponseHeader, StageStateResponseHeader
from headrace_protocol.serving import Reply
from tests.support.scripted import Asked, Scripted, scripted_in_thread

QUEUE = MessageQueue("T", "b", 0)
INT64_MAX = 2**63 - 1


@contextmanager
def asking() -> Iterator[tuple[Scripted, Cluster]]:
    with scripted_in_thread() as (broker,), Cluster([broker.address]) as cluster:
        yield broker, cluster


def units(of: Callable[[int], tuple[int, int]]) -> Callable[[Asked], Reply]:
    """A ConsumeQueue whose units, physical offset and size, ``of`` gives."""

    def answer(asked: Asked) -> Reply:
        first, count = int(asked.ext["index"]), int(asked.ext["count"])
        found = [of(at) for at in range(first, first + count)]
        data = [ConsumeQueueData(physic_offset=at, physic_size=size) for at, size in found]
        return Reply(body=(QueryConsumeQueueResponseBody(queue_data=data).encode(),))

    return answer


def planned(broker: Scripted, cluster: Cluster, count: int) -> list[tuple[int, int]]:
    tasks = read_tasks(cluster, {QUEUE: broker.address}, {QUEUE: Range(0, count)}, SPLIT_BYTES)
    return [(each.start_offset, each.end_offset) for task in tasks for each in task.ranges]


def test_huge_sizes_make_no_endless_plan() -> None:
    with asking() as (broker, cluster):
        broker.answer(RequestCode.QUERY_CONSUME_QUEUE, units(lambda at: (at, 2**31 - 1)))
        with pytest.raises(OptionError, match=r"splitBytes.* T/b/0, which has 9"):
            planned(broker, cluster, INT64_MAX)


@pytest.mark.parametrize("unit", [(-1, 100), (0, -100)])
def test_negative_units_name_the_broker(unit: tuple[int, int]) -> None:
    with asking() as (broker, cluster):
        broker.answer(RequestCode.QUERY_CONSUME_QUEUE, units(lambda _: unit))
        with pytest.raises(MalformedAnswer, match=f"CONSUME_QUEUE.* from {broker.address}"):
            planned(broker, cluster, 1000)


@pytest.mark.parametrize(
    "of",
    [
        lambda at: (10**12 - at * 10**6, 10**6),
        lambda at: (at % 7 * 10**12, at % 3 * 10**8),
        lambda at: (INT64_MAX if at % 2 else 0, 2**31 - 1),
        lambda _: (0, 0),
    ],
    ids=["backwards", "to and fro", "extremes", "nothing"],
)
def test_whatever_units_say_the_plan_covers_the_range_once(
    of: Callable[[int], tuple[int, int]],
) -> None:
    with asking() as (broker, cluster):
        broker.answer(RequestCode.QUERY_CONSUME_QUEUE, units(of))
        ranges = planned(broker, cluster, 100_000)
    starts, ends = zip(*ranges, strict=True)
    assert (starts[0], ends[-1]) == (0, 100_000)
    assert starts[1:] == ends[:-1]


def test_a_malformed_address_is_a_failed_connection() -> None:
    with Cluster(["127.0.0.1:1"]) as cluster, pytest.raises(ConnectFailed, match="''"):
        extent(cluster, {QUEUE: ""})


def test_negative_offsets_are_the_beginning() -> None:
    with asking() as (broker, cluster):
        for code in (RequestCode.GET_MIN_OFFSET, RequestCode.GET_MAX_OFFSET):
            broker.answer(code, Reply(OffsetResponseHeader(offset=-(2**63))))
        assert extent(cluster, {QUEUE: broker.address}) == ({QUEUE: 0}, {QUEUE: 0})


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"decisionId":' + b"[" * 5000])
def test_a_malformed_decision_names_the_broker(body: bytes) -> None:
    with asking() as (broker, cluster):
        broker.is_headrace = True
        info = ClusterInfo(
            broker_addr_table={
                "b": BrokerData(broker_name="b", broker_addrs={0: broker.address}),
            }
        )
        state: Any = StageStateResponseHeader(broker_name="b", applied_batch_id=0)
        broker.answer(RequestCode.GET_BROKER_CLUSTER_INFO, Reply(body=(info.encode(strict=True),)))
        broker.answer(RequestCode.STAGE_STATE, Reply(state, (body,)))
        with pytest.raises(MalformedAnswer, match=f"STAGE_STATE.* from {broker.address}"):
            Committer(cluster, "q").commit(1, {})
