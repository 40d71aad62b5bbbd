"""Up to where in the log the progress that Apache's files hold is complete.

A progress file such as delayOffset.json lags behind what was delivered, so a start after a crash
reads the log from here on to see what was. The file is ours alone: an Apache broker that ran on
the store has changed its own file, and then the mark beside it says nothing.

Source: docs/store-format.md "secondOrder.json"; tests/broker/schedule/test_schedule.py.
"""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, Final

import msgspec

from headrace_broker.persistence import load_table

if TYPE_CHECKING:
    from headrace_broker.store.files.config_file import ConfigFile

MARKS_FILE: Final = "secondOrder.json"


class Mark(msgspec.Struct, frozen=True, rename="camel"):
    """How far the log is covered by a progress file.

    progress: the offsets in that file, by queue. log_offset: they count all that was delivered
    before this physical offset.
    """

    progress: dict[str, int]
    log_offset: int


class Marks:
    """The marks of all services, by name."""

    def __init__(self, file: ConfigFile) -> None:
        """Raises StoreFormatError when what is there can't be read."""
        self._file = file
        self._lock = Lock()
        self._marks = load_table(file, msgspec.json.Decoder(dict[str, Mark]).decode) or {}

    def find(self, name: str) -> Mark | None:
        """One mark."""
        return self._marks.get(name)

    def log_offset(self, name: str, progress: dict[str, int]) -> int | None:
        """Where to read the log from; None when the mark is not about this progress."""
        mark = self.find(name)
        return mark.log_offset if mark and mark.progress == progress else None

    def save(self, name: str, mark: Mark) -> None:
        """Replace one mark, on disk when this returns. Raises OSError."""
        with self._lock:
            marks = {**self._marks, name: mark}
            self._file.save(msgspec.json.encode(marks))
            self._marks = marks
