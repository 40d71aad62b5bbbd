"""``headrace nameserver``: the daemon that tracks which brokers have which topics."""

from __future__ import annotations

from pathlib import Path

import click

from headrace.admin import options


@options.command(
    "nameserver",
    "headrace nameserver --port 9876",
    "headrace nameserver -c conf/nameserver.conf --check-config",
)
@click.option(
    "--config",
    "-c",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File with lines key=value.",
)
@click.option(
    "--port",
    type=options.port,
    metavar="PORT",
    help="Port to listen on; overrides the file's listenPort.",
)
@options.check_config
@options.log_level("info")
def command(config: Path | None, port: int | None, log_level: str, *, check_config: bool) -> None:
    """Run a nameserver.

    It tells clients which brokers have which topics, until SIGINT (Ctrl-C) or SIGTERM.
    """
    from headrace_nameserver.main import serve

    serve(config, port=port, check_config=check_config, log_level=log_level)
