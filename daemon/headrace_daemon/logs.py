"""Logs of the daemons: readable lines on a terminal, otherwise JSON lines."""

from __future__ import annotations

import atexit
import logging
import os
import select
import sys
import threading
from collections import deque
from typing import Final

import structlog

_WAITING_BYTES_MAX: Final = 1 << 20
_DRAIN_S: Final = 1.0


class LogLines:
    """A logger that writes lines to a descriptor from its own thread.

    In the daemon's loop, a write to an unread pipe would block, and a full disk or a closed pipe
    would end the daemon. Here they only cost lines: a line that fails, or that finds more than 1
    MiB queued, is dropped and counted.
    """

    def __init__(self, descriptor: int) -> None:
        self.dropped_count = 0
        self._descriptor = descriptor
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="log lines", daemon=True).start()

    def msg(self, line: str) -> None:
        """Queue a line; never blocks, never raises OSError."""
        data = line.encode(errors="backslashreplace") + b"\n"
        with self._changed:
            if self._waiting_bytes + len(data) > _WAITING_BYTES_MAX:
                self.dropped_count += 1
                return
            self._waiting.append(data)
            self._waiting_bytes += len(data)
            self._changed.notify_all()

    # The methods that structlog calls.
    debug = info = warning = error = critical = msg

    def drain(self, timeout_s: float) -> bool:
        """Wait until every line is written or dropped; False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                data = self._waiting[0]
            is_written = self._write(data)
            with self._changed:
                self._waiting.popleft()
                self._waiting_bytes -= len(data)
                self.dropped_count += not is_written
                self._changed.notify_all()

    def _write(self, data: bytes) -> bool:
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # another process made the pipe non-blocking
                select.select([], [self._descriptor], [])
            except OSError:
                return False
        return True


_lines: LogLines | None = None


def dropped_log_lines() -> int:
    """Number of lines that this process dropped; 0 in a program with its own logging."""
    return _lines.dropped_count if _lines else 0


def renderer(*, is_terminal: bool) -> structlog.typing.Processor:
    """The formatter of events; both kinds escape control characters."""
    if is_terminal:
        return structlog.dev.ConsoleRenderer(repr_native_str=True)
    return structlog.processors.JSONRenderer()


def configure_logs(level: str = "info") -> None:
    """Send events to standard error; standard output is for a command's results.

    level: "debug", "info", "warning" or "error".
    """
    global _lines  # noqa: PLW0603 - one per process, like structlog's settings
    lines = _lines = LogLines(sys.stderr.fileno())
    atexit.register(lines.drain, _DRAIN_S)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer(is_terminal=sys.stderr.isatty()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=lambda *_: lines,
        cache_logger_on_first_use=True,
    )
