"""The parts of this broker that ask other daemons, and the limits of each.

A request names its row, so nothing asks without a limit.
Source: docs/architecture.md "Other daemons"; tests/broker/peers/test_peers.py.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from headrace_protocol.drivers.errors import HeadraceError


class Caller(NamedTuple):
    """A part of this broker that asks other daemons.

    timeout_ms: longest time for an answer, including the connecting; None: ``forwardTimeout``.
    at_once: most requests under way at one daemon. A request takes about 1 KiB meanwhile.
    """

    name: str
    timeout_ms: int | None
    at_once: int


# Held requests of clients, which are charged for them.
_CLIENTS: Final = 65_536

# Brokers.
FORWARDING: Final = Caller("requests for leaders", None, _CLIENTS)
ITEMS: Final = Caller("pulls of items", None, _CLIENTS)
LOGIC_QUEUES: Final = Caller("requests for logic queues", None, _CLIENTS)
# Any client may commit one way; after a failure the next commit writes to all items again.
PROGRESS: Final = Caller("offsets of items", None, 4096)
DELIVERIES: Final = Caller("due messages", None, 1024)
FOUNDERS: Final = Caller("founders of static topics", 3000, 1)
CLEANUP: Final = Caller("clean-up of mappings", None, 1)
REBUILDS: Final = Caller("rebuilds of compacted queues", 10_000, 1)

# Nameservers.
REGISTRATION: Final = Caller("registration", 6000, 4)
LOOKUPS: Final = Caller("look-ups of brokers and routes", 6000, 256)
# A thousand topics one by one cost a start as many switches between processes.
FENCE: Final = Caller("the fence", 3000, 32)


class TooManyRequests(HeadraceError):
    """A caller has as many requests under way at one daemon as its row allows."""

    retryable = True

    def __init__(self, caller: Caller, peer: str) -> None:
        super().__init__(
            f"{caller.at_once} requests ({caller.name}) already wait for {peer}: it is slow or "
            "stuck; check its log, or retry later"
        )
