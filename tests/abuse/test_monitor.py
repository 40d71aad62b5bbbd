"""Health checks are answered whatever silent clients and the broker's loop do."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial

import pytest
import trio

from headrace_broker.serving.readiness import Readiness
from headrace_daemon.monitor import Monitor
from headrace_daemon.serving.ports import listen
from tests.support.running import in_background

HOST = "127.0.0.1"


def ask(port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(HOST, port, timeout=10)
    connection.request("GET", path)
    with connection.getresponse() as response:
        body = response.read()
    connection.close()
    return response.status, body


@asynccontextmanager
async def running(monitor: Monitor) -> AsyncIterator[int]:
    async with trio.open_nursery() as nursery:
        port = await nursery.start(monitor.run)
        await trio.to_thread.run_sync(ask, port, "/live")  # its thread is there
        yield port
        nursery.cancel_scope.cancel()


async def test_it_answers_while_the_loop_is_busy() -> None:
    async with running(Monitor(Readiness(), HOST, 0)) as port:
        # This blocks the loop until the answer is there.
        assert ask(port, "/live") == (200, b"{}\n")
        assert ask(port, "/ready")[0] == 503


async def test_it_says_that_the_loop_does_not_turn() -> None:
    monitor = Monitor(Readiness(), HOST, 0)
    async with running(monitor) as port:
        monitor._turned_at -= 60
        status, body = ask(port, "/live")
        assert status == 503
        assert b"the loop has been stalled for 60 s" in body


async def test_the_oldest_silent_client_makes_room() -> None:
    async with running(Monitor(Readiness(), HOST, 0)) as port:
        with ExitStack() as stack:
            silent = [
                stack.enter_context(socket.create_connection((HOST, port), timeout=10))
                for _ in range(64)
            ]
            assert ask(port, "/live") == (200, b"{}\n")
            assert silent[0].recv(1) == b""


async def test_half_a_request_has_a_second(autojump_clock: object) -> None:
    with listen(HOST, 0) as bound:
        port = bound.getsockname()[1]
        async with in_background(partial(Monitor(Readiness(), HOST, port).serve, bound)):
            began = trio.current_time()
            async with await trio.open_tcp_stream(HOST, port) as stream:
                await stream.send_all(b"GET /live HTTP/1.1\r\n")
                assert await stream.receive_some() == b""
            assert trio.current_time() - began == pytest.approx(1)


class LargePage(Readiness):
    """A broker whose page fills more than a socket holds."""

    page_bytes = 8 << 20
    made = 0

    def metrics(self) -> bytes:
        self.made += 1
        return b"x" * self.page_bytes


async def test_who_does_not_read_a_page_has_eleven_seconds(autojump_clock: object) -> None:
    with listen(HOST, 0) as bound:
        port = bound.getsockname()[1]
        async with in_background(partial(Monitor(LargePage(), HOST, port).serve, bound)):
            async with await trio.open_tcp_stream(HOST, port) as stream:
                await stream.send_all(b"GET /metrics HTTP/1.1\r\n\r\n")
                await trio.sleep(12)
                received = 0
                with suppress(trio.BrokenResourceError):
                    async for data in stream:
                        received += len(data)
            assert received < LargePage.page_bytes


async def test_slow_readers_of_pages_make_room_and_do_not_stop_health_checks() -> None:
    readiness = LargePage()
    async with running(Monitor(readiness, HOST, 0)) as port:
        with ExitStack() as stack:
            slow = []
            for _ in range(64):
                client = stack.enter_context(socket.create_connection((HOST, port), timeout=10))
                client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
                slow.append(client)
            for client in slow:
                assert client.recv(1) == b"H"
            assert ask(port, "/live") == (200, b"{}\n")
            assert readiness.made <= 64
            # The oldest has made room: its page ends early.
            assert _drained(slow[0]) < LargePage.page_bytes


async def test_a_page_is_not_made_for_two_at_a_time() -> None:
    at_once, most = 0, 0
    lock = threading.Lock()

    class Counting(Readiness):
        def metrics(self) -> bytes:
            nonlocal at_once, most
            with lock:
                at_once += 1
                most = max(most, at_once)
            time.sleep(0.002)
            with lock:
                at_once -= 1
            return b""

    async with running(Monitor(Counting(), HOST, 0)) as port, trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(trio.to_thread.run_sync, ask, port, "/metrics")
    assert most == 1


async def test_health_checks_do_not_wait_for_metrics() -> None:
    goes_on = threading.Event()

    class Hanging(Readiness):
        def metrics(self) -> bytes:
            goes_on.wait(10)
            return b""

    async with running(Monitor(Hanging(), HOST, 0)) as port:
        with socket.create_connection((HOST, port), timeout=10) as waiting:
            waiting.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert ask(port, "/live") == (200, b"{}\n")
            goes_on.set()
            assert waiting.recv(12) == b"HTTP/1.1 200"


def _drained(client: socket.socket) -> int:
    """Bytes until the end."""
    count = 0
    with suppress(ConnectionResetError):
        while data := client.recv(1 << 20):
            count += len(data)
    return count


async def test_its_port_is_free_when_it_has_stopped() -> None:
    async with running(Monitor(Readiness(), HOST, 0)) as port:
        pass
    async with running(Monitor(Readiness(), HOST, port)):
        assert ask(port, "/live")[0] == 200
