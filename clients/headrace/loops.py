"""Event loops and tasks where anyio has no name for them: under trio and asyncio."""

from __future__ import annotations

import inspect
from threading import Thread
from typing import TYPE_CHECKING, Any

import sniffio

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine

# An event loop keeps only weak references to its tasks.
_asyncio_tasks: set[asyncio.Task[None]] = set()


def current_loop() -> object:
    """The event loop that runs in this thread, or None."""
    try:
        library = sniffio.current_async_library()
    except sniffio.AsyncLibraryNotFoundError:
        return None
    if library == "trio":
        import trio

        return trio.lowlevel.current_trio_token()
    import asyncio

    return asyncio.get_running_loop()


def runs_trio() -> bool:
    """True while trio runs in this thread."""
    try:
        return sniffio.current_async_library() == "trio"
    except sniffio.AsyncLibraryNotFoundError:
        return False


def current_task() -> object:
    """The running task itself: unlike its id, nothing later is equal to it."""
    if sniffio.current_async_library() == "trio":
        import trio

        return trio.lowlevel.current_task()
    import asyncio

    return asyncio.current_task()


def has_ended(user: Any) -> bool:
    """True once a task of trio or asyncio, or a thread, has ended."""
    if isinstance(user, Thread):
        return not user.is_alive()
    if hasattr(user, "done"):  # asyncio's
        return bool(user.done())
    return inspect.getcoroutinestate(user.coro) == inspect.CORO_CLOSED


def spawn(function: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a function in a task that no scope of the caller contains."""
    if sniffio.current_async_library() == "trio":
        import trio

        trio.lowlevel.spawn_system_task(function)
        return
    import asyncio

    task = asyncio.get_running_loop().create_task(function())
    _asyncio_tasks.add(task)
    task.add_done_callback(_asyncio_tasks.discard)
