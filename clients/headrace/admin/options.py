"""Options shared by many commands."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class Level(StrEnum):
    """Minimum level of a daemon's log lines."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


Nameserver = Annotated[
    str | None,
    typer.Option(
        "--nameserver",
        "-n",
        metavar="HOST:PORT[;...]",
        help="Nameserver addresses. Default: HEADRACE_NAMESERVER, then nameserver in "
        "~/.config/headrace.toml, then 127.0.0.1:9876.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
LogLevel = Annotated[Level, typer.Option(case_sensitive=False, help="Minimum level of log lines.")]
