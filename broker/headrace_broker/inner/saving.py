"""Saves the progress of a service at intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
import trio

from headrace_broker.store.errors import StoreNotWritable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

log = structlog.get_logger("headrace.broker")


async def save_at_intervals(
    what: str, save: Callable[[], Awaitable[None]], pause_s: Callable[[], float]
) -> None:
    """Save until cancelled; a save that fails is logged and retried at the next interval.

    what: the service, for the log.
    """
    while True:
        await trio.sleep(pause_s())
        try:
            await save()
        except (OSError, StoreNotWritable) as error:
            log.error("progress not saved, retrying", of=what, reason=str(error))
