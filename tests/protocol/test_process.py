"""What a daemon asks of its process."""

from __future__ import annotations

import os

import trio
import trio.testing

from headrace_protocol.drivers.process import give_back_freed_memory
from tests.soak.holdings import holding

# Small enough for the C library's heap, which by itself gives back only what is free at its end.
PIECE_BYTES = 100_000
PIECES = 400


def memory_mb() -> float:
    return holding(os.getpid()).memory_mb


async def test_freed_memory_goes_back_after_a_minute_though_what_lies_above_is_in_use(
    autojump_clock: trio.testing.MockClock,
) -> None:
    before = memory_mb()
    pieces = [bytes([number % 256]) * PIECE_BYTES for number in range(PIECES)]
    above = bytes([1]) * PIECE_BYTES
    pieces.clear()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(give_back_freed_memory)
        await trio.sleep(59)
        assert memory_mb() > before + 30
        # The clock does not wait for the thread that does it.
        with trio.fail_after(24 * 3600):
            while memory_mb() > before + 10:  # noqa: ASYNC110 - the heap tells nobody
                await trio.sleep(60)
        nursery.cancel_scope.cancel()
    assert len(above) == PIECE_BYTES
    assert autojump_clock.current_time() > 60
