"""A service that only notes when it is asked to do something."""

from __future__ import annotations

from functools import partial

import trio

from headrace_daemon.services import Service, StopStage


class IdleService:
    """Several of them can share their notes."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self._name = name
        self._notes = notes

    def service(self, stage: StopStage = StopStage.SAVE) -> Service:
        return Service(
            self._run,
            partial(self._note, "loads"),
            partial(self._note, "finishes"),
            stage,
            is_awaited=True,
        )

    async def _run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        self._note("runs")
        task_status.started()
        try:
            await trio.sleep_forever()
        finally:
            self._note("ends")

    def _note(self, event: str) -> None:
        self._notes.append(f"{self._name} {event}")
