"""Bad input under load, on real sockets: the offender is named, the others are served.

That the others do not even get slower is measured (docs/benchmarks/abuse.md), not tested.
"""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import anyio
import pytest
import structlog.testing
import trio

from headrace.embedded import run_daemons
from headrace_daemon.network import TcpNetwork
from headrace_daemon.serving import server as server_module
from headrace_daemon.serving.server import ServerLimits
from headrace_protocol.codes import RequestCode as Code
from headrace_protocol.codes import ResponseCode as Answer
from tests.support.wires import (
    Daemons,
    Wire,
    pull_fields,
    request,
    send_fields,
    topic_fields,
)


@asynccontextmanager
async def daemons(monkeypatch: pytest.MonkeyPatch, **limits: Any) -> AsyncIterator[Daemons]:
    """Daemons whose clients may hold less than by default."""
    monkeypatch.setattr(server_module, "ServerLimits", functools.partial(ServerLimits, **limits))
    async with run_daemons(None, network=TcpNetwork()) as running:
        under_test = Daemons(running)
        await under_test.prepare()
        await under_test.serves()
        yield under_test
        await under_test.serves()


async def health(under_test: Daemons) -> dict[str, str]:
    async with under_test.wire() as wire:
        _, body = await wire.ask(request(Code.GET_BROKER_RUNTIME_INFO))
        table: dict[str, str] = json.loads(body)["table"]
        return table


async def fill(wire: Wire, count: int, body_bytes: int) -> None:
    for _ in range(count):
        command, _ = await wire.ask(request(Code.SEND_MESSAGE_V2, send_fields(), b"x" * body_bytes))
        assert command.code == Answer.SUCCESS, command.remark


def closed_reasons(logs: Any) -> list[str]:
    return [line["reason"] for line in logs if line["event"] == "client closed"]


@pytest.mark.slow
async def test_a_slow_reader_is_paused_and_in_the_end_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with structlog.testing.capture_logs() as logs:
        limits = {"connection_bytes_max": 1 << 20, "total_bytes_max": 32 << 20}
        async with daemons(monkeypatch, **limits) as under_test, AsyncExitStack() as stack:
            pull = request(Code.PULL_MESSAGE, pull_fields())

            async def pull_without_reading() -> None:
                slow = await stack.enter_async_context(under_test.wire())
                with trio.move_on_after(0.1), suppress(anyio.BrokenResourceError, OSError):
                    while True:
                        await slow.send(pull * 100)

            async with under_test.wire() as sender:
                await fill(sender, 30, 100_000)
            await pull_without_reading()
            # It was read only until it held its share.
            held = int((await health(under_test))["heldBytes"])
            assert (1 << 20) < held < (32 << 20)
            assert not closed_reasons(logs)
            # Too many of the kind hold more than there is for all.
            with trio.fail_after(60):
                while not closed_reasons(logs):
                    await pull_without_reading()
            assert int((await health(under_test))["heldBytes"]) <= 32 << 20
            await under_test.serves()
    assert [line["client"] for line in logs if line["event"] == "slow reader paused"]
    assert closed_reasons(logs)
    assert all("of unread answers" in reason for reason in closed_reasons(logs))


async def test_held_pulls_are_paid_for_by_who_sends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with structlog.testing.capture_logs() as logs:
        async with daemons(monkeypatch, total_bytes_max=1 << 20) as under_test:
            async with under_test.wire() as modest, under_test.wire() as greedy:
                hold = pull_fields(sysFlag=6, suspendTimeoutMillis=60_000)
                await modest.send(request(Code.PULL_MESSAGE, hold))
                await greedy.send(request(Code.PULL_MESSAGE, hold) * 600)
                await greedy.closed()
                with trio.fail_after(5):
                    while (table := await health(under_test))["heldPullCount"] != "1":
                        pass
                assert table["connectionCount"] == "2"
                # Who was modest still gets what it waits for.
                async with under_test.wire() as sender:
                    await fill(sender, 1, 10)
                command, _ = await modest.receive()
                assert command.code == Answer.SUCCESS
            assert int((await health(under_test))["heldPullCount"]) == 0
    (reason,) = closed_reasons(logs)
    assert "this one holds most" in reason
    assert "of waiting requests" in reason


async def test_held_pulls_are_paid_for_by_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    hold = pull_fields(sysFlag=6, suspendTimeoutMillis=60_000)
    with structlog.testing.capture_logs() as logs:
        async with daemons(monkeypatch, total_bytes_max=8 << 20) as under_test:
            async with under_test.wire() as wire:
                # What a pull has no use for is not kept.
                for _ in range(60):
                    await wire.send(request(Code.PULL_MESSAGE, hold, b"x" * (200 << 10)))
                with trio.fail_after(5):
                    while (table := await health(under_test))["heldPullCount"] != "60":
                        pass
                assert int(table["heldBytes"]) < 1 << 20
            async with under_test.wire() as greedy:
                await greedy.ask(request(9999))
                wide = request(Code.PULL_MESSAGE, {**hold, "unknown": "x" * (200 << 10)})
                with suppress(anyio.BrokenResourceError, OSError):
                    await greedy.send(wide * 50)
                await greedy.closed()
    (reason,) = closed_reasons(logs)
    assert "of waiting requests" in reason


async def test_half_frames_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    half = request(Code.SEND_MESSAGE_V2, send_fields(), b"x" * 400_000)[:300_000]
    with structlog.testing.capture_logs() as logs:
        async with (
            daemons(monkeypatch, total_bytes_max=2_000_000) as under_test,
            AsyncExitStack() as stack,
        ):
            wires = [await stack.enter_async_context(under_test.wire()) for _ in range(12)]
            for wire in wires:
                await wire.send(half)
            with trio.fail_after(10):
                while not closed_reasons(logs):  # noqa: ASYNC110 - the log tells nobody
                    await trio.sleep(0.001)
            await under_test.serves()
            assert int((await health(under_test))["heldBytes"]) <= 2_000_000
    assert all("of an unfinished frame" in reason for reason in closed_reasons(logs))


async def test_clients_that_say_nothing_do_not_keep_others_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with (
        daemons(monkeypatch, connections_max=20) as under_test,
        under_test.wire() as known,
        AsyncExitStack() as silent,
    ):
        await fill(known, 1, 10)
        for _ in range(100):
            await silent.enter_async_context(under_test.wire())
        await under_test.serves()
        assert int((await health(under_test))["connectionCount"]) <= 20
        await fill(known, 1, 10)


async def test_long_answers_leave_turns_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody asks for a large table; sends are answered in between, not after."""
    wide = topic_fields(topic="Wide", readQueueNums=20_000, writeQueueNums=20_000)
    async with (
        daemons(monkeypatch) as under_test,
        under_test.wire() as asker,
        under_test.wire() as sender,
    ):
        command, _ = await asker.ask(request(Code.UPDATE_AND_CREATE_TOPIC, wide))
        assert command.code == Answer.SUCCESS
        await asker.send(request(Code.GET_TOPIC_STATS_INFO, {"topic": "Wide"}))
        # The table takes some tenths of a second; these come back first.
        await fill(sender, 20, 100)
        with trio.move_on_after(0) as at_once:
            await asker.receive()
        assert at_once.cancelled_caught
        with trio.fail_after(20):
            command, body = await asker.receive()
        assert command.code == Answer.SUCCESS
        assert body.count(b'"queueId"') == 20_000
