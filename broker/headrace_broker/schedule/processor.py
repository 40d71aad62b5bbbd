"""GET_ALL_DELAY_OFFSET (45): how far each delay level is delivered, for slaves and tools."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_protocol.codes import RequestCode
from headrace_protocol.serving import Reply

if TYPE_CHECKING:
    from headrace_broker.schedule.schedule import Schedule
    from headrace_protocol.serving import Registry, Request


class ScheduleProcessor:
    """Serves requests about delayed messages."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def register(self, registry: Registry) -> None:
        """Serve the code."""
        registry.route(RequestCode.GET_ALL_DELAY_OFFSET, self.all_offsets)

    def all_offsets(self, _request: Request) -> Reply:
        """GET_ALL_DELAY_OFFSET: the table as delayOffset.json holds it."""
        return Reply(body=(self._schedule.offsets_body(),))
