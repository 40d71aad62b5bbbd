"""Producers that outrun dispatch wait; those that waited in vain are told why."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import trio

from headrace_broker.config import BrokerConfig
from headrace_broker.server import Broker
from headrace_broker.store.files.filesystem import Files
from headrace_daemon.network import MemoryNetwork
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.drivers.aio import AsyncConnection
from headrace_protocol.message import encode_batch
from tests.support.wire import send_header

TIMEOUT_S = 2.0
BATCH = encode_batch((0, b"%d" % number, b"") for number in range(1000))
RING_BATCHES = (1 << 17) // 1000
TOO_MANY = RING_BATCHES + 9
HEADER = send_header(topic="flood", batch=True)


class SlowDisk(Files):
    """Flushes end only when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.is_done = threading.Event()
        self.is_done.set()

    def fdatasync(self, descriptor: int) -> None:
        self.is_done.wait()
        super().fdatasync(descriptor)


class Answers:
    """Answers in the order of their arrival."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.remarks: list[str] = []
        self.times: list[float] = []
        self._came = trio.Event()

    def take(self, command: Any, _body: object, _error: object) -> None:
        self.codes.append(command.code)
        self.remarks.append(command.remark or "")
        self.times.append(trio.current_time())
        self._came.set()

    async def until(self, count: int) -> None:
        with trio.fail_after(30):
            while len(self.codes) < count:
                await self._came.wait()
                self._came = trio.Event()


@pytest.mark.slow
async def test_a_flood_over_a_slow_disk_is_held_back_and_then_refused(tmp_path: Path) -> None:
    network = MemoryNetwork()
    # With synchronous flush nothing is dispatched that is not on disk yet, so the ring fills up.
    config = BrokerConfig(
        broker_name="b",
        bind_address="127.0.0.1",
        flush_disk_type="SYNC_FLUSH",
        store_path_root_dir=tmp_path,
        mapped_file_size_commit_log=64 * 1024 * 1024,
    )
    answers, disk = Answers(), SlowDisk()
    async with trio.open_nursery() as nursery:
        address = await nursery.start(Broker(config, network, files=disk).run)
        connection = AsyncConnection(await network.connect(address), address)
        nursery.start_soon(connection.run)
        response = await connection.request(
            RequestCode.SEND_BATCH_MESSAGE, HEADER, BATCH, timeout_ms=10_000
        )
        response.expect()

        disk.is_done.clear()
        start = trio.current_time()
        for _ in range(TOO_MANY):
            connection.submit(RequestCode.SEND_BATCH_MESSAGE, HEADER, BATCH, answers.take)
        await answers.until(TOO_MANY - RING_BATCHES)
        # Those that did not fit waited for their turn, and the remark names the slow taker.
        assert set(answers.codes) == {ResponseCode.SYSTEM_BUSY}
        assert answers.times[0] >= start + TIMEOUT_S
        assert all("consumequeue" in remark for remark in answers.remarks)

        disk.is_done.set()
        await answers.until(TOO_MANY)
        assert answers.codes.count(ResponseCode.SUCCESS) == RING_BATCHES
        response = await connection.request(
            RequestCode.SEND_BATCH_MESSAGE, HEADER, BATCH, timeout_ms=10_000
        )
        response.expect()
        nursery.cancel_scope.cancel()
