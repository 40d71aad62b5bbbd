"""Options that many commands share."""

from __future__ import annotations

from typing import Annotated

import typer

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
