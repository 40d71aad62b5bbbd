"""The command ``headrace``; its subcommands are in ``commands``."""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated, Never

import typer

from headrace.admin import failures
from headrace.admin.commands import (
    bench,
    broker,
    cluster,
    consume,
    demo,
    dev,
    doctor,
    group,
    message,
    nameserver,
    send,
    store,
    topic,
)
from headrace.errors import ConfigurationError
from headrace_daemon.command import clean

app = typer.Typer(
    name="headrace",
    no_args_is_help=True,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
)
for noun in (topic, message, group, store):
    app.add_typer(noun.app)
for verb in (dev, demo, nameserver, broker, send, consume, cluster, doctor, bench):
    app.command()(getattr(verb, verb.__name__.rpartition(".")[2]))


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """A message broker of the RocketMQ family, and tools for any cluster of that family."""
    if version:
        from headrace_protocol import __version__

        sys.stdout.write(f"headrace {__version__}\n")
        raise typer.Exit


class _Closed:
    """Replacement for a closed standard stream: not a terminal, and any other use raises.

    Commands that do not use the stream work; daemons are often started with closed streams.
    """

    closed = True  # nothing to flush at exit

    def __init__(self, name: str) -> None:
        self._name = name

    def isatty(self) -> bool:
        return False

    def __getattr__(self, _attribute: str) -> Never:
        raise ConfigurationError(f"{self._name} is closed, but this command needs it")


def _replace_closed_streams() -> None:
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            # Occupy the stream's descriptor, so that no socket or store file gets it.
            number = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, _Closed(name) if name != "stderr" else os.fdopen(number, "w"))


class _PlainFormatter(logging.Formatter):
    """Escapes control characters: clients log text from brokers."""

    def format(self, record: logging.LogRecord) -> str:
        return clean(super().format(record))


def _show_logs_plainly() -> None:
    # The handler used until logging is configured, and client commands do not configure it.
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_PlainFormatter())


def main() -> None:
    """Run the command line and exit."""
    _replace_closed_streams()
    _show_logs_plainly()
    try:
        app()
    except (Exception, BaseExceptionGroup, KeyboardInterrupt) as error:  # noqa: BLE001 - unexpected errors are raised again
        sys.exit(failures.report(error))
