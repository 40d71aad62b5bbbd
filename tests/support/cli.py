"""Runs the command line in this process."""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, NamedTuple
from unittest.mock import patch

from headrace.admin import cli
from headrace.admin.options import PATIENCE, Patience

_DEADLINE_S = 20.0
# For brokers that are away in a test, and do not come back.
IMPATIENT = Patience(give_up_s=0.3, pause_s=0.01)


class Outcome(NamedTuple):
    """The result of a command."""

    exit_code: int
    stdout: str
    stderr: str

    def json(self) -> Any:
        """Its output, as JSON."""
        return json.loads(self.stdout)

    def json_lines(self) -> list[Any]:
        """Its output, as one JSON value a line."""
        return [json.loads(line) for line in self.stdout.splitlines()]

    def rows(self) -> list[list[str]]:
        """Its output, as tab-separated columns, without the headings."""
        return [line.split("\t") for line in self.stdout.splitlines()[1:]]


def headrace(
    *arguments: str, stdin: bytes | io.RawIOBase = b"", patience: Patience = PATIENCE
) -> Outcome:
    """Run ``headrace`` with these arguments."""
    out, err = _Capture(), _Capture()
    raw: Any = io.BytesIO(stdin) if isinstance(stdin, bytes) else stdin
    given = io.TextIOWrapper(io.BufferedReader(raw))
    with (
        redirect_stdout(out),
        redirect_stderr(err),
        patch.object(sys, "stdin", given),
        patch.object(sys, "argv", ["headrace", *arguments]),
    ):
        try:
            cli.main(patience)
        except SystemExit as end:
            code = end.code
    assert isinstance(code, int) or code is None
    return Outcome(code or 0, out.text(), err.text())


def succeed(
    *arguments: str, stdin: bytes | io.RawIOBase = b"", patience: Patience = PATIENCE
) -> Outcome:
    """Run a command that succeeds."""
    outcome = headrace(*arguments, stdin=stdin, patience=patience)
    assert outcome.exit_code == 0, outcome.stderr
    return outcome


def fail(
    exit_code: int,
    *arguments: str,
    stdin: bytes | io.RawIOBase = b"",
    patience: Patience = PATIENCE,
) -> str:
    """Run a command that fails; returns its message, which is one line."""
    outcome = headrace(*arguments, stdin=stdin, patience=patience)
    assert outcome.exit_code == exit_code, outcome
    assert outcome.stderr.startswith("headrace: ")
    assert outcome.stderr.count("\n") == 1
    assert "Traceback" not in outcome.stderr
    return outcome.stderr


class _Capture(io.TextIOWrapper):
    def __init__(self) -> None:
        super().__init__(io.BytesIO(), write_through=True)

    def text(self) -> str:
        data = self.buffer
        assert isinstance(data, io.BytesIO)
        return data.getvalue().decode()
