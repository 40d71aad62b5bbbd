"""Reads of the tier, which is opened by the first of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headrace_broker.cold.breaker import Breaker
from headrace_broker.cold.reader import ColdReader
from headrace_protocol.errors import Lane, NotReady

if TYPE_CHECKING:
    from headrace_broker.tiered.access.settings import TierSettings
    from headrace_broker.tiered.access.tier_access import TierAccess

# Apart from the threads that read the local disk: a slow store must not take those.
TIERED_DATA: Final = Lane("messages of the tier", threads=8)


class TierReader(ColdReader):
    """Reads the queues of a tier. access: opens it, and requests wait ``open_s`` for that."""

    open_s = 5.0

    def __init__(self, access: TierAccess, settings: TierSettings) -> None:
        super().__init__(TIERED_DATA, Breaker("the tier"), settings.read_ahead)
        self.access = access

    def open_first(self) -> NotReady:
        """The error of a request that needs the tier before it is open. Raises RequestError."""
        self.breaker.check()
        return NotReady(self.open, TIERED_DATA)

    def open(self) -> None:
        """Open the tier; may block. Raises RequestError if its store is away, StoreFormatError."""
        try:
            self.access.open(self.open_s)
        except OSError as error:
            raise self.breaker.unreachable(str(error)) from None
