"""The command ``headrace``: its nouns and verbs are in ``commands``."""

from __future__ import annotations

import sys
from typing import Annotated

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


def main() -> None:
    """Run the command line and exit."""
    try:
        app()
    except (Exception, BaseExceptionGroup, KeyboardInterrupt) as error:  # noqa: BLE001 - what is not expected goes on
        sys.exit(failures.report(error))
