"""Bodies of fixtures that many modules have: ``mq = pytest.fixture(in_memory)``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

import headrace
from headrace import Admin
from headrace.embedded import Embedded
from tests.support.running_brokers import Brokers, brokers


async def in_memory() -> AsyncIterator[Embedded]:
    """A broker and its nameserver, without sockets."""
    async with headrace.embedded(memory=True) as running:
        yield running


def brokers_named(names: Iterable[str]) -> Callable[[Path], AsyncIterator[Brokers]]:
    """Brokers with these names and their nameserver, without sockets."""

    async def running_brokers(tmp_path: Path) -> AsyncIterator[Brokers]:
        async with brokers(tmp_path, names) as running:
            yield running

    return running_brokers


async def admin_of_brokers(mq: Brokers) -> AsyncIterator[Admin]:
    """An Admin of ``brokers_named``."""
    async with Admin(**mq.at) as admin:
        yield admin
