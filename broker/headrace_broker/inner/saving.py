"""Saves the checkpoint of a service at intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
import trio

from headrace_broker.store.errors import StoreNotWritable
from headrace_protocol.outages import Outages

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

log = structlog.get_logger("headrace.broker")


async def save_at_intervals(
    what: str, save: Callable[[], Awaitable[None]], pause_s: Callable[[], float]
) -> None:
    """Save until cancelled; a save that fails is logged and retried at the next interval.

    what: the service, for the log.
    """
    outages, name = Outages(log.error, ended=log.warning), f"the checkpoint of {what}"
    while True:
        await trio.sleep(pause_s())
        try:
            await save()
        except (OSError, StoreNotWritable) as error:
            outages.failed(name, error)
        else:
            outages.worked(name)
