"""A daemon by itself: what it says of its pauses, and what its garbage collection leaves alone."""

from __future__ import annotations

import gc
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from headrace_daemon import collector
from headrace_daemon.network import TcpNetwork
from headrace_daemon.serving.server_channel import ServerChannel
from headrace_protocol.codes import RequestCode as Code
from headrace_protocol.frame import FrameReader
from tests.support.processes import Dev, dev
from tests.support.wires import (
    Wire,
    daemons,
    pull_fields,
    request,
    send_fields,
    topic_fields,
)


class Client:
    """A connection to a daemon, waited for by this thread."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._reader = FrameReader()

    def ask(self, *requests: bytes) -> list[bytes]:
        """Bodies of the answers."""
        self.socket.sendall(b"".join(requests))
        bodies: list[bytes] = []
        while len(bodies) < len(requests):
            frames = self._reader.feed(self.socket.recv(1 << 20))
            bodies += [bytes(body) for _, _, body in frames]
        return bodies

    def health(self) -> dict[str, str]:
        (body,) = self.ask(request(Code.GET_BROKER_RUNTIME_INFO))
        table: dict[str, str] = json.loads(body)["table"]
        return table


@contextmanager
def connect(daemon: Dev) -> Iterator[Client]:
    host, _, port = daemon.broker.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        yield Client(connection)


def memory_mb(daemon: Dev) -> float:
    lines = Path(f"/proc/{daemon.process.pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


@pytest.mark.slow
def test_both_daemons_fit_into_a_hundred_megabytes_and_keep_still() -> None:
    with dev() as daemon, connect(daemon) as client:
        assert memory_mb(daemon) < 100
        path = Path(f"/proc/{daemon.process.pid}/stat")

        def cpu_s() -> float:
            fields = path.read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

        began = cpu_s()
        # A held pull makes the wait for us.
        client.ask(
            request(
                Code.PULL_MESSAGE,
                pull_fields(topic="TBW102", sysFlag=6, suspendTimeoutMillis=2000),
            )
        )
        assert cpu_s() - began < 0.1


@pytest.mark.slow
def test_a_daemon_tells_its_longest_stall_and_makes_queues_aside() -> None:
    with dev() as daemon, connect(daemon) as client:
        wide = topic_fields(topic="Wide", readQueueNums=300, writeQueueNums=300)
        client.ask(request(Code.UPDATE_AND_CREATE_TOPIC, wide))
        client.ask(
            *(
                request(Code.SEND_MESSAGE_V2, send_fields(b="Wide", e=queue_id), b"body")
                for queue_id in range(300)
            )
        )
        (stats,) = client.ask(request(Code.GET_TOPIC_STATS_INFO, {"topic": "Wide"}))
        assert stats.count(b'"queueId"') == 300
        pull = pull_fields(topic="Wide", queueId=299, sysFlag=6, suspendTimeoutMillis=15_000)
        (body,) = client.ask(request(Code.PULL_MESSAGE, pull))
        assert b"body" in body
        table = client.health()
        assert float(table["longestLoopStallMs"]) > 0
        assert table["longestLoopStallRan"]
        assert int(table["loopStallCount"]) >= 0
        assert float(table["longestGarbageCollectionMs"]) >= 0
        assert (table["connectionCount"], table["heldPullCount"]) == ("1", "0")


@pytest.mark.slow
def test_topics_made_and_deleted_by_a_daemon_are_there_after_a_restart(tmp_path: Path) -> None:
    with dev("--data", str(tmp_path)) as daemon, connect(daemon) as client:
        for number in range(6):
            topic = topic_fields(topic=f"T{number}")
            client.ask(request(Code.UPDATE_AND_CREATE_TOPIC, topic))
            # On disk when it is answered.
            assert f'"T{number}"' in (tmp_path / "config" / "topics.json").read_text()
            client.ask(request(Code.SEND_MESSAGE_V2, send_fields(b=f"T{number}"), b"body"))
        for number in range(0, 6, 2):
            client.ask(request(Code.DELETE_TOPIC_IN_BROKER, {"topic": f"T{number}"}))
            assert f'"T{number}"' not in (tmp_path / "config" / "topics.json").read_text()
        daemon.process.kill()
        daemon.end()
    folders = {path.name for path in (tmp_path / "consumequeue").iterdir()}
    assert not folders & {f"T{number}" for number in range(0, 6, 2)}
    with dev("--data", str(tmp_path)) as daemon:
        names = {row["topic"] for row in daemon.json("topic", "list")}
        assert {f"T{number}" for number in range(1, 6, 2)} <= names
        assert not names & {f"T{number}" for number in range(0, 6, 2)}


@pytest.fixture
def settled() -> Iterator[None]:
    """Garbage collection as a daemon has it."""
    thresholds = gc.get_threshold()
    collector.settle()
    yield
    gc.callbacks.remove(collector.freeze_survivors)
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def alive(kind: type) -> int:
    """The number of objects, without collecting any garbage."""
    gc.unfreeze()
    return sum(type(each) is kind for each in gc.get_objects())


async def _use(wire: Wire) -> Any:
    await wire.ask(request(Code.SEND_MESSAGE_V2, send_fields(), b"body"))
    body = b'{"clientID":"c","consumerDataSet":[],"producerDataSet":[{"groupName":"g"}]}'
    await wire.ask(request(Code.HEART_BEAT, body=body))
    return await wire.ask(request(Code.PULL_MESSAGE, pull_fields()))


async def test_clients_that_were_frozen_go_without_a_collection(settled: None) -> None:
    async with daemons(TcpNetwork()) as under_test:
        before = alive(ServerChannel)
        async with under_test.wire() as first, under_test.wire() as second:
            hold = pull_fields(queueId=1, sysFlag=6, suspendTimeoutMillis=60_000)
            for wire in (first, second):
                await _use(wire)
                await wire.send(request(Code.PULL_MESSAGE, hold))
            gc.collect()
            assert gc.get_freeze_count()
            gc.disable()
        try:
            with trio.fail_after(30):
                while alive(ServerChannel) > before:  # noqa: ASYNC110 - nobody is told
                    await trio.sleep(0.01)
        finally:
            gc.enable()
