"""A client's background tasks, bound to its ``async with`` block."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, TypeVar

import anyio

from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from anyio.abc import TaskGroup, TaskStatus

Item = TypeVar("Item")
Result = TypeVar("Result")

# Enough that all servers of a cluster that do not answer cost a single timeout.
_AT_ONCE_MAX = 32


async def wait_if_async(returned: object) -> None:
    """Await what a user's callback returned, if it is async."""
    if inspect.isawaitable(returned):
        await returned


async def gather(
    work: Callable[[Item], Awaitable[Result]], items: Sequence[Item]
) -> list[Result | HeadraceError]:
    """Run ``work`` for all items concurrently; return the result or HeadraceError of each."""
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


async def gather_or_raise(
    work: Callable[[Item], Awaitable[Result]], items: Sequence[Item]
) -> list[Result]:
    """As ``gather``; raises the first HeadraceError once all have ended."""
    found: list[Result] = []
    for outcome in await gather(work, items):
        if isinstance(outcome, HeadraceError):
            raise outcome
        found.append(outcome)
    return found


def sole_error(error: BaseException) -> BaseException:
    """Unwrap groups of a single exception; groups of several are returned unchanged."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


class Background:
    """A task group that ends with its block and does not touch the block's own errors.

    A plain task group wraps any exception of its block in an ExceptionGroup; this block is the
    user's, and users should see the exception that they raised. A plain task group also ends its
    tasks when a scope around the block is cancelled; here they run until the block is left,
    because leaving it needs them to unregister from the brokers.
    """

    def __init__(self) -> None:
        self._block: TaskGroup | None = None
        self._tasks: TaskGroup | None = None

    async def start(self) -> TaskGroup:
        """Enter the block; return the group for its tasks."""
        self._block = anyio.create_task_group()
        await self._block.__aenter__()
        # Takes no time, and without the group the block could not be left.
        with anyio.CancelScope(shield=True):
            tasks: TaskGroup = await self._block.start(self._run)
        self._tasks = tasks
        return tasks

    @staticmethod
    async def _run(*, task_status: TaskStatus[TaskGroup]) -> None:
        """Hold a task group that no scope around the block can cancel; the block is outside it."""
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                task_status.started(tasks)
                await anyio.sleep_forever()

    async def stop(self) -> None:
        """End all tasks; the caller then lets the block's exception, if any, propagate.

        Raises an ExceptionGroup if a task raised, which is a bug.
        """
        assert self._block is not None
        assert self._tasks is not None
        self._tasks.cancel_scope.cancel()
        await self._block.__aexit__(None, None, None)
