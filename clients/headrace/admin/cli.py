"""The command ``headrace``; each of its commands is a module of ``commands``, loaded when used."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Never

import click

from headrace.admin import completion, options
from headrace_daemon.command import INTERRUPTED, TERMINATED, USAGE, fail
from headrace_protocol import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from click.shell_completion import CompletionItem

# Panels of the help: commands and what they do.
PANELS = {
    "Run": {
        "dev": "Run a nameserver and a broker in one process.",
        "nameserver": "Run a nameserver.",
        "broker": "Run a broker, or read and change the settings of running ones.",
    },
    "Messages": {
        "send": "Send one message, or each line or row of a file.",
        "consume": "Print a topic's messages.",
        "message": "Find, trace and resend messages.",
        "kv": "Get, put, delete and watch keys of a topic that is used as a table.",
    },
    "Manage": {
        "topic": "Create, list, describe, alter, purge and delete topics.",
        "group": "List, describe, move and delete consumer groups, and replay dead letters.",
        "timer": "List and cancel timers: messages that wait for their time.",
        "tier": "Show, check, repair and move tiered storage.",
        "transaction": "List transactions without a decision, and resume discarded ones.",
        "quota": "Limit what a user, a topic or a group takes of brokers and nameservers.",
        "cluster": "List the brokers with their rates, and those that left.",
        "acl": "Manage users and rules, and explain what a user may do.",
        "cert": "Make certificates for TLS, for labs and tests.",
        "context": "Name clusters, and choose the one that commands and clients use.",
        "completion": "Print the completion of a shell: bash, zsh or fish.",
    },
    "Diagnose": {
        "doctor": "Check that every server is up and is what it should be.",
        "bench": "Measure throughput and latency of a cluster.",
        "store": "Check, print, count and copy a store directory.",
        "audit": "Check and print the audit log of a daemon.",
    },
}
_SUMMARIES = {name: text for panel in PANELS.values() for name, text in panel.items()}


class _Commands(options.Group):
    """Loads only the command that is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(_SUMMARIES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _SUMMARIES:
            return None
        module = importlib.import_module(f"headrace.admin.commands.{cmd_name}")
        command: click.Command = module.command
        options.check_texts(command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.exceptions.NoSuchCommand as error:
            # Click compares with the commands that are loaded.
            raise click.exceptions.NoSuchCommand(
                error.command_name, possibilities=_SUMMARIES, ctx=ctx
            ) from None

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002
        from click.shell_completion import CompletionItem

        return [
            CompletionItem(name, help=text)
            for name, text in _SUMMARIES.items()
            if name.startswith(incomplete)
        ]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        width = max(map(len, _SUMMARIES))
        for panel, commands in PANELS.items():
            with formatter.section(panel):
                formatter.write_dl([(f"{name:{width}}", text) for name, text in commands.items()])


@click.command(
    "headrace",
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="`headrace COMMAND -h` shows the options of a command, with examples.",
)
@click.version_option(__version__, message="headrace %(version)s")
def headrace() -> None:
    """A message broker of the RocketMQ family, and tools for any cluster of that family."""
    from headrace.admin.terminal import show_logs_plainly

    show_logs_plainly()


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
        from headrace.errors import ConfigurationError

        raise ConfigurationError(f"{self._name} is closed, but this command needs it")


def _replace_closed_streams() -> None:
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            # Occupy the stream's descriptor, so that no socket or store file gets it.
            number = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, _Closed(name) if name != "stderr" else os.fdopen(number, "w"))


@contextmanager
def _sigterm_interrupts() -> Iterator[list[int]]:
    """Treat SIGTERM as Ctrl-C in the block, so that commands clean up.

    Yields a list that holds the signal's number once it has arrived.
    """
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.append(number)
        # trio's handler waits until none of its own code is running.
        handler = signal.getsignal(signal.SIGINT)
        # A shell's background jobs ignore SIGINT.
        (handler if callable(handler) else signal.default_int_handler)(signal.SIGINT, frame)

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, previous)


def _run(patience: options.Patience) -> int:
    try:
        # Not click's own main(): its handling of interrupts and closed pipes differs from ours.
        with headrace.make_context("headrace", sys.argv[1:], obj=patience) as context:
            headrace.invoke(context)
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return USAGE
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "headrace"
        text = error.format_message().rstrip(".")
        fail(f"{text} See `{where} -h`" if text.endswith("?") else f"{text}; see `{where} -h`")
        return USAGE
    return 0


def main(patience: options.Patience = options.PATIENCE) -> None:
    """Run the command line and exit. patience: of commands that read."""
    _replace_closed_streams()
    with _sigterm_interrupts() as received:
        try:
            code = completion.answer(headrace) if completion.is_asked() else _run(patience)
        except (Exception, BaseExceptionGroup, KeyboardInterrupt) as error:  # noqa: BLE001 - unexpected errors are raised again
            from headrace.admin import failures

            code = failures.report(error)
    sys.exit(TERMINATED if received and code == INTERRUPTED else code)
