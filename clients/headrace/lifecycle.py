"""``start`` and ``stop`` beside a client's ``async with`` block, each callable from any task."""

from __future__ import annotations

import logging
from typing import Self

import anyio

from headrace.errors import ConfigurationError, WrongEventLoop
from headrace.loops import current_loop, spawn

_log = logging.getLogger("headrace.client")


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
        if self._running_host():
            raise ConfigurationError("this client is already started; stop it first")
        host = self._host = _Host(self)
        try:
            await host.start()
        except BaseException:
            self._forget(host)
            raise
        return self

    async def stop(self) -> None:
        """Close a client that was opened by ``start``, as leaving its block does.

        Does nothing if it is not started. A client whose ``stop`` is cancelled closes on; a further
        call waits for it. Raises an ExceptionGroup if a background task had raised, which is a bug.
        """
        self._running_host()
        if host := self._host:
            try:
                await host.stop()
            finally:
                self._forget(host)

    def _forget(self, host: _Host) -> None:
        """Forget a host whose block is left; one that is still leaving it uses the client."""
        if host.has_ended and self._host is host:
            self._host = None

    def _running_host(self) -> _Host | None:
        """The host of a client that is open. Raises WrongEventLoop."""
        if self._host is None or self._host.has_ended:
            return None
        if self._host.loop is not current_loop():
            raise WrongEventLoop(type(self).__name__)
        return self._host


class _Host:
    """The task that holds a client's block open. loop: the event loop of the task."""

    def __init__(self, client: Startable) -> None:
        self.loop = current_loop()
        self._client = client
        self._scope = anyio.CancelScope()
        self._entered = anyio.Event()
        self._leaving = anyio.Event()
        self._left = anyio.Event()
        self._error: Exception | None = None

    async def start(self) -> None:
        """Enter the block. Raises its error; if cancelled, leaves the block first."""
        spawn(self._run)
        try:
            await self._entered.wait()
        except BaseException:
            self._scope.cancel()
            with anyio.CancelScope(shield=True):
                await self._left.wait()
            raise
        self._raise_error()

    @property
    def has_ended(self) -> bool:
        """True once the block is left, for example because its event loop has ended."""
        return self._left.is_set()

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
