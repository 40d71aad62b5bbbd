"""Names of the queries with a state, kept outside of their folders, so that a lost one is noticed.

Without its state a broker would take a query for a new one, and its driver would write batches that
are stored already. A state without a name here is only not guarded; so it is saved before the name,
and removed after it.
Source: docs/store-format.md "staged".
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

import structlog

from headrace_broker.store.files.positions import PositionFile

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from headrace_broker.store.files.filesystem import Files

log = structlog.get_logger("headrace.broker")

KNOWN_FILE: Final = "stagedQueries.json"


class KnownQueries:
    """The names; in any thread."""

    def __init__(self, root: Path, files: Files) -> None:
        self._file = PositionFile(root / "config" / KNOWN_FILE, list[str], files)
        self._names: frozenset[str] = frozenset()
        self._lock = threading.Lock()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def load(self) -> frozenset[str]:
        """Read the names. Raises OSError, StoreFormatError."""
        self._names = frozenset(self._file.load() or ())
        return self._names

    def add(self, *names: str) -> None:
        """Note queries whose state is on disk. A failure is logged; the next save retries."""
        with self._lock:
            new = self._names.union(names)
            if new == self._names:
                return
            try:
                self._save(new)
            except OSError as error:
                log.warning("the folder of a query is not guarded", reason=str(error))

    def drop(self, name: str) -> None:
        """Remove a query before its state. Raises OSError."""
        with self._lock:
            if name in self._names:
                self._save(self._names - {name})

    def _save(self, names: Iterable[str]) -> None:
        self._file.save(sorted(names))
        self._names = frozenset(names)
