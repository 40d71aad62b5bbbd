"""An unexpected error restarts a service and does not end its daemon."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import structlog.testing
import trio

from headrace_broker.config import BrokerConfig
from headrace_broker.consumer.groups import ProducerManager
from headrace_broker.consumer.offsets import ConsumerOffsets
from headrace_broker.persistence import SavedFile
from headrace_broker.server import Broker
from headrace_broker.staging.staging import Staging
from headrace_broker.statistics import BrokerStatistics
from headrace_broker.store.index.index_file import IndexFiles
from headrace_broker.store.retention.cleaner import Cleaner
from headrace_broker.store.write.flush import Flusher
from headrace_broker.store.write.write_path import WritePath
from headrace_daemon.network import MemoryNetwork
from headrace_daemon.services import RETRY_S, Services
from headrace_daemon.slices import SlicedWork
from headrace_daemon.watchdog import Watchdog
from headrace_nameserver.config import NameServerConfig
from headrace_nameserver.routes import RouteTable
from headrace_nameserver.server import NameServer
from headrace_protocol.bodies import KVTable
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.serving import SLICE_S
from tests.support.stores import FaultyFiles
from tests.support.wire import ask, send_header


class Flaky:
    """A service that fails at first."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.run_count = 0

    async def run(self) -> None:
        self.run_count += 1
        await trio.lowlevel.checkpoint()
        if self.run_count <= self.failures:
            raise RuntimeError("nobody expected this")

    async def serve(self, *, task_status: trio.TaskStatus[str]) -> None:
        self.run_count += 1
        if self.failures < 0:
            raise OSError("the address is taken")
        task_status.started("where it listens")
        await trio.lowlevel.checkpoint()
        if self.run_count <= self.failures:
            raise RuntimeError("nobody expected this")


async def test_a_service_that_fails_runs_again_after_a_pause(autojump_clock: object) -> None:
    services, flaky = Services(), Flaky(2)
    began = trio.current_time()
    with structlog.testing.capture_logs() as logs:
        async with trio.open_nursery() as nursery:
            services.start_soon(nursery, flaky.run)
    assert (flaky.run_count, services.unexpected_errors) == (3, 2)
    assert trio.current_time() - began == pytest.approx(2 * RETRY_S)
    assert [entry["service"] for entry in logs] == ["Flaky.run"] * 2
    assert all(isinstance(entry["exc_info"], RuntimeError) for entry in logs)


async def test_the_error_of_a_failed_start_is_raised(autojump_clock: object) -> None:
    services, flaky = Services(), Flaky(-1)
    with pytest.raises(ExceptionGroup) as error:
        async with trio.open_nursery() as nursery:
            await services.start(nursery, flaky.serve)
    assert error.group_contains(OSError, match="the address is taken")
    assert (flaky.run_count, services.unexpected_errors) == (1, 0)


async def test_a_started_service_that_fails_runs_again(autojump_clock: object) -> None:
    services, flaky = Services(), Flaky(1)
    async with trio.open_nursery() as nursery:
        assert await services.start(nursery, flaky.serve) == "where it listens"
    assert (flaky.run_count, services.unexpected_errors) == (2, 1)


async def test_a_service_is_cancelled_at_once() -> None:
    services = Services()
    async with trio.open_nursery() as nursery:
        services.start_soon(nursery, trio.sleep_forever)
        nursery.cancel_scope.cancel()
    assert services.unexpected_errors == 0


class Fault:
    """Replaces a method: fails once, then calls the original."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self.has_happened = trio.Event()
        original: Callable[..., Any] = getattr(owner, name)

        def method(*arguments: Any, **options: Any) -> Any:
            if self.has_happened.is_set():
                return original(*arguments, **options)
            self.has_happened.set()
            raise RuntimeError("nobody expected this")

        monkeypatch.setattr(owner, name, method)


FAULTS = [
    (BrokerStatistics, "sample"),
    (ProducerManager, "expire"),
    (ConsumerOffsets, "take_snapshot"),
    (Staging, "expire"),
    (WritePath, "drain_taker"),
    (Cleaner, "round"),
    (Flusher, "flush_log"),
    (IndexFiles, "forget_vanished"),
    (SavedFile, "_save"),
    (Watchdog, "_report"),
]


@pytest.mark.parametrize(("owner", "name"), FAULTS)
async def test_a_broker_outlives_an_error_of_any_service(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: object,
    owner: type,
    name: str,
) -> None:
    network = MemoryNetwork()
    broker = Broker(config(tmp_path), network, owns_loop=True)
    async with trio.open_nursery() as nursery:
        address = await nursery.start(broker.run)
        fault = Fault(monkeypatch, owner, name)
        assert await send(network, address) == ResponseCode.SUCCESS
        await fault.has_happened.wait()
        await trio.sleep(2 * RETRY_S)
        assert await send(network, address) == ResponseCode.SUCCESS
        info = await ask(network, address, RequestCode.GET_BROKER_RUNTIME_INFO)
        assert KVTable.decode(info.body).table["unexpectedErrors"] == "1"
        nursery.cancel_scope.cancel()


async def test_a_nameserver_outlives_an_error_of_its_expiry(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: object
) -> None:
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        fault = Fault(monkeypatch, RouteTable, "expire")
        address = await nursery.start(NameServer(NameServerConfig(), network).run)
        await fault.has_happened.wait()
        await trio.sleep(2 * RETRY_S)
        answer = await ask(network, address, RequestCode.GET_BROKER_CLUSTER_INFO)
        assert answer.command.code == ResponseCode.SUCCESS
        nursery.cancel_scope.cancel()


def config(folder: Path, **settings: Any) -> BrokerConfig:
    return BrokerConfig(
        store_path_root_dir=folder / "store", mapped_file_size_commit_log=1 << 20, **settings
    )


async def send(network: MemoryNetwork, address: str) -> int:
    header = send_header(properties="KEYS\1k\2")
    answer = await ask(network, address, RequestCode.SEND_MESSAGE_V2, header, b"body")
    return answer.command.code


# -- what a service leaves behind for its next run -------------------------------------------------


async def test_sliced_work_continues_after_a_failure(autojump_clock: object) -> None:
    def bad() -> Iterator[None]:
        yield
        raise RuntimeError("nobody expected this")

    def good() -> Iterator[None]:
        yield
        done.set()

    def long() -> Iterator[None]:
        end = perf_counter() + 2 * SLICE_S
        while perf_counter() < end:
            yield

    services, work, done = Services(), SlicedWork(), trio.Event()
    for each in (long(), bad(), good()):  # so that the others wait, too
        work.start(each)
    async with trio.open_nursery() as nursery:
        services.start_soon(nursery, work.run)
        with trio.fail_after(10):
            await done.wait()
        nursery.cancel_scope.cancel()
    assert services.unexpected_errors == 1


async def test_flush_waiters_are_answered_after_a_failed_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = MemoryNetwork()
    broker = Broker(config(tmp_path, flush_disk_type="SYNC_FLUSH"), network)
    broker.services.retry_s = 0
    async with trio.open_nursery() as nursery:
        address = await nursery.start(broker.run)
        fault = Fault(monkeypatch, Flusher, "flush_log")
        assert await send(network, address) == ResponseCode.SUCCESS
        assert fault.has_happened.is_set()
        nursery.cancel_scope.cancel()
    assert broker.services.unexpected_errors == 1


# -- descriptors -----------------------------------------------------------------------------------


class ScarceFiles(FaultyFiles):
    """No descriptor is free while ``is_scarce``."""

    def __init__(self) -> None:
        super().__init__()
        self.is_scarce = False
        self.refused_count = 0

    def open(self, path: Path, flags: int = os.O_RDWR) -> int:
        if self.is_scarce:
            self.refused_count += 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().open(path, flags)


@pytest.mark.slow
async def test_a_flush_waits_for_a_descriptor(tmp_path: Path) -> None:
    network, files = MemoryNetwork(), ScarceFiles()
    broker = Broker(config(tmp_path, flush_disk_type="SYNC_FLUSH"), network, files=files)
    codes: list[int] = []

    async def send_and_record() -> None:
        codes.append(await send(network, address))

    async with trio.open_nursery() as nursery:
        address = await nursery.start(broker.run)
        await send_and_record()  # which makes the topic
        async with trio.open_nursery() as senders:
            files.is_scarce = True
            senders.start_soon(send_and_record)
            while files.refused_count < 2:  # noqa: ASYNC110 - a thread finds out
                await trio.sleep(0.001)
            assert codes == [ResponseCode.SUCCESS]
            files.is_scarce = False
        nursery.cancel_scope.cancel()
    assert codes == [ResponseCode.SUCCESS] * 2
