"""Messages that wait in a topic of the broker's are found under the topic that they are for."""

from __future__ import annotations

import time
from typing import Any

import pytest
import trio

from headrace import Admin, Message, blocking
from headrace.admin.key_query import KEY_PAGE
from headrace.admin.queries import QueuedMessage
from headrace.embedded import Embedded
from headrace.errors import MalformedAnswer
from headrace_protocol.codes import RequestCode
from headrace_protocol.headers import QueryMessageResponseHeader
from headrace_protocol.message import encode_record
from headrace_protocol.serving import Reply
from tests.support.cli import fail, succeed
from tests.support.fixtures import in_memory
from tests.support.scripted import scripted_cluster
from tests.support.verbs import produce, take

WAYS: dict[str, dict[str, Any]] = {"level": {"delay_level": 5}, "timer": {"delay": 90.0}}


@pytest.fixture
async def memory() -> Any:
    async for running in in_memory():
        yield running


async def queued(admin: Admin, key: str = "k", **options: Any) -> list[QueuedMessage]:
    return await admin.queued("T", key, **options)


@pytest.mark.parametrize("way", WAYS)
async def test_a_delayed_message_is_found_with_its_time(memory: Embedded, way: str) -> None:
    await produce(memory, 0, queues=1)
    async with memory.producer() as producer, memory.admin() as admin:
        sent_ms = time.time() * 1000
        sent = await producer.send(Message("T", b"soon", key="a k", **WAYS[way]))
        await producer.send(Message("T", b"other", key="other", **WAYS[way]))
        await producer.send(Message("T", b"at once", key="k"))
        (found,) = await queued(admin)
        (by_id,) = await queued(admin, sent.message_id, by_id=True)
        assert [each.body for each in await admin.query_by_key("T", "k")] == [b"at once"]
    assert (found.topic, found.message.body) == ("T", b"soon")
    assert found.until_ms is not None
    delay_ms = 60_000 if way == "level" else 90_000
    assert -1000 <= found.until_ms - sent_ms - delay_ms < 20_000
    assert by_id.message.message_id == found.message.message_id == sent.message_id


async def test_a_recalled_timer_waits_no_more(memory: Embedded) -> None:
    await produce(memory, 0, queues=1)
    async with memory.producer() as producer, memory.admin() as admin:
        sent = await producer.send(Message("T", b"soon", key="k", delay=90))
        await producer.recall(sent)
        assert await queued(admin) == []


async def test_an_undecided_transaction_is_found_until_it_ends(memory: Embedded) -> None:
    await produce(memory, 0, queues=1)
    async with memory.producer() as producer, memory.admin() as admin:
        async with producer.transaction("T") as transaction:
            await transaction.send(Message("T", b"half", key="k"))
            (found,) = await queued(admin)
            assert (found.message.body, found.until_ms) == (b"half", None)
            # A key of two letters has another hash than one of these.
            assert await queued(admin, "kk") == []
        assert await queued(admin) == []


async def test_what_was_delivered_waits_no_more(memory: Embedded) -> None:
    await produce(memory, 0, queues=1)
    async with memory.producer() as producer, memory.admin() as admin:
        for options in ({"delay_level": 1}, {"delay": 0.5}):
            await producer.send(Message("T", b"1", key="k", **options))
        assert len(await queued(admin)) == 2
        async with memory.consumer("g", "T", start="earliest") as consumer:
            with trio.fail_after(20):
                await take(consumer, 2)
        assert await queued(admin) == []
        assert len(await admin.query_by_key("T", "k")) == 2


async def test_the_newest_are_listed(memory: Embedded) -> None:
    await produce(memory, 0, queues=1)
    async with memory.producer() as producer, memory.admin() as admin:
        for number in range(5):
            await producer.send(Message("T", b"%d" % number, key="k", delay_level=5))
        await producer.send(Message("T", b"timer", key="k", delay=90))
        bodies = [each.message.body for each in await queued(admin, max_count=3)]
        assert bodies == [b"3", b"4", b"timer"]
        assert len(await queued(admin)) == 6
        times = [each.message.store_timestamp_ms for each in await queued(admin)]
        assert await queued(admin, end_ms=times[0] - 1) == []
        assert await queued(admin, begin_ms=times[-1] + 1) == []
        (found,) = await queued(admin, max_count=1, end_ms=times[0])
        assert found.message.store_timestamp_ms == times[0]


async def test_more_than_an_answer_holds_are_found(memory: Embedded) -> None:
    count = KEY_PAGE + 6
    await produce(memory, 0, queues=1)
    async with memory.producer() as producer, memory.admin() as admin:
        for number in range(count):
            delay = {"delay_level": 5} if number % 2 else {"delay": 90.0}
            await producer.send(Message("T", b"%d" % number, key="k", **delay))
        found = await queued(admin, max_count=200)
        assert sorted(int(each.message.body) for each in found) == list(range(count))
        assert len(await queued(admin, max_count=KEY_PAGE + 1)) == KEY_PAGE + 1


@pytest.mark.parametrize(
    ("times", "outcome"), [(None, 0), ("7", 1), ("7,8", MalformedAnswer), ("x", MalformedAnswer)]
)
async def test_answers_of_other_brokers(times: str | None, outcome: Any) -> None:
    async with scripted_cluster() as (nameserver, (broker,), network):
        header = QueryMessageResponseHeader(
            index_last_update_timestamp=0, index_last_update_phyoffset=0, waits_until=times
        )
        record = encode_record(topic="X", queue_id=0, body=b"body")
        broker.answer(RequestCode.QUERY_MESSAGE, Reply(header, (record,)))
        async with Admin(nameserver=nameserver.address, connect=network.connect) as admin:
            if isinstance(outcome, int):
                assert len(await queued(admin)) == outcome
            else:
                with pytest.raises(outcome):
                    await queued(admin)


# -- command line ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("environment")
def test_commands_say_until_when_a_message_waits(mq: Embedded, topic: str) -> None:
    query = ("message", "query", topic, "k")
    with blocking.Producer(nameserver=mq.nameserver) as producer:
        sent = producer.send(Message(topic, b"later", key="k", delay_level=6))
        with producer.transaction(topic) as transaction:
            transaction.send(Message(topic, b"half", key="k"))
            later, half = succeed(*query, "--json").json()
            lines = succeed(*query).stdout
    assert (later["body"], half["body"]) == ("later", "half")
    assert later["waits_until"] > later["store_time"]
    assert half["waits_until"] == "its transaction ends"
    assert "its transaction ends" in lines
    one = succeed("message", "get", sent.message_id, "--topic", topic, "--json").json()
    assert (one["body"], one["waits_until"]) == ("later", later["waits_until"])
    (both,) = [row for row in succeed(*query, "--json").json() if row["body"] == "half"]
    assert both["waits_until"] is None, "the other one waits"
    assert "no message" in fail(3, *query, "--until", "2001-01-01")
    with blocking.Producer(nameserver=mq.nameserver) as producer:
        producer.send(Message(topic, b"last", key="k", delay_level=6))
    assert not succeed(*query, "--max", "2", "--json").stderr
    newest = succeed(*query, "--max", "1", "--json")
    assert "only the newest 1 messages that wait are listed" in newest.stderr
    assert [row["body"] for row in newest.json()] == ["half", "last"]
    missing = fail(3, "message", "get", "0" * 32, "--topic", topic)
    assert "does not exist" in missing
