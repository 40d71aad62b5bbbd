"""A client's background tasks, bound to its ``async with`` block."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from anyio.abc import TaskGroup, TaskStatus


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
