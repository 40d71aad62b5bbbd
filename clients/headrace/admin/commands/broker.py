"""``headrace broker``: the daemon that stores messages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.admin.options import Level, LogLevel
from headrace.errors import ConfigurationError


def broker(
    config: Annotated[
        Path,
        typer.Option("--config", "-c", help="File with lines key=value; see conf/broker.conf."),
    ],
    check_config: Annotated[
        bool, typer.Option("--check-config", help="Check the file, report errors and exit.")
    ] = False,
    log_level: LogLevel = Level.INFO,
) -> None:
    """Run a broker until SIGINT (Ctrl-C) or SIGTERM."""
    from headrace_broker.config import ConfigError
    from headrace_broker.main import serve

    try:
        serve(config, check_config=check_config, log_level=log_level)
    except ConfigError as error:
        raise ConfigurationError(str(error)) from error
