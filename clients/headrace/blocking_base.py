"""The base of blocking clients: an async client on an event loop in a thread of its own."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from concurrent.futures import CancelledError
from contextlib import ExitStack
from contextvars import ContextVar
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast

from headrace.errors import ClientClosed, ConfigurationError, OpenedBeforeFork
from headrace.loops import runs_trio
from headrace.threads import LoopThread, runs_here

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from types import TracebackType

    from anyio.from_thread import BlockingPortal

Client = TypeVar("Client")
# A method of a base of the client serves the blocking one, too.
Client_co = TypeVar("Client_co", covariant=True)
Result = TypeVar("Result")
P = ParamSpec("P")

_log = logging.getLogger("headrace.client")

# The open clients, in the order of their opening.
_open: dict[Blocking[Any], None] = {}
calling_thread: ContextVar[object] = ContextVar("calling_thread")


class Blocking(Generic[Client_co]):
    """Wrapper of an async client; every method blocks until the result is there."""

    # The error by which a client is left that is still open at the program's end.
    _left_open: BaseException | None = SystemExit()

    def __init__(self, client: Client_co) -> None:
        self._client = client
        self._stack = ExitStack()
        self._portal: BlockingPortal | None = None
        self._is_leaving = False
        self._is_of_parent = False

    def __enter__(self) -> Self:
        if self._portal is not None:
            raise ConfigurationError("this client is already open; use it in one block at a time")
        self._check_process()
        self._check_thread()
        loop = LoopThread()
        self._stack.callback(loop.stop)
        self._enter_client(loop.portal)
        return self

    def _enter_client(self, portal: BlockingPortal) -> None:
        client: Any = self._client
        calling_thread.set(threading.current_thread())
        self._portal = portal
        try:
            self._stack.enter_context(portal.wrap_async_context_manager(client))
        except BaseException:
            self._portal = None
            self._stack.close()
            raise
        _open[self] = None

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._portal is None or self._is_leaving:
            return
        self._check_thread(self._portal)
        self._is_leaving = True
        _open.pop(self, None)
        try:
            # Callbacks in other threads call the client meanwhile.
            self._stack.__exit__(error_type, error, traceback)
        finally:
            self._portal, self._is_leaving = None, False

    def start(self) -> Self:
        """Open the client, as entering its ``with`` block does, until ``stop``."""
        return self.__enter__()

    def stop(self) -> None:
        """Close the client, as leaving its block does; does nothing if it is closed.

        Called in another thread, it also ends the ``for`` loops over the client.
        """
        self._leave()

    def _leave(self, error: BaseException | None = None) -> None:
        self.__exit__(type(error) if error else None, error, None)

    def _abandon(self) -> None:
        """Make the copy of an open client in a forked child harmless: its loop has no thread."""
        self._is_of_parent = True
        self._portal, self._stack = None, ExitStack()

    def _check_process(self) -> None:
        if self._is_of_parent:
            raise OpenedBeforeFork(type(self).__name__)

    def _check_thread(self, portal: BlockingPortal | None = None) -> None:
        """Raise ConfigurationError where nothing can wait for the client's event loop."""
        name = type(self).__name__
        if portal is not None and runs_here(portal):
            raise ConfigurationError(
                f"this {name} is called by a function that runs in its event loop's "
                "thread, such as on_result, and would wait for itself: do it in another thread"
            )
        if runs_trio():
            raise ConfigurationError(
                f"this blocking {name} is called in a task of trio, which lets no task wait for "
                "another event loop: use an async client of headrace there, or call this one in "
                "trio.to_thread.run_sync"
            )

    def _call(
        self, function: Callable[P, Awaitable[Result]], *args: P.args, **kwargs: P.kwargs
    ) -> Result:
        """Run an async function on the event loop."""
        portal = self._open_portal()
        calling_thread.set(threading.current_thread())
        try:
            future = portal.start_task_soon(partial(function, *args, **kwargs))
        except RuntimeError:
            self._check_thread(portal)
            raise self._closed() from None  # another thread is closing the client
        try:
            return future.result()
        except (CancelledError, ClientClosed):
            raise self._closed() from None
        except BaseException:
            # A signal handler raised: without this, leaving the block would wait for the call.
            future.cancel()
            raise

    def _open_portal(self) -> BlockingPortal:
        if self._portal is None:
            self._check_process()
            raise self._closed()
        return self._portal

    def _closed(self) -> ClientClosed:
        return ClientClosed(type(self).__name__, "with")

    def _steps(self, step: Callable[[], Awaitable[Result]]) -> Iterator[Result]:
        """Results of an async function, until there are no more or the client is closed."""
        while True:
            try:
                result = self._call(step)
            except (StopAsyncIteration, ClientClosed):
                return
            yield result


def _close_all() -> None:
    """Close what the program has left open, while its event loops still run."""
    for client in reversed(list(_open)):
        _log.warning(
            "a blocking %s was still open when the program ended; use it in a `with` block",
            type(client).__name__,
        )
        try:
            client._leave(client._left_open)
        except Exception:  # noqa: BLE001 - the others are still to be closed
            _log.exception("closing it failed")


def _abandon_all() -> None:
    for client in list(_open):
        client._abandon()
    _open.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_abandon_all)


# The decorators below give each blocking method the signature and the docstring of the async one.


def like(
    client: Callable[P, Client],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Blocking[Client], P], None]]:
    """Decorate an ``__init__`` that passes its arguments to ``client``."""

    def decorate(
        function: Callable[..., None],
    ) -> Callable[Concatenate[Blocking[Client], P], None]:
        return wraps(cast("Any", client).__init__)(function)

    return decorate


def awaited(
    method: Callable[Concatenate[Client, P], Awaitable[Result]],
) -> Callable[Concatenate[Blocking[Client], P], Result]:
    """The blocking method for an async one."""

    @wraps(method)
    def call(self: Blocking[Client], /, *args: P.args, **kwargs: P.kwargs) -> Result:
        return self._call(partial(method, self._client), *args, **kwargs)

    return call


def on_loop(
    method: Callable[Concatenate[Client, P], Result],
) -> Callable[Concatenate[Blocking[Client], P], Result]:
    """The blocking method for one that does not wait, but belongs to the event loop."""

    @wraps(method)
    async def run(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        return method(client, *args, **kwargs)

    return awaited(run)
