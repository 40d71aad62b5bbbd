"""Clients reject malformed routes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from headrace import MessageQueue, Producer
from headrace.errors import MalformedAnswer
from headrace.spark.cluster import Cluster
from headrace_protocol.bodies import BrokerData, QueueData, TopicRouteData
from headrace_protocol.bounds import QUEUE_NUMS_MAX
from headrace_protocol.codes import RequestCode
from headrace_protocol.serving import Reply
from tests.support.scripted import Scripted, scripted_cluster, scripted_in_thread

ROUTE = RequestCode.GET_ROUTEINFO_BY_TOPIC


def body(*queue_nums: tuple[int, int], address: str = "127.0.0.1:1") -> bytes:
    """A route with these numbers of queues to read and write on one broker each."""
    names = [f"broker-{number}" for number in range(len(queue_nums))]
    return TopicRouteData(
        broker_datas=[BrokerData(broker_name=name, broker_addrs={0: address}) for name in names],
        queue_datas=[
            QueueData(broker_name=name, read_queue_nums=read, write_queue_nums=write, perm=6)
            for name, (read, write) in zip(names, queue_nums, strict=True)
        ],
    ).encode(strict=True)


MALFORMED = {
    "empty": b"",
    "no JSON": b"\xff\xfe",
    "a list": b"[]",
    "wrong types": b'{"queueDatas":{"readQueueNums":"many"}}',
    "deep": b'{"x":' + b"[" * 5000,
    "a number of many digits": body((4, 4)).replace(b":4,", b":" + b"9" * 5000 + b",", 1),
    "negative": body((4, 4), (-1, 4)),
    "more than memory holds": body((2**31 - 1, 0)),
    "too many to write": body((0, QUEUE_NUMS_MAX), (0, 1)),
}
malformed = pytest.mark.parametrize("answer", MALFORMED.values(), ids=MALFORMED.keys())


@malformed
async def test_a_malformed_route_names_the_nameserver(answer: bytes) -> None:
    async with scripted_cluster() as (nameserver, _, network):
        nameserver.answer(ROUTE, Reply(body=(answer,)))
        async with Producer(nameserver=nameserver.address, connect=network.connect) as producer:
            with pytest.raises(MalformedAnswer, match=f"ROUTEINFO.* from {nameserver.address}"):
                await producer.queues("T")


async def test_the_largest_route_is_accepted() -> None:
    async with scripted_cluster() as (nameserver, _, network):
        nameserver.answer(ROUTE, Reply(body=(body((QUEUE_NUMS_MAX, QUEUE_NUMS_MAX)),)))
        async with Producer(nameserver=nameserver.address, connect=network.connect) as producer:
            assert (await producer.queues("T"))[-1].queue_id == QUEUE_NUMS_MAX - 1


async def test_a_malformed_route_leaves_the_one_that_is_known(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        scripted_cluster() as (nameserver, _, network),
        Producer(nameserver=nameserver.address, connect=network.connect) as producer,
    ):
        assert await producer.queues("T") == (MessageQueue("T", "broker-0", 0),)
        nameserver.answer(ROUTE, Reply(body=(b"{",)))
        producer._instance.invalidate_route("T")
        assert await producer.queues("T") == (MessageQueue("T", "broker-0", 0),)
    assert "the route of topic T is unavailable, retrying: " in caplog.text


# -- over blocking sockets, as Spark's driver asks -------------------------------------------------

spark_cluster = pytest.importorskip("headrace.spark.cluster", reason="needs PySpark")


@contextmanager
def asked_by_spark(answer: bytes) -> Iterator[tuple[Scripted, Cluster]]:
    with scripted_in_thread() as (nameserver,):
        nameserver.answer(ROUTE, Reply(body=(answer,)))
        with spark_cluster.Cluster([nameserver.address]) as cluster:
            yield nameserver, cluster


@malformed
def test_spark_names_the_nameserver_of_a_malformed_route(answer: bytes) -> None:
    with (
        asked_by_spark(answer) as (nameserver, cluster),
        pytest.raises(MalformedAnswer, match=f"ROUTEINFO.* from {nameserver.address}"),
    ):
        cluster.queues(spark_cluster.Topics(("T",)))
