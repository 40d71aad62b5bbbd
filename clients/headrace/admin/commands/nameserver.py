"""``headrace nameserver``: the daemon that knows which broker has which topic."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.admin.options import Level, LogLevel
from headrace.errors import ConfigurationError


def nameserver(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="File of lines key=value.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Instead of the file's listenPort.")
    ] = None,
    check_config: Annotated[
        bool, typer.Option("--check-config", help="Read the file, say what is wrong, and end.")
    ] = False,
    log_level: LogLevel = Level.INFO,
) -> None:
    """Run a nameserver until SIGINT (Ctrl-C) or SIGTERM."""
    import msgspec
    import trio

    from headrace_nameserver.config import ConfigError, NameServerConfig, load_config
    from headrace_nameserver.server import NameServer
    from headrace_protocol.drivers.logs import configure_logs
    from headrace_protocol.drivers.process import run_until_signal

    try:
        settings = load_config(config) if config else NameServerConfig()
        if port is not None:
            settings = msgspec.structs.replace(settings, listen_port=port)
        server = NameServer(settings)
    except ConfigError as error:
        raise ConfigurationError(str(error)) from error
    if check_config:
        return
    configure_logs(log_level)
    trio.run(run_until_signal, server.run)
