"""Measures the CPU time of a loop's steps.

A busy machine prolongs a step now and then: its caches are cold, or its host takes the core away.
So a test marked ``steps`` that has a long one is repeated, and fails if each round has one. Where
the host takes memory away as well, the bound grows with the cost of new memory.
"""

from __future__ import annotations

import gc
import math
import mmap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pytest
import trio
from _pytest.runner import runtestprotocol
from trio.lowlevel import Task

STEP_MS: Final = 20
PAGE_US: Final = 1.0
ROUNDS: Final = 5


class LongStep(AssertionError):
    """A step took too much CPU time."""


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

    def check(self) -> None:
        """Raise LongStep if a step took too long; see ``Rounds``."""
        if self.most_ms > STEP_MS and self.most_ms > STEP_MS * _slowness():
            raise LongStep(f"{self.most_ms:.1f} ms of CPU in one step of {self.ran}")


def _slowness() -> float:
    """The cost of a new page of memory here beside that on a machine of its own, from 1 to 10."""
    pages = 4096
    with mmap.mmap(-1, pages * mmap.PAGESIZE) as memory:
        began = time.thread_time()
        for page in range(pages):
            memory[page * mmap.PAGESIZE] = 1
        page_us = (time.thread_time() - began) / pages * 1e6
    return min(max(page_us / PAGE_US, 1), 10)


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


class Rounds:
    """Repeats tests marked ``steps`` while they have a long step, up to ROUNDS times."""

    def __init__(self) -> None:
        self._has_long_step = False

    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> None:
        error = call.excinfo.value if call.excinfo else None
        errors = error.exceptions if isinstance(error, BaseExceptionGroup) else [error]
        if any(isinstance(each, LongStep) for each in errors):
            self._has_long_step = True

    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> bool | None:
        if item.get_closest_marker("steps") is None:
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for _ in range(ROUNDS):
            self._has_long_step = False
            reports = runtestprotocol(item, log=False, nextitem=nextitem)
            if not self._has_long_step:
                break
            item._initrequest()  # type: ignore[attr-defined]
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True
