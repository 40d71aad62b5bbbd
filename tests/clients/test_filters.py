"""SQL92 filters from the clients and the command line, at a real broker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from headrace import Consumer, Message, PullConsumer, SimpleConsumer, blocking
from headrace.embedded import Embedded
from headrace.errors import ConfigurationError
from headrace_protocol.bodies import ConsumerData, HeartbeatData, SubscriptionData
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.drivers.blocking import BlockingConnection
from headrace_protocol.headers import PullMessageResponseHeader
from headrace_protocol.message import decode_records
from tests.support.cli import fail, succeed
from tests.support.cluster import Cluster
from tests.support.wire import pull_header

PRICES = (3, 7, 12, 5)
FILTER = "price > 5 AND region = 'EU'"


@pytest.fixture
def topic(topic: str, mq: Embedded) -> str:
    """A topic with one queue, and a message for each price."""
    with blocking.Producer(nameserver=mq.nameserver) as producer:
        for price in PRICES:
            properties = {"price": str(price), "region": "EU"}
            producer.send(Message(topic, b"%d" % price, properties=properties))
    return topic


async def test_a_consumer_gets_what_passes(mq: Embedded, topic: str) -> None:
    """Its group's progress moves past all else."""
    found = []
    async with Consumer("filtering", topic, filter=FILTER, nameserver=mq.nameserver) as consumer:
        with trio.fail_after(20):
            async for message in consumer:
                found.append(message.body)
                if len(found) == 2:
                    break
    assert found == [b"7", b"12"]


async def test_queues_are_read_through_a_filter(mq: Embedded, topic: str) -> None:
    async with PullConsumer(nameserver=mq.nameserver, start="earliest") as consumer:
        await consumer.assign(await consumer.queues(topic), filter=FILTER)
        with trio.fail_after(20):
            batch = await consumer.receive_many()
        assert batch is not None
        assert [message.body for message in batch] == [b"7", b"12"]
        with pytest.raises(ConfigurationError, match="line 1, column 8"):
            await consumer.assign(await consumer.queues(topic), filter="price >")


async def test_a_simple_consumer_takes_what_passes(mq: Embedded, topic: str) -> None:
    async with SimpleConsumer("simple", topic, filter=FILTER, nameserver=mq.nameserver) as consumer:
        messages = await consumer.receive(wait=5)
        assert [message.body for message in messages] == [b"7", b"12"]
        await consumer.ack(messages)


@pytest.mark.usefixtures("environment")
def test_the_blocking_consumer_has_filters(mq: Embedded) -> None:
    """The same arguments."""
    with pytest.raises(ConfigurationError, match="line 1, column 4"):
        blocking.Consumer("g", "T", filter="a >", nameserver=mq.nameserver)


def test_consume_prints_what_passes(topic: str) -> None:
    assert succeed("consume", topic, "--filter", FILTER).stdout == "7\n12\n"
    group = ("--filter", FILTER, "--group", "printing", "--max", "2")
    assert succeed("consume", topic, *group).stdout == "7\n12\n"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--filter", "price >"), "line 1, column 8: expected a property"),
        (("--filter", "a > 5", "--tag", "x"), "TAGS IN"),
    ],
)
def test_consume_refuses_a_bad_filter(options: tuple[str, ...], reason: str) -> None:
    assert reason in fail(2, "consume", "orders", *options)


def test_a_filter_is_checked_and_tried(topic: str) -> None:
    checked = succeed("topic", "filter-check", FILTER, "--json").json()
    assert checked == {"filter": FILTER, "properties": ["price", "region"]}
    condition = "price > 5 AND (color = 'red' OR region = 'EU')"
    options = ("--topic", topic, "--tail", "3", "--json")
    assert succeed("topic", "filter-check", condition, *options).json() == {
        "filter": condition,
        "properties": ["color", "price", "region"],
        "topic": topic,
        "messages": 3,
        "passing": 2,
        "missing": {"color": 3},
    }
    assert "line 2, column 3: expected" in fail(2, "topic", "filter-check", "a\n> > 5")


@pytest.mark.slow
def test_a_filter_outlives_a_kill_right_after_its_heartbeat(tmp_path: Path) -> None:
    """Until a member is back, pulls by the group's subscription are refused, never unfiltered."""
    with Cluster(tmp_path, "broker") as cluster:
        broker = cluster.brokers["broker"]
        with blocking.Admin(nameserver=cluster.addresses) as admin:
            admin.create_topic("T", queues=1)
        with blocking.Producer(nameserver=cluster.addresses) as producer:
            for price in PRICES:
                properties = {"price": str(price), "region": "EU"}
                producer.send(Message("T", b"%d" % price, properties=properties))
        with BlockingConnection.connect(broker.address) as connection:
            assert beat(connection) == ResponseCode.SUCCESS
            broker.kill()
        broker.start()
        broker.wait_up()
        with BlockingConnection.connect(broker.address) as connection:
            assert pull_all(connection) == ResponseCode.SUBSCRIPTION_NOT_EXIST
            assert "price > 5" in (tmp_path / "broker/config/consumerFilter.json").read_text()
            assert beat(connection) == ResponseCode.SUCCESS
            assert pull_all(connection) == [b"7", b"12"]


def beat(connection: BlockingConnection) -> int:
    """A heartbeat of a member of the group; the code of its answer."""
    subscription = SubscriptionData(
        topic="T", sub_string=FILTER, expression_type="SQL92", sub_version=1
    )
    group = ConsumerData(group_name="g", subscription_data_set=[subscription])
    body = HeartbeatData(client_id="c", consumer_data_set=[group]).encode()
    return connection.request(RequestCode.HEART_BEAT, None, body, timeout_ms=20_000).command.code


def pull_all(connection: BlockingConnection) -> list[bytes] | int:
    """The messages that pass the group's subscription; or the code of a refusal."""
    found: list[bytes] = []
    offset, max_offset = 0, 1
    fields: dict[str, Any] = {
        "consumer_group": "g",
        "sys_flag": 0,
        "subscription": None,
        "sub_version": 1,
    }
    while offset < max_offset:
        header = pull_header(offset, **fields)
        answer = connection.request(RequestCode.PULL_MESSAGE, header, timeout_ms=20_000)
        code = answer.command.code
        if code not in (ResponseCode.SUCCESS, ResponseCode.PULL_RETRY_IMMEDIATELY):
            return code
        about = answer.command.header(PullMessageResponseHeader)
        found += [record.body for record in decode_records(answer.body)]
        offset, max_offset = about.next_begin_offset, about.max_offset
    return found
