"""The command ``headrace``: its nouns and verbs are in ``commands``."""

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
    version: Annotated[bool, typer.Option("--version", help="Say which version this is.")] = False,
) -> None:
    """A message broker of the RocketMQ family, and tools for any cluster of that family."""
    if version:
        from headrace_protocol import __version__

        sys.stdout.write(f"headrace {__version__}\n")
        raise typer.Exit


class _Closed:
    """Stands for a standard stream that is closed: no terminal, and any other use is refused.

    Commands that do not use it run: daemons are often started like that.
    """

    closed = True  # nothing to flush at the end

    def __init__(self, name: str) -> None:
        self._name = name

    def isatty(self) -> bool:
        return False

    def __getattr__(self, _attribute: str) -> Never:
        raise ConfigurationError(f"{self._name} is closed: this command needs it")


def _replace_closed_streams() -> None:
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            # It takes the stream's number, which would else go to a socket, or a file of a store.
            number = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, _Closed(name) if name != "stderr" else os.fdopen(number, "w"))


class _PlainFormatter(logging.Formatter):
    """Escapes control characters: clients log text from brokers."""

    def format(self, record: logging.LogRecord) -> str:
        return clean(super().format(record))


def _show_logs_plainly() -> None:
    # The handler that logging uses until it is configured, which no client command does.
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_PlainFormatter())


def main() -> None:
    """Run the command line and exit."""
    _replace_closed_streams()
    _show_logs_plainly()
    try:
        app()
    except (Exception, BaseExceptionGroup, KeyboardInterrupt) as error:  # noqa: BLE001 - what is not expected goes on
        sys.exit(failures.report(error))
