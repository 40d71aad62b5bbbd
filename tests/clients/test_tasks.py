"""Background tasks end with their block and leave the block's errors alone, on both loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from headrace.tasks import Background


class Client:
    """A block with one background task."""

    def __init__(self, task: Callable[..., Any] = anyio.sleep_forever) -> None:
        self.task = task
        self.background = Background()

    async def __aenter__(self) -> None:
        (await self.background.start()).start_soon(self.task)

    async def __aexit__(self, *_: object) -> None:
        await self.background.stop()


@pytest.fixture(params=["trio", "asyncio"])
def run(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return lambda main: anyio.run(main, backend=request.param)


def test_the_task_ends_with_the_block(run: Callable[..., Any]) -> None:
    ended = []

    async def task() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(True)

    async def main() -> None:
        async with Client(task):
            await anyio.lowlevel.checkpoint()
        assert ended == [True]

    run(main)


def test_an_error_of_the_block_comes_out_as_it_is(run: Callable[..., Any]) -> None:
    async def main() -> None:
        async with Client():
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(main)


def test_a_time_limit_around_the_block_is_kept(run: Callable[..., Any]) -> None:
    async def main() -> None:
        with anyio.move_on_after(0.01) as scope:
            async with Client():
                await anyio.sleep_forever()
        assert scope.cancelled_caught
        await anyio.lowlevel.checkpoint()

    run(main)


def test_a_time_limit_inside_the_block_is_kept(run: Callable[..., Any]) -> None:
    async def main() -> None:
        async with Client():
            with anyio.move_on_after(0.01) as scope:
                await anyio.sleep_forever()
            assert scope.cancelled_caught

    run(main)


def test_a_block_in_a_cancelled_task_group_ends(run: Callable[..., Any]) -> None:
    async def client() -> None:
        async with Client():
            await anyio.sleep_forever()

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client)
            await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()

    run(main)


def test_a_bug_in_a_task_ends_the_block_and_is_raised(run: Callable[..., Any]) -> None:
    async def buggy() -> None:
        raise ZeroDivisionError

    async def main() -> None:
        async with Client(buggy):
            await anyio.sleep_forever()

    with pytest.raises(ExceptionGroup) as caught:
        run(main)
    assert caught.group_contains(ZeroDivisionError)
