"""Daemons as users start them: processes of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support import evidence

HEADRACE = str(Path(sys.executable).with_name("headrace"))
_READY = re.compile(r"ready nameserver=(\S+) broker=(\S+) data=(\S+)\n")
_STALLED = '"event": "the loop stalled"'
TIMEOUT_S = 60


class Dev:
    """A running ``headrace dev``.

    nameserver, broker, data: what its line says.
    """

    def __init__(self, *arguments: str) -> None:
        ports = ("--nameserver-port", "0", "--broker-port", "0")
        # A file, since a full pipe would stop the daemon.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by evidence
        self.process = subprocess.Popen(
            [HEADRACE, "dev", *ports, *arguments],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        evidence.keep("headrace dev", self.process, self._log)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        ready = _READY.fullmatch(line)
        if ready is None:
            raise AssertionError((line, self.end()))
        self.nameserver, self.broker = ready[1], ready[2]
        self.data = Path(ready[3])

    def end(self) -> tuple[int, str, str]:
        """Wait for its end: exit code, the rest of its output, its errors."""
        out, _ = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, out, without_stalls(evidence.logged(self._log))

    def run(self, *arguments: str, stdin: str = "") -> str:
        """Run another ``headrace`` command against it; returns what it printed."""
        done = run(*arguments, stdin=stdin, nameserver=self.nameserver)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def json(self, *arguments: str) -> Any:
        """The output of a command with --json."""
        return json.loads(self.run(*arguments, "--json"))


def without_stalls(err: str) -> str:
    """A daemon's log without stalls of its loop: a machine that is not run makes those."""
    return "".join(line for line in err.splitlines(keepends=True) if _STALLED not in line)


@contextmanager
def dev(*arguments: str) -> Iterator[Dev]:
    """A ``headrace dev`` for the length of a block."""
    running = Dev(*arguments)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.terminate()
            running.end()


def run(
    *arguments: str,
    stdin: str = "",
    nameserver: str = "127.0.0.1:1",
    timeout_s: float = TIMEOUT_S,
) -> subprocess.CompletedProcess[str]:
    """Run a ``headrace`` command to its end."""
    return subprocess.run(
        [HEADRACE, *arguments],
        check=False,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "HEADRACE_NAMESERVER": nameserver},
    )
