"""Event loops in threads of their own, for blocking clients, and where that cannot work."""

from __future__ import annotations

import _thread
import select
import socket
import threading
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

import anyio
from anyio.from_thread import BlockingPortal

from headrace.errors import ConfigurationError

_GREENLETS = frozenset(("gevent", "eventlet"))
# An event loop needs the originals.
_ORIGINALS = ((_thread, "start_new_thread"), (select, "select"), (socket, "socket"))


_here = threading.local()


def runs_here(portal: BlockingPortal) -> bool:
    """True in the thread of a portal's event loop, which cannot wait for the loop."""
    return getattr(_here, "portal", None) is portal


class LoopThread:
    """An event loop in a daemon thread. portal: runs functions on it."""

    def __init__(self) -> None:
        """Raises ConfigurationError where greenlets have replaced threads."""
        _check_unpatched()
        started: Future[BlockingPortal] = Future()
        self._thread = threading.Thread(
            target=_run, args=(started,), name="headrace-client", daemon=True
        )
        self._thread.start()
        self.portal = started.result()

    def stop(self) -> None:
        """End the loop, and cancel what still runs on it."""
        with suppress(RuntimeError):  # the loop has ended by itself
            self.portal.start_task_soon(partial(self.portal.stop, cancel_remaining=True))
        self._thread.join()


def _run(started: Future[BlockingPortal]) -> None:
    async def serve() -> None:
        async with BlockingPortal() as portal:
            _here.portal = portal
            started.set_result(portal)
            await portal.sleep_until_stopped()

    try:
        anyio.run(serve, backend="trio")
    except BaseException as error:
        if started.done():
            raise
        started.set_exception(error)


def _check_unpatched() -> None:
    """Raise ConfigurationError if gevent or eventlet has replaced what event loops build on."""
    for module, name in _ORIGINALS:
        library = getattr(module, name).__module__.partition(".")[0]
        if library in _GREENLETS:
            raise ConfigurationError(
                f"{library} has replaced {module.__name__}.{name}, and the event loop of a "
                "blocking client needs the original: use headrace in a process that "
                f"{library} does not patch (with gunicorn, --worker-class gthread), or start such "
                "a process for it"
            )
