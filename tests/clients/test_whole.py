"""No answer is silently a part: readers fail by name while a broker with the rest is away."""

from __future__ import annotations

import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from headrace import Message, Producer
from headrace.admin.client import Admin
from headrace.consumer.pull import PullConsumer
from headrace.errors import NoQueue, PartialAnswer
from headrace.producer.selector import queue_index
from headrace.table.client import Table
from tests.support.cli import IMPATIENT, headrace, succeed
from tests.support.running_brokers import Brokers, BrokersInThread, brokers, running_in_thread

pytestmark = pytest.mark.slow

KEYS = [f"key{number}" for number in range(8)]
COMPACTED = {"cleanup.policy": "COMPACTION"}
AWAY = r"broker b \(queues 0 to 1\) was shut down \d+ s ago \(since 20..-..-..T..:..:..Z\)"


# -- clients ---------------------------------------------------------------------------------------


@pytest.fixture
async def mq(tmp_path: Path) -> AsyncIterator[Brokers]:
    """The brokers a and b, of which b has stopped, with a plain compacted topic on both."""
    async with brokers(tmp_path, ["a", "b"]) as running:
        async with Admin(**running.at) as admin:
            for name in ("a", "b"):
                await admin.create_topic("users", queues=2, attributes=COMPACTED, broker=name)
        async with Producer(**running.at) as producer:
            for key in KEYS:
                await producer.send(Message("users", b"old", key=key))
        await running.stop("b")
        yield running


async def table_get(mq: Brokers, key: str, **options: Any) -> bytes | None:
    async with Table("users", local=False, delivery_timeout_ms=50, **mq.at, **options) as table:
        return await table.get(key)


async def homes(mq: Brokers) -> dict[str, str]:
    """The broker whose queue each key has."""
    async with Producer(**mq.at) as producer:
        queues = await producer.queues("users")
    found = {key: queues[queue_index(key, len(queues))].broker_name for key in KEYS}
    assert set(found.values()) == {"a", "b"}
    return found


async def test_a_lookup_says_that_it_does_not_know(mq: Brokers) -> None:
    for key, home in (await homes(mq)).items():
        if home == "a":
            assert await table_get(mq, key) == b"old"
            continue
        with pytest.raises(PartialAnswer, match=AWAY):
            await table_get(mq, key)
        assert await table_get(mq, key, allow_partial=True) is None
    with pytest.raises(PartialAnswer, match=AWAY):
        await table_get(mq, "never written")


async def test_a_write_waits_for_the_key_s_queue(mq: Brokers) -> None:
    key = next(key for key, home in (await homes(mq)).items() if home == "b")
    async with Table("users", local=False, delivery_timeout_ms=50, **mq.at) as table:
        with pytest.raises(NoQueue, match="broker b was shut down"):
            await table.put(key, b"new")
    async with trio.open_nursery() as nursery, Table("users", local=False, **mq.at) as table:
        nursery.start_soon(mq.start, "b")
        result = await table.put(key, b"new")
        assert result.queue.broker_name == "b"
        assert await table.get(key) == b"new"


async def test_other_keys_are_written_meanwhile(mq: Brokers) -> None:
    async with Producer(delivery_timeout_ms=50, **mq.at) as producer:
        for key, home in (await homes(mq)).items():
            message = Message("users", b"new", key=key)
            if home == "b":
                with pytest.raises(NoQueue, match="broker b was shut down"):
                    await producer.send(message)
            else:
                assert (await producer.send(message)).queue.broker_name == "a"


async def test_a_copy_is_not_loaded_from_a_part(mq: Brokers) -> None:
    with pytest.raises(PartialAnswer, match=AWAY):
        async with Table("users", delivery_timeout_ms=50, **mq.at):
            pass
    async with Table("users", allow_partial=True, **mq.at) as table:
        await table.synced()
        assert 0 < len(table) < len(KEYS)


async def test_a_copy_waits_for_a_broker_that_comes_back(mq: Brokers) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mq.start, "b")
        async with Table("users", **mq.at) as table:
            assert await table.get(KEYS[0]) == b"old"
            assert len(table) == len(KEYS)


async def test_a_copy_that_cannot_load_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The leader of a static topic's queue goes while the copy is loaded."""
    async with brokers(tmp_path, ["a", "b"]) as mq:
        async with Admin(**mq.at) as admin:
            await admin.create_static_topic("S", 2, brokers=["a", "b"], attributes=COMPACTED)
        async with Table("S", local=False, **mq.at) as table:
            for key in KEYS:
                await table.put(key, b"1")
        await mq.stop("b")
        async with Table("S", delivery_timeout_ms=50, allow_partial=True, **mq.at) as table:
            assert await table.get("no such key") is None
            assert 0 < len(table) < len(KEYS)
        with pytest.raises(PartialAnswer, match=r"broker b \(queue \d\) was shut down"):
            async with Table("S", delivery_timeout_ms=50, **mq.at):
                pass
        assert sum("table S" in record.getMessage() for record in caplog.records) <= 2


async def test_a_leader_is_named_after_a_restart_of_the_nameserver(tmp_path: Path) -> None:
    async with brokers(tmp_path, ["a", "b"]) as mq:
        async with Admin(**mq.at) as admin:
            await admin.create_static_topic("S", 2, brokers=["b"], attributes=COMPACTED)
        await mq.stop("b")
        await mq.restart_nameserver()
        async with Table("S", local=False, delivery_timeout_ms=50, **mq.at) as table:
            with pytest.raises(PartialAnswer, match=r"broker b \(queues 0 to 1\) was shut down"):
                await table.get("k")
            with pytest.raises(NoQueue, match="no master of its leader b is up: broker b was shut"):
                await table.put("k", b"1")


async def keyed(admin: Admin, **options: Any) -> object:
    return await admin.query_by_key("users", KEYS[0], **options)


async def by_id(admin: Admin, **options: Any) -> object:
    return await admin.query_by_id("7F0000010A2B18B4AAC2000000000000", "users", **options)


async def stats(admin: Admin, **options: Any) -> object:
    return await admin.topic_stats("users", **options)


async def config(admin: Admin, **options: Any) -> object:
    return await admin.topic("users", **options)


async def groups(admin: Admin, **options: Any) -> object:
    return await admin.topic_groups("users", **options)


async def lag(admin: Admin, **options: Any) -> object:
    return await admin.lag("G", "users", **options)


async def message(admin: Admin, **options: Any) -> object:
    return await admin.message("7F0000010A2B18B4AAC2000000000000", "users", **options)


@pytest.mark.parametrize("ask", [keyed, by_id, stats, config, groups, lag, message])
async def test_an_administrator_s_question_about_a_topic(
    mq: Brokers, ask: Callable[..., Awaitable[object]]
) -> None:
    async with Admin(**mq.at) as admin:
        with pytest.raises(PartialAnswer, match=AWAY):
            await ask(admin)
        problems: list[Any] = []
        await ask(admin, problems=problems)
        (problem,) = problems
        assert str(problem).startswith("broker b (queues 0 to 1) was shut down")
        await admin.forget_broker("b")
        await ask(admin)


async def test_the_list_of_topics(mq: Brokers) -> None:
    async with Admin(**mq.at) as admin:
        with pytest.raises(PartialAnswer, match=r"the list of topics .* broker b was shut down"):
            await admin.topic_totals()
        problems: list[Any] = []
        assert [each.topic for each in await admin.topic_totals(problems=problems)] == ["users"]
        assert str(problems[0]).startswith("broker b was shut down")


async def test_a_message_of_a_broker_that_left(mq: Brokers) -> None:
    await mq.start("b")
    async with Producer(**mq.at) as producer:
        sent = [await producer.send(Message("users", b"x", key=key)) for key in KEYS]
    of_b = next(each for each in sent if each.queue.broker_name == "b")
    async with Admin(**mq.at) as admin:
        assert await admin.message(of_b.offset_message_id)
        await mq.stop("b")
        with pytest.raises(PartialAnswer, match="broker b was shut down"):
            await admin.message(of_b.offset_message_id)
        # The producer's id may be found all the same, at a broker that is there.
        of_a = next(each for each in sent if each.queue.broker_name == "a")
        assert await admin.message(of_a.message_id, "users")


async def test_a_consumer_can_ask(mq: Brokers) -> None:
    async with PullConsumer(**mq.at) as consumer:
        (part,) = await consumer.missing("users")
        assert (part.broker, part.queue_ids, part.reason) == ("b", range(2), "was shut down")
        await mq.start("b")
        await trio.sleep(0.3)
        assert await consumer.missing("users") == ()


# -- commands --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def part(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokersInThread]:
    """Brokers a and b, of which b has stopped, with messages of a group on both."""
    with running_in_thread(tmp_path_factory.mktemp("part"), ["a", "b"]) as running:
        where = ("--nameserver", running.nameserver)
        succeed("topic", "create", "users", "--queues", "2", "--if-not-exists", *where)
        for key in KEYS:
            succeed("send", "users", f"body of {key}", "--key", key, *where)
        succeed("topic", "create", "lonely", "--broker", "b", *where)
        succeed("consume", "users", "--group", "G", *where)
        running.stop("b")
        yield running


# Commands, and whether they print the part before they fail.
COMMANDS = [
    (("consume", "users"), True),
    (("consume", "users", "--queue", "1"), True),
    (("consume", "users", "--group", "H"), True),
    (("topic", "describe", "users"), False),
    (("group", "lag", "G"), True),
    (("group", "lag", "G", "--topic", "users"), True),
    (("kv", "dump", "users"), False),
]


@pytest.mark.parametrize(("command", "prints_part"), COMMANDS)
def test_a_command_fails_by_name_or_says_that_it_gives_a_part(
    part: BrokersInThread,
    command: tuple[str, ...],
    *,
    prints_part: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    where = ("--nameserver", part.nameserver)
    failed = headrace(*command, *where, patience=IMPATIENT)
    assert (failed.exit_code, bool(failed.stdout)) == (3, prints_part)
    assert re.search(r"broker b (\(queues 0 to 1\) )?was shut down", failed.stderr)
    partly = succeed(*command, *where, "--allow-partial", patience=IMPATIENT)
    assert partly.stdout or "--group" in command  # the group has read it
    assert "broker b (queues 0 to 1) was shut down" in partly.stderr + caplog.text


def test_the_exit_code_of_a_key_that_may_exist(part: BrokersInThread) -> None:
    assert headrace("kv", "get", "users", "none", "-n", part.nameserver).exit_code == 1
    options = ("--allow-partial", "-n", part.nameserver)
    assert headrace("kv", "get", "users", "none", *options).exit_code == 3


def test_a_key_of_a_topic_whose_only_broker_is_away_may_exist(part: BrokersInThread) -> None:
    where = ("-n", part.nameserver)
    failed = headrace("kv", "get", "lonely", "tea", *where)
    assert failed.exit_code == 1
    assert "broker b" in failed.stderr
    assert "was shut down" in failed.stderr


def test_messages_by_key_and_id(part: BrokersInThread) -> None:
    where = ("-n", part.nameserver)
    for command in (("query", "users", "none"), ("get", "7F" * 16, "--topic", "users")):
        failed = headrace("message", *command, *where)
        assert "broker b (queues 0 to 1) was shut down" in failed.stderr
        partly = headrace("message", *command, *where, "--allow-partial")
        assert partly.exit_code == 3
        assert "this is" in partly.stderr or "skipped: broker b" in partly.stderr


def test_following_begins_with_the_broker_that_comes_back(tmp_path: Path) -> None:
    with running_in_thread(tmp_path, ["a", "b"]) as running:
        where = ("--nameserver", running.nameserver)
        succeed("topic", "create", "orders", "--queues", "1", *where)
        for key in KEYS:
            succeed("send", "orders", key, "--key", key, *where)
        running.stop("b")
        back = threading.Timer(0.5, running.start, ["b"])
        back.start()
        outcome = succeed("consume", "orders", "--follow", "--max", str(len(KEYS)), *where)
        back.join()
        assert sorted(outcome.stdout.splitlines()) == KEYS
        assert "this is only a part of topic orders: broker b (queue 0)" in outcome.stderr
