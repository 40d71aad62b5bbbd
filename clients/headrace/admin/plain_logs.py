"""Log lines of clients in the command line."""

from __future__ import annotations

import logging

from headrace_daemon.command import clean


class _PlainFormatter(logging.Formatter):
    """Escapes control characters: clients log text from brokers."""

    def format(self, record: logging.LogRecord) -> str:
        return clean(super().format(record))


def show_logs_plainly() -> None:
    """Escape the log lines that nothing else handles."""
    # The handler used until logging is configured, and client commands do not configure it.
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_PlainFormatter())
