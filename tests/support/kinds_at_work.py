"""Programs of a module, a process for each kind of work, that say what they did when they leave."""

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]
LEAVE_S = 60.0


class KindsAtWork:
    """Use it in a ``with`` block; the processes work from its beginning on.

    Each leaves on SIGTERM, and prints then what it did, as JSON.
    """

    def __init__(self, module: str, kinds: Mapping[str, Iterable[str]]) -> None:
        """kinds: the words after the kind's name on the command line."""
        self._processes = {
            kind: subprocess.Popen(
                [sys.executable, "-m", module, kind, *words],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
            )
            for kind, words in kinds.items()
        }

    def wait_begun(self) -> None:
        """Wait until each has printed a line."""
        for process in self._processes.values():
            assert process.stdout
            process.stdout.readline()

    def ended(self) -> dict[str, int]:
        """The exit codes of those that have left by themselves."""
        codes = {kind: process.poll() for kind, process in self._processes.items()}
        return {kind: code for kind, code in codes.items() if code is not None}

    def finish(self) -> dict[str, Any]:
        """Let them leave; what each did, or its fault."""
        for process in self._processes.values():
            process.terminate()
        return {kind: _said(process) for kind, process in self._processes.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()
            assert process.stdout
            process.stdout.close()


def _said(process: subprocess.Popen[str]) -> Any:
    """The report of a process, which may still have to wait for another one."""
    try:
        printed, _ = process.communicate(timeout=LEAVE_S)
    except subprocess.TimeoutExpired:
        return {"fault: does not end": 1}
    return json.loads(printed) if printed else {"fault: ended early": 1}
