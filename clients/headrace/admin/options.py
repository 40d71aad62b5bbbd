"""Options that many commands share."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class Level(StrEnum):
    """From which level on a daemon logs."""

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
        help="Where the nameservers are. Else HEADRACE_NAMESERVER counts, then nameserver in "
        "~/.config/headrace.toml, then 127.0.0.1:9876.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
LogLevel = Annotated[Level, typer.Option(case_sensitive=False, help="Log from this level on.")]
