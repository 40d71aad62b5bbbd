"""Completion of commands in a shell.

The script of ``headrace completion`` runs ``headrace`` at each Tab, with the words typed so far in
environment variables; what it prints are the words to choose from.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import click

# Tells the shell's question; the name is that of the program, as click's scripts expect it.
VARIABLE = "_HEADRACE_COMPLETE"


def is_asked() -> bool:
    """Whether a shell wants the words to choose from, not a command."""
    return VARIABLE in os.environ


def answer(command: click.Command) -> int:
    """Print the words to choose from; returns the exit code."""
    from click.shell_completion import shell_complete

    return shell_complete(command, {}, "headrace", VARIABLE, os.environ[VARIABLE])
