"""``headrace completion``: prints the script that completes commands in a shell."""

from __future__ import annotations

import sys

import click
from click.shell_completion import get_completion_class

from headrace.admin import options
from headrace.admin.completion import VARIABLE


@options.command(
    "completion",
    'eval "$(headrace completion bash)"',
    "headrace completion zsh",
)
@click.argument("shell", metavar="SHELL", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print the completion of a shell: bash, zsh or fish.

    Put the first example into ~/.bashrc. For zsh, write the same with zsh into ~/.zshrc. For fish:
    headrace completion fish > ~/.config/fish/completions/headrace.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    sys.stdout.write(kind(context.find_root().command, {}, "headrace", VARIABLE).source() + "\n")
