"""Commands suggested to a user, spelled so that they run as they stand."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path


def program() -> str:
    """``headrace`` if the shell finds this program by that name, otherwise its path."""
    called, found = sys.argv[0], shutil.which("headrace")
    if found and Path(called).exists() and Path(found).samefile(called):
        return "headrace"
    return os.path.relpath(called)


def suggest(commands: dict[str, str]) -> None:
    """Print arguments of ``headrace``, each with its purpose, as commands to try next."""
    name = program()
    width = max(map(len, commands))
    for arguments, purpose in commands.items():
        sys.stdout.write(f"  {name} {arguments:{width}}  # {purpose}\n")
    sys.stdout.flush()
