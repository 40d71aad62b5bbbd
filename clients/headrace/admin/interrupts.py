"""Ctrl-C in commands that run until they are interrupted.

trio raises KeyboardInterrupt wherever Python code happens to run, also in a client's background
task, which then closes a connection in the middle of a request. Here SIGINT cancels a block
instead. SIGTERM arrives as SIGINT.
"""

from __future__ import annotations

import signal
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


class Interrupts:
    """SIGINT while a block of ``deferred_interrupts`` runs."""

    def __init__(self, signals: AsyncIterator[int]) -> None:
        self.has_arrived = False
        self._signals = signals

    @asynccontextmanager
    async def cancel_block(self) -> AsyncIterator[trio.Nursery]:
        """Cancel the block when SIGINT arrives. Yields a nursery that ends with the block."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._cancel, nursery.cancel_scope)
            yield nursery
            nursery.cancel_scope.cancel()

    async def _cancel(self, scope: trio.CancelScope) -> None:
        async for _ in self._signals:
            self.has_arrived = True
            scope.cancel()


@contextmanager
def deferred_interrupts() -> Iterator[Interrupts]:
    """After the block, raise KeyboardInterrupt if SIGINT cancelled a part of it."""
    with trio.open_signal_receiver(signal.SIGINT) as signals:
        interrupts = Interrupts(signals)
        yield interrupts
    if interrupts.has_arrived:
        raise KeyboardInterrupt
