"""Supervision of a daemon's long-lived tasks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import structlog
import trio

log = structlog.get_logger("headrace.services")

Service = Callable[..., Awaitable[object]]

RETRY_S: Final = 1.0


class Services:
    """Restarts services after unexpected errors, so that none of them ends the daemon.

    A service must be able to restart after an error anywhere in it.
    unexpected_errors: how many there were; each is logged with its traceback.
    """

    def __init__(self) -> None:
        self.unexpected_errors = 0

    def start_soon(self, nursery: trio.Nursery, service: Service, *arguments: Any) -> None:
        """Run a service until it returns or is cancelled."""
        nursery.start_soon(self._run, service, arguments, name=service)

    async def start(self, nursery: trio.Nursery, service: Service) -> Any:
        """The same, but wait until the service has started. Raises the error of a failed start."""
        return await nursery.start(self._start, service, name=service)

    async def _run(self, service: Service, arguments: tuple[Any, ...]) -> None:
        while True:
            try:
                await service(*arguments)
            except Exception as error:  # noqa: BLE001 - supervision
                await self._failed(service, error)
            else:
                return

    async def _start(self, service: Service, *, task_status: trio.TaskStatus[Any]) -> None:
        has_started = False
        while True:
            try:
                async with trio.open_nursery() as nursery:
                    value = await nursery.start(service, name=service)
                    if not has_started:
                        has_started = True
                        task_status.started(value)
            except Exception as error:
                if not has_started:
                    raise
                await self._failed(service, error)
            else:
                return

    async def _failed(self, service: Service, error: Exception) -> None:
        self.unexpected_errors += 1
        log.error(
            "service failed, restarting",
            service=getattr(service, "__qualname__", repr(service)),
            pause_s=RETRY_S,
            exc_info=error,
        )
        await trio.sleep(RETRY_S)
