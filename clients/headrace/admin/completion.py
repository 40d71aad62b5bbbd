"""Completion of commands in a shell.

The script of ``headrace completion`` runs ``headrace`` at each Tab, with the words typed so far in
environment variables; what it prints are the words to choose from.
"""

from __future__ import annotations

import os
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import click

    from headrace.admin.client import Admin

# Tells the shell's question; the name is that of the program, as click's scripts expect it.
VARIABLE = "_HEADRACE_COMPLETE"


def is_asked() -> bool:
    """True if a shell wants the words to choose from, not a command."""
    return VARIABLE in os.environ


def answer(command: click.Command) -> int:
    """Print the words to choose from; returns the exit code."""
    from click.shell_completion import shell_complete

    return shell_complete(command, {}, "headrace", VARIABLE, os.environ[VARIABLE])


# Shells wait for the answer at each Tab.
_TIMEOUT_S = 2.0


def topics(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """The topics whose names begin with ``incomplete``; none if no nameserver answers."""
    return _ask(ctx, lambda admin: admin.topics(), incomplete)


def groups(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """The groups whose names begin with ``incomplete``; none if no nameserver answers."""

    async def names(admin: Admin) -> list[str]:
        return [group.group_name for group in await admin.groups(problems=[])]

    return _ask(ctx, names, incomplete)


def contexts(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """The contexts whose names begin with ``incomplete``."""
    from headrace.config import Settings
    from headrace.errors import HeadraceError

    try:
        names = Settings.load().contexts
    except HeadraceError:
        return []
    return sorted(name for name in names if name.startswith(incomplete))


def _ask(
    ctx: click.Context, names: Callable[[Admin], Awaitable[list[str]]], incomplete: str
) -> list[str]:
    import trio

    from headrace.admin.client import Admin
    from headrace.errors import HeadraceError

    found: list[str] = []

    async def ask() -> None:
        with trio.move_on_after(_TIMEOUT_S):
            async with Admin(nameserver=ctx.params.get("nameserver")) as admin:
                found.extend(await names(admin))

    # A client's log line would be written into the line that the user types.
    with Path(os.devnull).open("w") as nothing, redirect_stderr(nothing):
        try:
            trio.run(ask)
        except HeadraceError:
            return []
    return [name for name in found if name.startswith(incomplete)]
