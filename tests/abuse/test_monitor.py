"""Health checks are answered whatever silent clients and the broker's loop do."""

from __future__ import annotations

import http.client
import socket
from contextlib import ExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio

from headrace_broker.monitor import Monitor, Readiness
from headrace_daemon.serving.listen import listen

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


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
        assert b"the broker's loop has been stalled for 60 s" in body


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
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Monitor(Readiness(), HOST, port).serve, bound)
            began = trio.current_time()
            async with await trio.open_tcp_stream(HOST, port) as stream:
                await stream.send_all(b"GET /live HTTP/1.1\r\n")
                assert await stream.receive_some() == b""
            assert trio.current_time() - began == pytest.approx(1)
            nursery.cancel_scope.cancel()


async def test_its_port_is_free_when_it_has_stopped() -> None:
    async with running(Monitor(Readiness(), HOST, 0)) as port:
        pass
    async with running(Monitor(Readiness(), HOST, port)):
        assert ask(port, "/live")[0] == 200
