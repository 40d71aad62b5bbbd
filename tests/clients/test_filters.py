"""SQL92 filters from the clients and the command line, at a real broker."""

from __future__ import annotations

import pytest
import trio

from headrace import Consumer, Message, PullConsumer, SimpleConsumer, blocking
from headrace.embedded import Embedded
from headrace.errors import ConfigurationError
from tests.support.cli import fail, succeed

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
