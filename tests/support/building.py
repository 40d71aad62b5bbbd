"""Builds a program of another language that tests run beside headrace."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

# A build takes a minute or two, but never ends while its registry does not answer. The second try
# continues with what the first one has downloaded.
LIMIT_S = 600
TRIES = 2


class BuildFailed(Exception):
    """A program can't be built; says with which command, and what that printed."""


def build(
    command: Sequence[str], directory: Path, environment: Mapping[str, str] | None = None
) -> None:
    """Run a command that builds a program. Raises BuildFailed."""
    for _ in range(TRIES):
        try:
            done = subprocess.run(
                command,
                cwd=directory,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            continue
        if done.returncode == 0:
            return
        raise BuildFailed(f"`{' '.join(command)}` in {directory} failed:\n{done.stdout}")
    raise BuildFailed(
        f"`{' '.join(command)}` in {directory} did not end within {LIMIT_S} s, {TRIES} times: "
        "does its registry answer?"
    )
