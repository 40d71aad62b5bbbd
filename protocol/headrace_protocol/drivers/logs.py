"""Logs of the daemons: for eyes on a terminal, as JSON lines otherwise."""

from __future__ import annotations

import logging
import sys

import structlog


def configure_logs(level: str = "info") -> None:
    """Send events to standard error; standard output belongs to what a command answers.

    level: "debug", "info", "warning" or "error".
    """
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer()
        if sys.stderr.isatty()
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
