"""A broker whose long work runs in slices, and services whose steps are checked."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from headrace_broker.core import Pace
from tests.support.broker import BrokerUnderTest
from tests.support.steps import measured_steps


@pytest.fixture
def paced(tmp_path: Path) -> Iterator[BrokerUnderTest]:
    """A broker whose long work runs in slices."""
    broker = BrokerUnderTest(tmp_path, pace=Pace(), commit_log_file_bytes=1 << 27)
    yield broker
    broker.close()


@asynccontextmanager
async def running(
    broker: BrokerUnderTest, *runs: Callable[[], Awaitable[Any]]
) -> AsyncIterator[None]:
    """Runs the broker's slices and more services while the block runs, whose steps are checked."""
    async with trio.open_nursery() as nursery:
        for run in (broker.core.serving.pace.sliced_work.run, *runs):
            nursery.start_soon(run)
        with measured_steps() as steps:
            await trio.lowlevel.checkpoint()
            yield
            await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    steps.check()
