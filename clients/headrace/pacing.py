"""Back-off between attempts, so that a peer's empty answers cannot keep a client busy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import Hashable

    from headrace.errors import HeadraceError
    from headrace.instance import ClientInstance

FIRST_PAUSE_S = 0.01
LONGEST_PAUSE_S = 1.0


class Pacer:
    """Back-off for one loop: the pause doubles with each attempt that makes no progress.

    The pause is measured from the start of the attempt, so a pull that its broker held adds none.
    """

    def __init__(self) -> None:
        self._pause_s = 0.0
        self._began = 0.0

    def begin(self) -> None:
        """Mark the start of an attempt."""
        self._began = anyio.current_time()

    def delay_s(self, *, progress: bool) -> float:
        """Seconds to wait after the attempt: 0 if it made progress or took long by itself."""
        elapsed_s = anyio.current_time() - self._began
        if progress or elapsed_s >= LONGEST_PAUSE_S:
            self._pause_s = 0.0
            return 0.0
        self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
        return max(0.0, self._pause_s - elapsed_s)


async def pause_after(
    instance: ClientInstance,
    error: HeadraceError,
    topic: str,
    broker_name: str,
    part: Hashable = None,
) -> None:
    """Report the failure of a request that is repeated, and wait before the next attempt.

    The route is looked up again where the error calls for it. part: see ``outages.report``.
    """
    instance.outages.report(error, topic, broker_name, part)
    if error.refresh_route:
        instance.invalidate_route(topic)
    await anyio.sleep(max(LONGEST_PAUSE_S, error.retry_after_ms / 1000))
