"""``headrace broker``: the daemon that keeps messages."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from headrace.admin.options import Level, LogLevel
from headrace.errors import ConfigurationError


def broker(
    config: Annotated[
        Path, typer.Option("--config", "-c", help="File of lines key=value; see conf/broker.conf.")
    ],
    check_config: Annotated[
        bool, typer.Option("--check-config", help="Read the file, say what is wrong, and end.")
    ] = False,
    log_level: LogLevel = Level.INFO,
) -> None:
    """Run a broker until SIGINT (Ctrl-C) or SIGTERM."""
    import trio

    from headrace_broker.config import ConfigError, load_config
    from headrace_broker.server import Broker, log_warnings
    from headrace_protocol.drivers.logs import configure_logs
    from headrace_protocol.drivers.process import run_until_signal

    try:
        settings, warnings = load_config(config)
    except ConfigError as error:
        raise ConfigurationError(str(error)) from error
    if check_config:
        sys.stderr.writelines(f"headrace: {warning}\n" for warning in warnings)
        return
    configure_logs(log_level)
    log_warnings(warnings)
    trio.run(run_until_signal, Broker(settings, owns_loop=True).run)
