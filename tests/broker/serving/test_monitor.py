"""The broker's answers over HTTP, from before its store is opened until it has stopped."""

from __future__ import annotations

import http.client
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

from headrace_broker.config import BrokerConfig
from headrace_broker.server import Broker
from headrace_broker.serving.readiness import Readiness, State
from headrace_daemon.monitor import Monitor
from headrace_daemon.network import MemoryNetwork
from tests.broker.processors.test_send import frame
from tests.support.running import running, small_config
from tests.support.stores import FaultyFiles


def ask(port: int, path: str, method: str = "GET") -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path)
    with connection.getresponse() as response:
        body = response.read()
        assert int(response.headers["Content-Length"]) == len(body) or method == "HEAD"
    connection.close()
    return response.status, json.loads(body) if body else None


async def get(port: int, path: str, method: str = "GET") -> tuple[int, Any]:
    return await trio.to_thread.run_sync(ask, port, path, method)


class Served:
    def __init__(self) -> None:
        self.readiness = Readiness()
        self.port = 0


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    served = Served()
    async with trio.open_nursery() as nursery:
        served.port = await nursery.start(Monitor(served.readiness, "127.0.0.1", 0).run)
        yield served
        nursery.cancel_scope.cancel()


async def test_ready_says_how_far_a_start_is(served: Served) -> None:
    readiness = served.readiness
    readiness.done_queues, readiness.queue_count = 3, 9
    readiness.done_bytes, readiness.bytes_max = 5, 70
    log_read = {"doneBytes": 5, "atMostBytes": 70}
    loading = {"state": "loading", "doneQueues": 3, "queues": 9, **log_read}
    assert await get(served.port, "/ready") == (503, loading)
    assert await get(served.port, "/live") == (200, {})
    readiness.state = State.SERVING
    assert await get(served.port, "/ready") == (200, {"state": "serving"})
    assert await get(served.port, "/ready?verbose=1", "HEAD") == (200, None)
    readiness.failure = lambda: "the disk is broken"
    broken = {"state": "serving", "failure": "the disk is broken"}
    assert await get(served.port, "/ready") == (503, broken)
    readiness.state = State.STOPPING
    assert await get(served.port, "/ready") == (503, {"state": "stopping"})


async def test_other_requests_are_told_what_there_is(served: Served) -> None:
    assert await get(served.port, "/") == (
        404,
        {"problem": "not found: use /live, /ready or /metrics"},
    )
    status, _ = await get(served.port, "/ready", "POST")
    assert status == 405
    for text in (b"hello\n", b"GET /ready HTTP/1.1\r\n", b"", b"x" * 8192):
        async with await trio.open_tcp_stream("127.0.0.1", served.port) as stream:
            await stream.send_all(text)
            await stream.send_eof()
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 400 ")
    assert await get(served.port, "/live") == (200, {})


def config(folder: Path, **changes: Any) -> BrokerConfig:
    return small_config(folder / "store", broker_name="b", monitor_port=0, **changes)


async def test_a_broker_is_ready_until_its_disk_fails(tmp_path: Path) -> None:
    files, network = FaultyFiles(), MemoryNetwork()
    broker = Broker(config(tmp_path, flush_disk_type="SYNC_FLUSH"), network, files=files)
    async with running(broker.run):
        port = int(broker.monitor_address.rpartition(":")[2])
        status, report = await get(port, "/ready")
        assert (status, report["state"], [*report["followers"]]) == (200, "serving", ["compaction"])
        async with await network.connect(broker.address) as stream:
            for files.is_broken in (False, True):  # the first makes the topic
                message = {"b": "T", "e": 0, "f": 0, "h": 0, "i": "", "body": b"x"}
                await stream.send(frame(message, 1))
                await stream.receive()
        files.is_broken = False
        status, report = await get(port, "/ready")
        assert (status, report["state"]) == (503, "serving")
        assert "a flush failed, so messages may be lost" in report["failure"]
        assert await get(port, "/live") == (200, {})


async def test_it_answers_while_the_store_is_opened(tmp_path: Path) -> None:
    seen = []

    class SlowBroker(Broker):
        async def _open_store(self, *arguments: Any) -> Any:
            port = int(self.monitor_address.rpartition(":")[2])
            seen.append(await get(port, "/ready"))
            return await super()._open_store(*arguments)

    async with trio.open_nursery() as nursery:
        await nursery.start(SlowBroker(config(tmp_path), MemoryNetwork()).run)
        nursery.cancel_scope.cancel()
    assert seen == [(503, Readiness().report()[1])]


async def test_a_port_in_use_is_named(tmp_path: Path, served: Served) -> None:
    broker = Broker(config(tmp_path), MemoryNetwork())
    broker.config.monitor_port = served.port
    with pytest.raises(ExceptionGroup) as error:
        await broker.run()
    assert error.group_contains(OSError, match=f"can't listen on 127.0.0.1:{served.port}")
