"""A taker that does nothing with what it takes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from headrace_broker.store.log.takers import Taker

if TYPE_CHECKING:
    from headrace_broker.store.log.ring import Rows


class IdleTaker(Taker):
    """Counts its rows."""

    name = "idle"

    def __init__(self) -> None:
        self.row_count = 0

    def durable_offset(self) -> int:
        """Past all records: it brings none to disk."""
        return sys.maxsize

    def put(self, rows: Rows) -> None:
        self.row_count += len(rows)
