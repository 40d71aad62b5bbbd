"""Measures the CPU time of a loop's steps."""

from __future__ import annotations

import gc
import math
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trio.lowlevel import Task


class Steps(trio.abc.Instrument):
    """The step of trio's loop that took most CPU time.

    most_ms: its CPU time, which no other process prolongs. ran: its task.
    """

    def __init__(self) -> None:
        self.most_ms = 0.0
        self.ran = ""
        self._began = math.inf  # until the first whole step

    def before_task_step(self, task: Task) -> None:  # noqa: ARG002 - trio's signature
        self._began = time.thread_time()

    def after_task_step(self, task: Task) -> None:
        ms = (time.thread_time() - self._began) * 1000
        if ms > self.most_ms:
            self.most_ms, self.ran = ms, task.name

    def __repr__(self) -> str:
        return f"<{self.most_ms:.1f} ms of CPU in one step of {self.ran}>"


@contextmanager
def measured_steps() -> Iterator[Steps]:
    """Measures from the next step on. Garbage waits: daemons freeze what they keep."""
    steps = Steps()
    gc.disable()
    trio.lowlevel.add_instrument(steps)
    try:
        yield steps
    finally:
        trio.lowlevel.remove_instrument(steps)
        gc.enable()
