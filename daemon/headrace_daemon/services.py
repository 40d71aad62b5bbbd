"""A daemon's services: their order of start and finish, and their supervision."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import IntEnum, auto
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import structlog
import trio

if TYPE_CHECKING:
    from collections.abc import Iterable

log = structlog.get_logger("headrace.services")

Run = Callable[..., Awaitable[object]]

RETRY_S: Final = 1.0


class StopStage(IntEnum):
    """Stages of a stop, in their order; a service finishes in one of them."""

    # Unregister from other processes; clients are still served.
    DEPART = auto()
    # Answer held requests; then all tasks end, and clients are closed.
    ANSWER = auto()
    # Write state that is only in memory.
    SAVE = auto()
    # Copy what is saved to somewhere else.
    COPY = auto()


@dataclass(frozen=True, slots=True)
class Service:
    """A part of a daemon with a task, or with work at the start or the stop.

    run: its task.
    is_awaited: ``run`` takes a task_status, and later services start only after it has reported.
    is_supervised: see ``Services``; False for a service that supervises its own tasks, and for
    one whose failure must end the daemon.
    needs_process: run only if the daemon owns its process.
    load: called in a thread before any service runs.
    finish: called in ``stage`` of a stop, after earlier services; may be asynchronous.
    """

    run: Run | None = None
    load: Callable[[], None] | None = None
    finish: Callable[[], Awaitable[None] | None] | None = None
    stage: StopStage = StopStage.SAVE
    is_awaited: bool = False
    is_supervised: bool = True
    needs_process: bool = False


async def load_all(services: Iterable[Service]) -> None:
    """Call each ``load`` in a thread, one after the other. Raises its errors."""
    for service in services:
        if service.load is not None:
            await trio.to_thread.run_sync(service.load)


async def finish_all(services: Iterable[Service], *stages: StopStage) -> None:
    """Finish the services of these stages, in order, even if some fail.

    Raises an ExceptionGroup of all failures.
    """
    errors: list[Exception] = []
    for service in sorted(services, key=lambda service: service.stage):
        if service.finish is None or service.stage not in stages:
            continue
        try:
            if (finishing := service.finish()) is not None:
                await finishing
        except Exception as error:  # noqa: BLE001 - raised when the others have finished
            errors.append(error)
    if errors:
        raise ExceptionGroup("services failed to finish", errors)


class Services:
    """Supervisor that restarts services after unexpected errors, so that none ends the daemon.

    A service must be able to restart after an error anywhere in it.
    unexpected_errors: their number; each is logged with its traceback.
    retry_s: pause before a restart.
    """

    def __init__(self) -> None:
        self.retry_s = RETRY_S
        self.unexpected_errors = 0

    async def start_all(
        self, nursery: trio.Nursery, services: Iterable[Service], *, owns_process: bool
    ) -> None:
        """Start services in the order of the list. Raises the error of a failed start."""
        for service in services:
            run = service.run
            if run is None or (service.needs_process and not owns_process):
                continue
            if service.is_awaited:
                await (self.start(nursery, run) if service.is_supervised else nursery.start(run))
            elif service.is_supervised:
                self.start_soon(nursery, run)
            else:
                nursery.start_soon(run)

    def start_soon(self, nursery: trio.Nursery, service: Run) -> None:
        """Run a service until it returns or is cancelled."""
        nursery.start_soon(self._run, service, name=service)

    async def start(self, nursery: trio.Nursery, service: Run) -> Any:
        """Run a service, and wait until it has started. Raises the error of a failed start."""
        return await nursery.start(self._start, service, name=service)

    async def _run(self, service: Run) -> None:
        while True:
            try:
                await service()
            except Exception as error:  # noqa: BLE001 - supervision
                await self._failed(service, error)
            else:
                return

    async def _start(self, service: Run, *, task_status: trio.TaskStatus[Any]) -> None:
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

    async def _failed(self, service: Run, error: Exception) -> None:
        self.unexpected_errors += 1
        function = service.func if isinstance(service, partial) else service
        log.error(
            "service failed, restarting",
            service=getattr(function, "__qualname__", repr(function)),
            pause_s=self.retry_s,
            exc_info=error,
        )
        await trio.sleep(self.retry_s)
