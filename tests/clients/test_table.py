"""Tables against a real broker: local copies, changes, models; and their parts."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import anyio
import msgspec
import pydantic
import pytest
import trio
import trio.testing

import headrace
from headrace import Message, Table, blocking
from headrace.embedded import Embedded
from headrace.errors import (
    ClientClosed,
    ConfigurationError,
    ConnectionLost,
    CopyBehind,
    InvalidMessage,
    InvalidValue,
    RouteNotFound,
    TableNotLoaded,
)
from headrace.table.entries import DELETED, Entries, Keyed, Waiting
from headrace_protocol.codes import RequestCode
from headrace_protocol.drivers.errors import MalformedAnswer
from headrace_protocol.headers import GetByKeyResponseHeader, OffsetResponseHeader
from headrace_protocol.key_lookup import encode_found
from headrace_protocol.message import encode_record
from headrace_protocol.serving import Reply
from tests.support.fixtures import in_memory
from tests.support.scripted import close, scripted_cluster, stored

mq = pytest.fixture(in_memory)


async def create(
    mq: Embedded, topic: str = "users", *, queues: int = 4, compacted: bool = True
) -> None:
    attributes = {"cleanup.policy": "COMPACTION"} if compacted else {}
    async with mq.admin() as admin:
        await admin.create_topic(topic, queues=queues, attributes=attributes)


class User(pydantic.BaseModel):
    name: str
    age: int


class City(msgspec.Struct):
    name: str


@dataclass
class Point:
    x: int
    y: int


# -- local copies ----------------------------------------------------------------------------------


async def test_no_reader_of_a_copy_that_cannot_load_waits_for_others(
    autojump_clock: object,
) -> None:
    waited: list[float] = []

    async def get(table: Table[bytes], delay_s: float) -> None:
        await trio.sleep(delay_s)
        began = trio.current_time()
        with pytest.raises(ConnectionLost):
            await table.get("k")
        waited.append(trio.current_time() - began)

    async with scripted_cluster() as (nameserver, (broker,), network):
        broker.answer(RequestCode.GET_MAX_OFFSET, close)
        async with (
            Table(
                "T",
                nameserver=nameserver.address,
                connect=network.connect,
                delivery_timeout_ms=3000,
            ) as table,
            trio.open_nursery() as nursery,
        ):
            for number in range(100):
                nursery.start_soon(get, table, number / 10)
    assert max(waited) < 4


@pytest.mark.parametrize("compacted", [True, False])
async def test_a_table_has_the_newest_value_of_every_key(mq: Embedded, compacted: bool) -> None:
    await create(mq, compacted=compacted)
    async with mq.producer() as producer:
        for number in range(300):
            await producer.send(Message("users", b"%d" % number, key=f"k{number % 7}"))
        if not compacted:
            await producer.send(Message("users", b"without a key"))
    async with mq.table("users") as table:
        await table.synced()
        expected = {f"k{number % 7}": b"%d" % number for number in range(300)}
        assert dict(table.items()) == expected
        assert sorted(table) == sorted(expected)
        assert len(table) == 7
        assert table["k3"] == expected["k3"]
        assert await table.get_many(["k1", "k9"]) == {"k1": expected["k1"]}
        assert "k0" in table
        assert "k7" not in table
        with pytest.raises(KeyError, match="k7"):
            table["k7"]


@pytest.mark.parametrize("compacted", [True, False])
async def test_a_write_is_seen_when_it_returns(mq: Embedded, compacted: bool) -> None:
    await create(mq, compacted=compacted)
    async with mq.table("users", model=str) as table:
        await table.synced()
        for number in range(20):
            await table.put("ada", str(number))
            assert table["ada"] == str(number)
        await table.delete("ada")
        assert "ada" not in table
        assert await table.get("ada") is None
        assert len(table) == 0
        await table.put("ada", "again")
        assert table["ada"] == "again"


async def test_the_message_of_another_key_is_an_error() -> None:
    record = encode_record(topic="T", queue_id=0, body=b"1", properties=b"KEYS\x01other\x02")
    async with scripted_cluster(headrace=True) as (nameserver, (broker,), network):
        found = Reply(GetByKeyResponseHeader(count=1), encode_found([record]))
        broker.answer(RequestCode.GET_BY_KEY, found)
        async with Table(
            "T", local=False, nameserver=nameserver.address, connect=network.connect
        ) as table:
            with pytest.raises(MalformedAnswer, match="the message of another key than b'mine'"):
                await table.get("mine")


async def test_get_waits_until_the_copy_is_loaded(mq: Embedded) -> None:
    await create(mq)
    async with mq.producer() as producer:
        await producer.send(Message("users", b"1", key="ada"))
    async with mq.table("users") as table:
        with pytest.raises(TableNotLoaded, match=r"await table.synced\(\)"):
            table["ada"]
        assert await table.get("ada") == b"1"
        assert table["ada"] == b"1"


async def test_a_deleted_key_stays_deleted_after_loading(mq: Embedded) -> None:
    await create(mq)
    async with mq.table("users") as table:
        await table.put("ada", b"1")
        await table.put("bob", b"2")
        await table.delete("ada")
    async with mq.table("users") as table:
        await table.synced()
        assert dict(table.items()) == {"bob": b"2"}


async def test_a_producer_deletes_with_an_empty_body(mq: Embedded) -> None:
    await create(mq, queues=1)
    async with mq.table("users") as table, mq.producer() as producer:
        for key in "abc":
            await table.put(key, b"1")
        await producer.send(Message("users", b"", key="a"))
        await producer.send_many([b"", b"2"], topic="users", keys=["b", "c"])
        await table.synced()
        assert dict(table.items()) == {"c": b"2"}
    async with mq.consumer("g", "users") as consumer:
        bodies = []
        async for message in consumer:
            bodies.append(message.body)
            if len(bodies) == 6:
                break
    assert bodies == [b"1", b"1", b"1", b"", b"", b"2"]


async def test_changes_come_in_order_from_the_call_on(mq: Embedded) -> None:
    await create(mq, queues=1)
    async with mq.table("users", model=City) as table, mq.table("users", model=City) as writer:
        await writer.put("old", City("Rome"))
        await table.synced()
        changes = table.changes()
        await writer.put("ada", City("London"))
        await writer.delete("ada")
        await writer.put("bob", City("Bern"))
        await table.synced()
        # The deletion replaces the value that nobody has read yet.
        seen = [await anext(changes) for _ in range(2)]
    assert [(change.key, change.value, change.is_deletion) for change in seen] == [
        ("ada", None, True),
        ("bob", City("Bern"), False),
    ]
    assert seen[0].timestamp_ms > 0


async def test_a_reader_waits_for_the_next_change(mq: Embedded) -> None:
    await create(mq)
    async with mq.table("users") as table, trio.open_nursery() as nursery:
        await table.synced()
        found = []

        async def follow() -> None:
            async for change in table.changes():
                found.append((change.key, change.value))
                if len(found) == 2:
                    return

        nursery.start_soon(follow)
        await trio.testing.wait_all_tasks_blocked()
        await table.put("a", b"1")
        await trio.testing.wait_all_tasks_blocked()
        await table.put("a", b"2")
    assert found == [("a", b"1"), ("a", b"2")]


async def test_synced_takes_in_what_others_have_written(mq: Embedded) -> None:
    await create(mq)
    async with mq.table("users") as table, mq.producer() as producer:
        await table.synced()
        for number in range(50):
            await producer.send(Message("users", b"%d" % number, key="k"))
            await table.synced()
            assert table["k"] == b"%d" % number


async def test_a_topic_that_is_created_again_begins_anew(
    mq: Embedded, caplog: pytest.LogCaptureFixture
) -> None:
    await create(mq)
    async with mq.table("users") as table:
        await table.put("old", b"1")
        await table.put("older", b"1")
        async with mq.admin() as admin:
            await admin.delete_topic("users")
        await create(mq)
        with trio.fail_after(30):
            # A queue that has as many messages again before it is read looks like the old one.
            while len(table):
                await trio.lowlevel.checkpoint()
            async with mq.table("users") as writer:
                await writer.put("new", b"2")
            while not ("new" in table and len(table) == 1):
                await trio.lowlevel.checkpoint()
    assert "begins anew" in caplog.text


def test_under_asyncio() -> None:
    async def main() -> dict[str, bytes]:
        async with headrace.embedded() as mq:
            await create(mq)
            async with mq.table("users") as table:
                await table.put("ada", b"1")
                await table.synced()
                return dict(table.items())

    assert anyio.run(main, backend="asyncio") == {"ada": b"1"}


def test_without_an_event_loop() -> None:
    with headrace.embedded() as mq:
        with blocking.Admin(nameserver=mq.nameserver) as admin:
            admin.create_topic("users", queues=2)
        with blocking.Table("users", model=User, nameserver=mq.nameserver) as table:
            table.synced()
            changes = table.changes()
            table.put("ada", User(name="Ada", age=36))
            assert next(changes).value == User(name="Ada", age=36)
            table.put("bob", User(name="Bob", age=1))
            table.delete("bob")
            assert dict(table.items()) == {"ada": table["ada"]}
            assert list(table) == ["ada"]
            assert (len(table), "ada" in table, table.get("bob")) == (1, True, None)
            assert table.get_many(["ada", "bob"]) == {"ada": User(name="Ada", age=36)}


# -- models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "value", "body"),
    [
        (bytes, b"\xff", b"\xff"),
        (str, "é", b"\xc3\xa9"),
        (dict, {"a": [1, None]}, b'{"a":[1,null]}'),
        (City, City("Bern"), b'{"name":"Bern"}'),
        (Point, Point(1, 2), b'{"x":1,"y":2}'),
        (User, User(name="Ada", age=36), b'{"name":"Ada","age":36}'),
    ],
)
async def test_values_of_a_model(mq: Embedded, model: Any, value: Any, body: bytes) -> None:
    await create(mq, queues=1)
    async with mq.table("users", model=model) as table, mq.table("users") as raw:
        await table.put("k", value)
        assert await table.get("k") == value
        await raw.synced()
        assert raw["k"] == body


@pytest.mark.parametrize(
    ("model", "value", "reason"),
    [
        (None, "text", "encode it"),
        (None, b"", "call delete"),
        (str, b"x", "text"),
        (User, City("Bern"), "a value is City"),
        (dict, {"a": object()}, "object"),
    ],
)
async def test_a_value_of_another_type_is_rejected(
    mq: Embedded, model: Any, value: Any, reason: str
) -> None:
    await create(mq)
    async with mq.table("users", model=model) as table:
        with pytest.raises(InvalidValue, match=f"key 'k' in topic users .*{reason}"):
            await table.put("k", value)


@pytest.mark.parametrize("model", [User, City, str])
async def test_an_invalid_value_is_an_error_of_its_key_only(mq: Embedded, model: Any) -> None:
    await create(mq, queues=1)
    async with mq.producer() as producer:
        await producer.send(Message("users", b"\xff{", key="bad"))
    async with mq.table("users", model=model) as table:
        await table.synced()
        changes = table.changes()
        with pytest.raises(InvalidValue, match="the value of key 'bad'") as caught:
            table["bad"]
        assert caught.value.key == "bad"
        assert await table.get("good") is None
        async with mq.table("users", model=model) as writer:
            await writer.delete("bad")
        assert (await anext(changes)).is_deletion


def test_a_model_that_json_cannot_hold_is_rejected() -> None:
    with pytest.raises(ConfigurationError, match="no type for its values"):
        headrace.Table("users", model=complex | int)  # type: ignore[arg-type]


# -- misuse ----------------------------------------------------------------------------------------


async def test_a_blank_key_is_rejected(mq: Embedded) -> None:
    await create(mq)
    async with mq.table("users") as table:
        for key in ("", " "):
            with pytest.raises(ConfigurationError, match="is blank"):
                await table.put(key, b"x")
        with pytest.raises(InvalidMessage, match="byte 1 or 2"):
            await table.delete("a\x01")


async def test_a_missing_topic_is_an_error_at_the_start(
    autojump_clock: object, mq: Embedded
) -> None:
    for local in (True, False):
        with pytest.raises(RouteNotFound, match="topic users"):
            async with mq.table("users", local=local):
                raise AssertionError("must not open")


async def test_a_closed_table_and_one_without_a_copy_say_so(mq: Embedded) -> None:
    await create(mq)
    table = mq.table("users")
    with pytest.raises(ClientClosed):
        await table.get("a")
    with pytest.raises(ClientClosed):
        table.changes()
    async with mq.table("users", local=False) as remote:
        for use in (remote.changes, remote.items, lambda: remote["a"], lambda: len(remote)):
            with pytest.raises(ConfigurationError, match="has no local copy"):
                use()
        with pytest.raises(ConfigurationError, match="has no local copy"):
            await remote.synced()


# -- entries ---------------------------------------------------------------------------------------


def messages(*items: tuple[str, bytes, int]) -> Keyed:
    keys, bodies, times = map(list, zip(*items, strict=True))
    return Keyed(keys, bodies, times)


def test_of_a_key_in_two_queues_the_last_one_stored_counts() -> None:
    entries = Entries()
    entries.apply(0, messages(("k", b"new", 20), ("a", b"1", 1)))
    entries.apply(1, messages(("k", b"old", 10), ("b", b"2", 1)))
    assert entries.get("k") == b"new"
    entries.apply(1, messages(("k", b"newest", 30)))
    assert entries.get("k") == b"newest"


def test_a_marker_in_one_queue_hides_an_older_value_of_another_while_loading() -> None:
    entries = Entries()
    entries.apply(0, messages(("k", DELETED, 20)))
    entries.apply(1, messages(("k", b"old", 10)))
    assert entries.get("k") is None
    assert len(entries) == 0
    entries.forget_deleted()
    entries.apply(0, messages(("k", b"1", 30), ("k", DELETED, 31)))
    # Nothing of it is left, so an older value of another queue counts again.
    entries.apply(1, messages(("k", b"older", 5)))
    assert entries.get("k") == b"older"


def test_a_key_that_is_set_again_while_loading_is_kept() -> None:
    entries = Entries()
    entries.apply(0, messages(("k", DELETED, 1), ("j", DELETED, 1)))
    entries.apply(0, messages(("k", b"1", 2)))
    entries.forget_deleted()
    assert dict(entries.items()) == {"k": b"1"}
    assert len(entries) == 1


def test_a_queue_that_begins_anew_loses_its_entries() -> None:
    entries = Entries()
    entries.apply(0, messages(("a", b"1", 1), ("gone", DELETED, 1)))
    entries.apply(1, messages(("b", b"1", 1)))
    entries.drop_queue(0)
    assert dict(entries.items()) == {"b": b"1"}
    assert len(entries) == 1


async def test_changes_that_nobody_reads_any_more_are_not_kept() -> None:
    entries = Entries()
    entries.waiting.add(Waiting())
    gc.collect()
    assert not entries.waiting


@pytest.mark.parametrize("is_away", [True, False])
async def test_a_write_that_the_copy_cannot_read_is_reported(
    autojump_clock: object, *, is_away: bool
) -> None:
    """Only a broker that tells no end of the queue is waited for: the topic may be a new one."""
    async with scripted_cluster(headrace=True) as (nameserver, (broker,), network):
        end = Reply(OffsetResponseHeader(offset=0))
        broker.answer(RequestCode.BULK_PULL, None)
        broker.answer(RequestCode.GET_MAX_OFFSET, end)
        broker.answer_sends(stored(7))
        async with Table("T", nameserver=nameserver.address, connect=network.connect) as table:
            await table.synced()
            broker.answer(RequestCode.GET_MAX_OFFSET, close if is_away else end)
            with trio.fail_after(10):
                if not is_away:
                    await table.put("ada", b"1")
                    return
                with pytest.raises(CopyBehind, match="is stored at offset 7") as error:
                    await table.put("ada", b"1")
        assert isinstance(error.value.__cause__, ConnectionLost)
