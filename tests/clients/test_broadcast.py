"""Broadcasting: each consumer gets all messages, and keeps its own progress in Java's file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
import trio

import headrace
from headrace import Consumer, Message, blocking
from headrace.consumer.local_offsets import LocalOffsetStore
from headrace.embedded import Embedded
from headrace.errors import BrokerError, ConfigurationError, OffsetsNotSaved
from headrace.instance import ClientInstance
from headrace_protocol.bodies import MessageQueue, SubscriptionGroupConfig
from headrace_protocol.drivers.address import local_ip
from tests.support.fixtures import in_memory
from tests.support.until import until
from tests.support.verbs import produce, take

# As Java's client writes it: objects as keys, and a tab for each level.
JAVAS_FILE = (
    '{\n\t"offsetTable":{\n\t\t{\n\t\t\t"brokerName":"broker-a",\n\t\t\t"queueId":%d,\n'
    '\t\t\t"topic":"T"\n\t\t}:%d\n\t}\n}'
)


mq = pytest.fixture(in_memory)


def broadcasting(mq: Embedded, folder: Path, **options: Any) -> Consumer:
    return mq.consumer("g", "T", broadcast=True, offsets_dir=folder, **options)


def file_in(folder: Path) -> Path:
    return folder / f"{local_ip()}@DEFAULT" / "g" / "offsets.json"


async def test_each_consumer_gets_all_messages(mq: Embedded, tmp_path: Path) -> None:
    await produce(mq, 40)
    async with broadcasting(mq, tmp_path / "1") as one, broadcasting(mq, tmp_path / "2") as two:
        assert len(one.assignment) == len(two.assignment) == 4
        assert {queue.topic for queue in one.assignment} == {"T"}, "there are no retries"
        assert sorted(await take(one, 40)) == sorted(await take(two, 40)) == list(range(40))


async def test_a_consumer_resumes_from_its_file(mq: Embedded, tmp_path: Path) -> None:
    await produce(mq, 20)
    async with broadcasting(mq, tmp_path) as consumer:
        first = await take(consumer, 15)
    async with broadcasting(mq, tmp_path) as consumer:
        assert sorted(first + await take(consumer, 5)) == list(range(20))
    async with mq.admin() as admin:
        assert await admin.lag("g") == [], "the broker has no offsets of the group"
        assert await admin.reset_offsets("g", "T", "earliest")


async def test_a_commit_is_in_the_file(mq: Embedded, tmp_path: Path) -> None:
    async with mq.producer() as producer:
        await producer.send(Message("T", b"1"))
        queue = (await producer.send(Message("T", b"2", key="k"))).queue
    async with broadcasting(mq, tmp_path) as consumer:
        async for message in consumer:
            if message.body == b"2":
                break
        await consumer.commit()
        assert f'"queueId":{queue.queue_id}' in file_in(tmp_path).read_text()


async def test_a_commit_every_5_s(mq: Embedded, tmp_path: Path, autojump_clock: object) -> None:
    await produce(mq, 2)
    async with broadcasting(mq, tmp_path) as consumer, anyio.create_task_group() as tasks:
        messages = aiter(consumer)
        await anext(messages)
        await anext(messages)

        async def ask_for_more() -> None:  # so that the second one counts as processed
            await anext(messages)

        tasks.start_soon(ask_for_more)
        await trio.sleep(4.9)
        assert not file_in(tmp_path).exists()
        await until(file_in(tmp_path).exists)
        tasks.cancel_scope.cancel()


async def test_messages_are_not_returned(mq: Embedded, tmp_path: Path) -> None:
    await produce(mq, 1)
    async with broadcasting(mq, tmp_path) as consumer:
        async for message in consumer:
            for attempt in (message.retry, message.reject):
                with pytest.raises(ConfigurationError, match="handle its error in the program"):
                    await attempt()
            break


async def test_a_group_that_must_not_broadcast_is_refused(mq: Embedded, tmp_path: Path) -> None:
    await produce(mq, 1)
    async with mq.admin() as admin:
        await admin.create_group(
            SubscriptionGroupConfig(group_name="g", consume_broadcast_enable=False)
        )
        with pytest.raises(BrokerError, match="consumeBroadcastEnable is false") as caught:
            async with broadcasting(mq, tmp_path):
                pass
        assert caught.value.code == 16
        await admin.create_group(SubscriptionGroupConfig(group_name="g"))
    async with broadcasting(mq, tmp_path) as consumer:
        assert await take(consumer, 1) == [0]


@pytest.mark.parametrize(
    "options",
    [{"ordered": True}, {"strategy": "consistent_hash"}, {"max_attempts": 3}, {"retry_delay": 1}],
)
def test_options_without_meaning_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ConfigurationError, match=f"{name}= cannot be combined"):
        headrace.Consumer("g", "T", broadcast=True, offsets_dir=tmp_path, **options)
    with pytest.raises(ConfigurationError, match="requires broadcast=True"):
        headrace.Consumer("g", "T", offsets_dir=tmp_path)


def test_blocking_consumers_broadcast(tmp_path: Path) -> None:
    with headrace.embedded() as mq, blocking.Producer(nameserver=mq.nameserver) as producer:
        producer.send_many([b"1", b"2", b"3"], topic="T")
        for folder in ("a", "b"):
            with blocking.Consumer(
                "g", "T", broadcast=True, offsets_dir=tmp_path / folder, nameserver=mq.nameserver
            ) as consumer:
                batch = consumer.receive(timeout_ms=5000)
                assert batch
                with pytest.raises(ConfigurationError, match="cannot be returned"):
                    batch[0].reject()


# -- the file --------------------------------------------------------------------------------------


def store(folder: Path) -> LocalOffsetStore:
    return LocalOffsetStore(ClientInstance("127.0.0.1:1", instance_name="DEFAULT"), "g", folder)


def queue(queue_id: int) -> MessageQueue:
    return MessageQueue("T", "broker-a", queue_id)


async def save(folder: Path, *offsets: int) -> None:
    offset_store = store(folder)
    await offset_store.open()
    for offset in offsets:
        await offset_store.commit("g", {queue(1): offset})
    await offset_store.close()


async def saved(folder: Path) -> int | None:
    offset_store = store(folder)
    await offset_store.open()
    await offset_store.close()
    return await offset_store.committed("g", queue(1))


async def test_the_file_is_javas(tmp_path: Path) -> None:
    await save(tmp_path, 5, 7)
    assert file_in(tmp_path).read_text() == JAVAS_FILE % (1, 7)
    assert file_in(tmp_path).with_name("offsets.json.bak").read_text() == JAVAS_FILE % (1, 5)
    file_in(tmp_path).write_text(JAVAS_FILE % (1, 9))
    assert await saved(tmp_path) == 9


async def test_other_queues_stay_in_the_file(tmp_path: Path) -> None:
    await save(tmp_path, 5)
    offset_store = store(tmp_path)
    await offset_store.open()
    await offset_store.commit("g", {queue(2): 3})
    await offset_store.close()
    assert await saved(tmp_path) == 5


@pytest.mark.parametrize("damage", [b"", b"{", b'{"offsetTable":[]}', None])
async def test_the_backup_replaces_a_damaged_file(
    tmp_path: Path, damage: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    await save(tmp_path, 5, 7)
    path = file_in(tmp_path)
    if damage is None:  # a crash between the two renames
        path.unlink()
    else:
        path.write_bytes(damage)
    assert await saved(tmp_path) == 5
    assert ("offsets taken from the backup" in caplog.text) == (damage is not None)
    if damage is not None:
        path.with_name("offsets.json.bak").write_bytes(damage)
        with pytest.raises(ConfigurationError, match="remove the files to begin at start="):
            await saved(tmp_path)


async def test_two_consumers_do_not_share_a_file(tmp_path: Path) -> None:
    first = store(tmp_path)
    await first.open()
    with pytest.raises(ConfigurationError, match="in use by another broadcasting consumer"):
        await store(tmp_path).open()
    await first.close()
    await save(tmp_path, 1)


async def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="give another offsets_dir="):
        await store(tmp_path / "file").open()
    offset_store = store(tmp_path)
    await offset_store.open()
    file_in(tmp_path).with_name("offsets.json.tmp").mkdir()
    with pytest.raises(OffsetsNotSaved, match=r"offsets\.json: .*delivered again"):
        await offset_store.commit("g", {queue(1): 1})
    await offset_store.close()


def paths_below(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


@pytest.mark.parametrize("below", ["nothing", "an empty folder", "another consumer's folder"])
async def test_offsets_are_not_saved_below_an_unmounted_disk(tmp_path: Path, below: str) -> None:
    disk, folder = tmp_path / "disk", tmp_path / "disk" / "offsets"
    disk.mkdir()
    offset_store = store(folder)
    await offset_store.open()
    await offset_store.commit("g", {queue(1): 1})
    disk.rename(tmp_path / "unmounted")
    if below != "nothing":
        disk.mkdir()
    if below == "another consumer's folder":
        await save(folder, 7)
    before = paths_below(tmp_path)
    with pytest.raises(OffsetsNotSaved, match=r"offsets\.json: .*its disk may not be mounted"):
        await offset_store.commit("g", {queue(1): 2})
    assert paths_below(tmp_path) == before
    if below == "another consumer's folder":
        assert await saved(folder) == 7
    if below != "nothing":
        disk.rename(tmp_path / "below")
    (tmp_path / "unmounted").rename(disk)
    await offset_store.commit("g", {queue(2): 3})
    await offset_store.close()
    assert await saved(folder) == 2


async def test_only_the_last_level_is_created(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"No such file.*give another offsets_dir="):
        await store(tmp_path / "unmounted" / "offsets").open()
    assert not paths_below(tmp_path)
    await save(tmp_path / "offsets", 1)
    assert await saved(tmp_path / "offsets") == 1


async def test_a_second_consumer_leaves_the_mark_of_the_first(tmp_path: Path) -> None:
    first = store(tmp_path)
    await first.open()
    with pytest.raises(ConfigurationError, match="in use"):
        await store(tmp_path).open()
    await first.commit("g", {queue(1): 1})
    await first.close()


def test_the_default_is_javas_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    instance = ClientInstance("127.0.0.1:1", instance_name="DEFAULT")
    path = LocalOffsetStore(instance, "g", None).path
    assert path == file_in(tmp_path / ".rocketmq_offsets")
