"""A client's background tasks, bound to its ``async with`` block."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from anyio.abc import TaskGroup


class Background:
    """A task group that ends with its block and leaves the block's own errors as they are.

    A plain task group wraps whatever its block raises in an ExceptionGroup; this block is the
    user's, who should see what the user raised.
    """

    def __init__(self) -> None:
        self._group: TaskGroup | None = None

    async def start(self) -> TaskGroup:
        """Begin the block."""
        self._group = anyio.create_task_group()
        return await self._group.__aenter__()

    async def stop(self) -> None:
        """End all tasks; the caller then lets the block's exception, if any, go on.

        Raises what a task raised, in an ExceptionGroup: it is a bug.
        """
        assert self._group is not None
        self._group.cancel_scope.cancel()
        await self._group.__aexit__(None, None, None)
