"""``headrace broker``: the daemon that stores messages."""

from __future__ import annotations

from pathlib import Path

import click

from headrace.admin import options
from headrace.errors import ConfigurationError


@click.command(
    "broker",
    epilog=options.examples(
        "headrace broker -c conf/broker.conf",
        "headrace broker -c conf/broker.conf --check-config",
    ),
)
@click.option(
    "--config",
    "-c",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FILE",
    help="File with lines key=value; see conf/broker.conf.",
)
@options.check_config
@options.log_level("info")
def command(config: Path, log_level: str, *, check_config: bool) -> None:
    """Run a broker.

    It stores messages and hands them to consumers, until SIGINT (Ctrl-C) or SIGTERM.
    """
    from headrace_broker.config import ConfigError
    from headrace_broker.main import serve

    try:
        serve(config, check_config=check_config, log_level=log_level)
    except ConfigError as error:
        raise ConfigurationError(str(error)) from error
