"""``headrace nameserver``: the daemon that tracks which brokers have which topics."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.admin.options import Level, LogLevel
from headrace.errors import ConfigurationError


def nameserver(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="File with lines key=value.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port to listen on; overrides the file's listenPort."),
    ] = None,
    check_config: Annotated[
        bool, typer.Option("--check-config", help="Check the file, report errors and exit.")
    ] = False,
    log_level: LogLevel = Level.INFO,
) -> None:
    """Run a nameserver until SIGINT (Ctrl-C) or SIGTERM."""
    from headrace_nameserver.config import ConfigError
    from headrace_nameserver.main import serve

    try:
        serve(config, port=port, check_config=check_config, log_level=log_level)
    except ConfigError as error:
        raise ConfigurationError(str(error)) from error
