"""Lines that a thread writes, so that no loop waits for a disk or a pipe."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_WAITING_BYTES_MAX: Final = 1 << 20


class LineQueue:
    """Lines on their way to a thread of their own.

    dropped_count: lines that were not written, or found more than 1 MiB queued.
    is_closed: set at the end, for a writer that retries.
    """

    def __init__(self, name: str, write: Callable[[list[bytes]], int]) -> None:
        """name: of the thread. write: called there with all that wait; returns how many it lost."""
        self.dropped_count = 0
        self.is_closed = threading.Event()
        self._name = name
        self._write = write
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._changed = threading.Condition()

    def start(self) -> None:
        """Start the thread; lines that came before it are written first."""
        self.is_closed.clear()
        threading.Thread(target=self._run, name=self._name, daemon=True).start()

    @property
    def is_full(self) -> bool:
        """True if a line may be dropped."""
        return self._waiting_bytes > _WAITING_BYTES_MAX // 2

    def put(self, line: bytes) -> None:
        """Queue a line; never blocks on the writer, never raises OSError."""
        with self._changed:
            if self._waiting_bytes + len(line) > _WAITING_BYTES_MAX:
                self.dropped_count += 1
                return
            self._waiting.append(line)
            self._waiting_bytes += len(line)
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Wait until every line is written or dropped; False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Wait until every line is written or given up; the thread ends then. False on timeout."""
        self.is_closed.set()
        with self._changed:
            self._changed.notify_all()
        return self.drain(timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self.is_closed.is_set())
                lines = list(self._waiting)
            if not lines:
                return
            lost_count = self._write(lines)
            with self._changed:
                for line in lines:
                    self._waiting.popleft()
                    self._waiting_bytes -= len(line)
                self.dropped_count += lost_count
                self._changed.notify_all()
