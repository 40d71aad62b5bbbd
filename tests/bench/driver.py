"""The JVM that loads a peer with the official client."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.conformance.peer import driver_command

Report = dict[str, float]


class DriverError(Exception):
    """A job failed, or the JVM ended."""


class Driver:
    """Runs jobs (``headrace.bench.Job``) one after the other; a context manager."""

    def __init__(self, home: Path, options: Sequence[str] = ()) -> None:
        """options: more of the JVM's."""
        self._log = home / "driver.log"
        with self._log.open("w") as errors:
            self._process = subprocess.Popen(
                driver_command("bench.Driver", home=home, options=options),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def run(self, job: dict[str, Any]) -> Report:
        """The measurements of one job; DriverError when it could not be carried out."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise DriverError(f"the driver ended:\n{self._log.read_text()[-4000:]}")
        report: Report = json.loads(line)
        if "failure" in report:
            raise DriverError(f"{job}: {report['failure']}\n{self._log.read_text()[-4000:]}")
        return report

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()
