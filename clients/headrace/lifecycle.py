"""``start`` and ``stop`` beside a client's ``async with`` block, each callable from any task."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Self

import anyio

from headrace.errors import ConfigurationError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine

_log = logging.getLogger("headrace.client")

# An event loop keeps only weak references to its tasks.
_asyncio_tasks: set[asyncio.Task[None]] = set()


class Startable:
    """A client that can be started in one task and stopped in another.

    A task of its own enters and leaves the client's block: scopes must end in the task that they
    began in.
    """

    _host: _Host | None = None

    async def __aenter__(self) -> Self:
        raise NotImplementedError

    async def __aexit__(self, error_type: type[BaseException] | None = None, *_: object) -> None:
        raise NotImplementedError

    async def start(self) -> Self:
        """Open the client, as entering its ``async with`` block does, until ``stop``."""
        if self._host is not None:
            raise ConfigurationError("this client is already started; stop it first")
        host = self._host = _Host(self)
        try:
            await host.start()
        except BaseException:
            self._host = None
            raise
        return self

    async def stop(self) -> None:
        """Close a client that was opened by ``start``, as leaving its block does.

        Does nothing if it is not started. Raises an ExceptionGroup if a background task had
        raised, which is a bug.
        """
        host = self._host
        if host is None:
            return
        try:
            await host.stop()
        finally:
            self._host = None


class _Host:
    """The task that holds a client's block open."""

    def __init__(self, client: Startable) -> None:
        self._client = client
        self._scope = anyio.CancelScope()
        self._entered = anyio.Event()
        self._leaving = anyio.Event()
        self._left = anyio.Event()
        self._error: Exception | None = None

    async def start(self) -> None:
        """Enter the block. Raises its error; if cancelled, leaves the block first."""
        _spawn(self._run)
        try:
            await self._entered.wait()
        except BaseException:
            self._scope.cancel()
            with anyio.CancelScope(shield=True):
                await self._left.wait()
            raise
        self._raise_error()

    async def stop(self) -> None:
        """Leave the block. Raises its error."""
        self._leaving.set()
        await self._left.wait()
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error:
            raise self._error

    async def _run(self) -> None:
        try:
            with self._scope:
                async with self._client:
                    self._entered.set()
                    await self._leaving.wait()
        except Exception as error:  # noqa: BLE001 - raised in the tasks that start and stop
            self._error = error
            if self._entered.is_set():
                _log.error("a client ended by itself: %r", error)
        finally:
            self._entered.set()
            self._left.set()


def _spawn(function: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a function in a task that no scope of the caller contains."""
    import sniffio

    if sniffio.current_async_library() == "trio":
        import trio

        trio.lowlevel.spawn_system_task(function)
        return
    import asyncio

    task = asyncio.get_running_loop().create_task(function())
    _asyncio_tasks.add(task)
    task.add_done_callback(_asyncio_tasks.discard)
