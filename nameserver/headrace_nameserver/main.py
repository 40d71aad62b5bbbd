"""From settings to a running nameserver."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import trio

from headrace_nameserver.server import NameServer

if TYPE_CHECKING:
    from headrace_nameserver.config import NameServerConfig


async def run_nameserver(config: NameServerConfig) -> None:
    """Run one nameserver until SIGINT or SIGTERM.

    Raises what keeps it from starting: OSError (address), ConfigError (key-value file).
    """
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(NameServer(config).run)
            async for _ in signals:
                nursery.cancel_scope.cancel()
                break
