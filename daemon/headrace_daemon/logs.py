"""Logs of the daemons: readable lines on a terminal, otherwise JSON lines."""

from __future__ import annotations

import atexit
import logging
import os
import select
import sys
from typing import Final

import structlog

from headrace_daemon.line_queue import LineQueue

_DRAIN_S: Final = 1.0


class LogLines(LineQueue):
    """A logger that writes lines to a descriptor from its own thread.

    In the daemon's loop, a write to an unread pipe would block, and a full disk or a closed pipe
    would end the daemon. Here they only cost lines: a line that fails, or that finds the queue
    full, is dropped and counted.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        super().__init__("log lines", self._write_all)
        self.start()

    def msg(self, line: str) -> None:
        """Queue a line; never blocks, never raises OSError."""
        self.put(line.encode(errors="backslashreplace") + b"\n")

    # The methods that structlog calls.
    debug = info = warning = error = critical = msg

    def _write_all(self, lines: list[bytes]) -> int:
        return sum(not self._is_written(line) for line in lines)

    def _is_written(self, data: bytes) -> bool:
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
