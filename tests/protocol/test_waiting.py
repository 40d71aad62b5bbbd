"""Requests that wait: coroutines, stepped in turns of the server and charged to their clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import trio

from headrace_protocol.channel import Channel
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import Lane, NotReady, RequestError
from headrace_protocol.frame import FrameReader
from headrace_protocol.header_codecs import SerializeType, encode_frame
from headrace_protocol.serving import Registry, Reply, Request, Then
from headrace_protocol.waiting import (
    NotHere,
    Run,
    State,
    Until,
    fetch,
    now_or_later,
    ready,
    sliced,
    take_break,
    until,
)
from tests.support.channel import MemoryChannel

CODE = RequestCode.GET_MIN_OFFSET
LANE = Lane("tests", threads=1)


class Daemon:
    """A registry whose slices, turns and fetches the test runs itself."""

    def __init__(self, function: Callable[[Request], Any], *, is_long: bool = False) -> None:
        self.channel = MemoryChannel()
        self.errors: list[str] = []
        self.slices: list[Iterator[None]] = []
        self.fetches: list[tuple[NotReady, Then]] = []
        self.turns = 0
        self.registry = Registry(
            lambda _, error: self.errors.append(str(error)),
            run_long=self.slices.append,
            run_fetch=lambda _, wait, then: self.fetches.append((wait, then)),
            in_turn=self.in_turn,
        )
        route = self.registry.route_long if is_long else self.registry.route
        route(CODE, function)

    def in_turn(self, _channel: Channel, step: Callable[[], object]) -> None:
        self.turns += 1
        step()

    def ask(self) -> None:
        frame = encode_frame(SerializeType.JSON, CODE, 1)
        self.registry.handle(self.channel, FrameReader().feed(frame))

    def answers(self) -> list[tuple[int, str | None]]:
        return [(command.code, command.remark) for command, _ in self.channel.replies()]

    def run_slices(self) -> int:
        works, self.slices = self.slices, []
        return sum(1 for work in works for _ in work)

    def finish_fetch(self, problem: Exception | None = None) -> None:
        wait, then = self.fetches.pop()
        if problem is None:
            wait.fetch()
        then(problem)


async def test_a_wait_is_charged_named_and_resumed_in_a_turn() -> None:
    runs: list[Run] = []

    async def serve(_: Request) -> Reply:
        return Reply(remark=await Until("another part", runs.append))

    daemon = Daemon(serve)
    daemon.ask()
    assert daemon.registry.waiting() == {"another part": 1}
    assert daemon.channel.charged_bytes > 2048
    assert daemon.turns == 0
    runs[0].resume("value")
    assert daemon.answers() == [(0, "value")]
    assert (daemon.turns, daemon.channel.charged_bytes, daemon.registry.running) == (1, 0, set())


async def test_a_wait_that_ends_at_once_is_none() -> None:
    async def serve(_: Request) -> Reply:
        total = 0
        for number in range(10_000):  # more than Python would call into each other
            total += await Until("nothing", partial(Run.resume, value=number))
        return Reply(remark=str(total))

    daemon = Daemon(serve)
    daemon.registry.slice_s = 60.0
    daemon.ask()
    assert daemon.answers() == [(0, str(sum(range(10_000))))]
    assert (daemon.turns, daemon.channel.charged_bytes) == (0, 0)


@pytest.mark.parametrize("is_long", [True, False])
async def test_a_break_ends_the_slice_when_its_time_is_over(is_long: bool) -> None:
    async def serve(_: Request) -> Reply:
        for _number in range(3):
            await take_break()
        await sliced(iter_nothing(3))
        return Reply()

    for slice_s, breaks in ((0.0, 6), (60.0, 0)):
        daemon = Daemon(serve, is_long=is_long)
        daemon.registry.slice_s = slice_s
        daemon.ask()
        assert daemon.answers() == [(0, None)] * (breaks == 0 and not is_long)
        assert daemon.run_slices() == breaks - (not is_long and breaks > 0)
        assert daemon.channel.charged_bytes == 0


def iter_nothing(count: int) -> Any:
    for _ in range(count):
        yield


async def test_a_read_is_repeated_until_nothing_is_missing() -> None:
    missing: list[int] = []

    def read() -> Reply:
        if missing:
            raise NotReady(lambda: missing.remove(missing[0]), LANE)
        return Reply(remark="read")

    async def with_ready(_: Request) -> Reply:
        return await ready(read)

    for serve in (with_ready, lambda _: now_or_later(read)):
        missing[:] = [1, 2]
        daemon = Daemon(serve)
        daemon.ask()
        daemon.finish_fetch()
        assert daemon.registry.waiting() == {"tests": 1}
        daemon.finish_fetch()
        assert daemon.answers() == [(0, "read")]


async def test_a_part_that_brings_data_may_answer_itself() -> None:
    runs: list[Run] = []

    def read() -> Reply:
        raise NotHere(Until("another broker", runs.append))

    daemon = Daemon(lambda _: now_or_later(read))
    daemon.ask()
    runs.pop().resume(None)
    runs.pop().resume(Reply(remark="it has none"))
    assert daemon.answers() == [(0, "it has none")]


@pytest.mark.parametrize(
    ("problem", "answer"),
    [
        (None, (0, "3")),
        (RequestError(ResponseCode.SYSTEM_BUSY, "busy"), (ResponseCode.SYSTEM_BUSY, "busy")),
    ],
)
async def test_a_fetch_returns_or_raises(
    problem: Exception | None, answer: tuple[int, str]
) -> None:
    async def serve(_: Request) -> Reply:
        return Reply(remark=str(await fetch(lambda: 3, LANE)))

    daemon = Daemon(serve)
    daemon.ask()
    daemon.finish_fetch(problem)
    assert daemon.answers() == [answer]


async def test_errors_of_waits_are_raised_where_they_were_awaited() -> None:
    def refuse(_then: Any) -> None:
        raise RequestError(ResponseCode.SYSTEM_BUSY, "refused")

    caught: list[str] = []

    async def serve(_: Request) -> Reply:
        for begin in (refuse, lambda then: then(RequestError(1, "called back"))):
            try:
                await until("a part", begin)
            except RequestError as error:
                caught.append(error.remark)
        await until("a part", lambda then: then(None))
        raise RequestError(ResponseCode.TOPIC_NOT_EXIST, "the last")

    daemon = Daemon(serve)
    daemon.ask()
    assert caught == ["refused", "called back"]
    assert daemon.answers() == [(ResponseCode.TOPIC_NOT_EXIST, "the last")]


async def test_a_coroutine_may_not_await_the_loop() -> None:
    async def serve(_: Request) -> Reply:
        await trio.lowlevel.checkpoint()
        return Reply()

    daemon = Daemon(serve)
    daemon.ask()
    assert daemon.answers()[0][0] == ResponseCode.SYSTEM_ERROR
    assert len(daemon.errors) == 1


async def test_a_change_of_a_client_that_has_left_runs_to_its_end() -> None:
    steps: list[str] = []
    runs: list[Run] = []

    async def serve(_: Request) -> Reply:
        steps.append("begun")
        await Until("a save", runs.append)
        steps.append("saved")
        return Reply()

    daemon = Daemon(serve)
    daemon.ask()
    daemon.channel.is_open = False
    runs[0].resume()
    assert steps == ["begun", "saved"]


def test_a_wait_ends_once() -> None:
    runs: list[Run] = []

    async def serve(_: Request) -> Reply:
        await Until("a part", runs.append)
        await Until("another", runs.append)
        return Reply()

    daemon = Daemon(serve)
    daemon.ask()
    (run,) = runs
    assert run.state is State.WAITING
    run.resume()
    assert (run.state, run.waits_for) == (State.WAITING, "another")
    run.resume()
    assert (run.state, run.waits_for) == (State.ENDED, "")
    run.resume()  # has no effect
    assert len(daemon.answers()) == 1
    with pytest.raises(AssertionError):
        run.resume()
