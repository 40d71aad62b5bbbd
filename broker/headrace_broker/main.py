"""From a settings file to a running broker."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import trio

from headrace_broker.server import Broker

if TYPE_CHECKING:
    from headrace_broker.config import BrokerConfig


async def run_broker(config: BrokerConfig) -> None:
    """Run one broker until SIGINT or SIGTERM.

    Raises what keeps it from starting: OSError (address), StoreError (directory), IdentityTaken.
    """
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Broker(config).run)
            async for _ in signals:
                nursery.cancel_scope.cancel()
                break
