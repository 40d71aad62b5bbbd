"""The embedded broker: a real one, under every kind of loop and without any."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import trio

import headrace
from headrace import Message, blocking
from headrace.embedded import Embedded
from headrace.errors import ConfigurationError, ConnectFailed
from headrace_broker.store.errors import StoreLocked

pytest_plugins = ["pytester"]


async def one_message_there_and_back(mq: Embedded) -> bytes:
    async with mq.producer() as producer:
        await producer.send(Message("t", b"hello"))
    async with mq.consumer("g", "t") as consumer:
        async for message in consumer:
            return message.body
    raise AssertionError("the consumer ended")


@pytest.mark.parametrize("memory", [False, True])
async def test_under_trio(memory: bool) -> None:
    async with headrace.embedded(memory=memory) as mq:
        assert await one_message_there_and_back(mq) == b"hello"


def sockets() -> list[str]:
    """The sockets that this process has open."""
    found = []
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the listing itself
            found.append(str(each.readlink()))
    return sorted(name for name in found if name.startswith("socket:"))


async def test_in_memory_there_is_no_socket() -> None:
    before = sockets()
    async with headrace.embedded(memory=True) as mq:
        assert await one_message_there_and_back(mq) == b"hello"
        async with mq.consumer("g", "t"), mq.producer():
            assert sockets() == before


def test_under_asyncio() -> None:
    async def main() -> bytes:
        async with headrace.embedded() as mq:
            return await one_message_there_and_back(mq)

    assert asyncio.run(main()) == b"hello"


def test_in_blocking_code() -> None:
    with headrace.embedded() as mq:
        with blocking.Producer(nameserver=mq.nameserver) as producer:
            result = producer.send(Message("t", b"hello"))
        assert (result.queue.topic, result.queue_offset) == ("t", 0)
    assert not [thread for thread in threading.enumerate() if thread.name == "headrace"]


def test_memory_without_trio_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="requires trio"), headrace.embedded(memory=True):
        pass


async def test_a_temporary_folder_is_gone_at_the_end() -> None:
    async with headrace.embedded() as mq:
        await one_message_there_and_back(mq)
        assert (mq.data / "commitlog").is_dir()
    assert not mq.data.exists()


async def test_a_named_folder_is_kept_and_opened_again(tmp_path: Path) -> None:
    data = tmp_path / "made" / "here"
    for count in (1, 2):
        async with headrace.embedded(data, memory=True) as mq, mq.admin() as admin:
            async with mq.producer() as producer:
                await producer.send(Message("t", b"hello", key="k"))
            stats = await admin.topic_stats("t")
            assert sum(offset.max_offset for offset in stats.values()) == count
    # RocketMQ's own size, so that any broker opens it with its defaults.
    log_file = data / "commitlog" / "00000000000000000000"
    assert log_file.stat().st_size == 1 << 30


async def test_a_folder_in_use_is_named_with_its_user(tmp_path: Path) -> None:
    async with headrace.embedded(tmp_path, memory=True):
        with pytest.raises(StoreLocked, match="in use by"):
            async with headrace.embedded(tmp_path, memory=True):
                raise AssertionError("two brokers had one folder")


def test_what_keeps_a_thread_from_starting_is_raised(tmp_path: Path) -> None:
    with headrace.embedded(tmp_path):
        with pytest.raises(StoreLocked, match="in use by") as caught:
            headrace.embedded(tmp_path).__enter__()
        assert caught.value.__context__ is None


@pytest.mark.parametrize("folder", ["file", "file/inside"])
async def test_a_file_is_no_folder(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigurationError, match=f"{tmp_path / folder} cannot hold a store: it or"):
        async with headrace.embedded(tmp_path / folder, memory=True):
            pass
    with pytest.raises(ConfigurationError, match="cannot hold a store"):
        headrace.embedded(tmp_path / folder).__enter__()
    assert (tmp_path / "file").read_text() == "mine"


async def test_an_exception_of_the_block_goes_on_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        async with headrace.embedded(memory=True):
            raise ZeroDivisionError


async def test_cancelling_the_block_stops_the_daemons() -> None:
    with trio.CancelScope() as scope:
        async with headrace.embedded() as mq:
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert not mq.data.exists()
    with pytest.raises(ConnectFailed):
        async with headrace.Admin(nameserver=mq.broker) as admin:
            await admin.runtime_info(mq.broker)


async def test_two_at_once_do_not_meet() -> None:
    async with headrace.embedded() as one, headrace.embedded() as two:
        assert one.nameserver != two.nameserver
        async with one.producer() as producer:
            await producer.send(Message("only_here", b"x"))
        async with two.admin() as admin:
            assert await admin.topics() == []


def test_it_starts_in_a_moment() -> None:
    with headrace.embedded():
        pass  # imports are not what this measures
    started = time.perf_counter()
    with headrace.embedded():
        seconds = time.perf_counter() - started
    # 0.1 s on an idle machine; other tests run beside this one.
    assert seconds < 1


@pytest.mark.slow
def test_the_fixture_serves_plain_and_trio_tests(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import headrace
        from headrace import Message, blocking

        def test_plain(headrace_mq):
            with blocking.Producer(nameserver=headrace_mq.nameserver) as producer:
                assert producer.send(Message("t", b"x")).queue_offset == 0

        async def test_trio(headrace_mq):
            async with headrace_mq.producer() as producer:
                assert (await producer.send(Message("t", b"x"))).queue_offset == 0
        """
    )
    pytester.makeini("[pytest]\ntrio_mode = true\nfilterwarnings = error\n")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:asyncio")
    result.assert_outcomes(passed=2)
