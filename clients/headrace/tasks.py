"""A client's background tasks, bound to its ``async with`` block."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import anyio

from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from anyio.abc import TaskGroup, TaskStatus

Item = TypeVar("Item")
Result = TypeVar("Result")

# Enough that all servers that don't answer together cost one timeout.
_AT_ONCE_MAX = 32


async def gather(
    work: Callable[[Item], Awaitable[Result]], items: Sequence[Item]
) -> list[Result | HeadraceError]:
    """Run ``work`` for the items concurrently; returns each one's result or HeadraceError."""
    outcomes: dict[int, Result | HeadraceError] = {}
    limiter = anyio.CapacityLimiter(_AT_ONCE_MAX)

    async def do(index: int, item: Item) -> None:
        async with limiter:
            try:
                outcomes[index] = await work(item)
            except HeadraceError as error:
                outcomes[index] = error

    async with anyio.create_task_group() as tasks:
        for index, item in enumerate(items):
            tasks.start_soon(do, index, item)
    return [outcomes[index] for index in range(len(items))]


class Background:
    """A task group that ends with its block and leaves the block's own errors as they are.

    A plain task group wraps whatever its block raises in an ExceptionGroup; this block is the
    user's, who should see what the user raised. And it ends its tasks when a scope around the
    block is cancelled; these go on until the block is left, which needs them to say goodbye.
    """

    def __init__(self) -> None:
        self._block: TaskGroup | None = None
        self._tasks: TaskGroup | None = None

    async def start(self) -> TaskGroup:
        """Begin the block; returns the group for the tasks."""
        self._block = anyio.create_task_group()
        await self._block.__aenter__()
        # The group is there at once; without it the block could not be left.
        with anyio.CancelScope(shield=True):
            tasks: TaskGroup = await self._block.start(self._run)
        self._tasks = tasks
        return tasks

    @staticmethod
    async def _run(*, task_status: TaskStatus[TaskGroup]) -> None:
        """Keep a group that no scope around the block reaches; the block itself is not in it."""
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                task_status.started(tasks)
                await anyio.sleep_forever()

    async def stop(self) -> None:
        """End all tasks; the caller then lets the block's exception, if any, go on.

        Raises what a task raised, in an ExceptionGroup: it is a bug.
        """
        assert self._block is not None
        assert self._tasks is not None
        self._tasks.cancel_scope.cancel()
        await self._block.__aexit__(None, None, None)
