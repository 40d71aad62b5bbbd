"""The Go program of ``go/``, which drives Apache's client-go; see its main.go."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from threading import Timer
from typing import Any

from tests.conformance.peer import BUILDS, PeerError
from tests.support.building import build

PROJECT = Path(__file__).resolve().with_name("go")
TIMEOUT_S = 60

Event = dict[str, Any]


def missing_go() -> str:
    """The Go side's needs that this machine lacks, as a sentence; empty when none."""
    if shutil.which("go"):
        return ""
    return "go not found on PATH: client-go needs Go 1.18 or newer (Debian: apt-get install golang)"


def go_build(*, newest: bool = False) -> Path:
    """The program, built when stale, which Go itself decides.

    newest: with the newest commit of client-go, which has TLS; else with the last release.

    The first build takes the modules from Go's proxy (some 15 MB) and compiles for half a minute;
    later ones need no network. Raises PeerError without Go, and BuildFailed.
    """
    if problem := missing_go():
        raise PeerError(problem)
    program = BUILDS / PROJECT.name / ("newest" if newest else "driver")
    options = ["-modfile=newest.mod", "-tags=newest"] if newest else []
    build(["go", "build", *options, "-o", str(program), "."], PROJECT)
    return program


class GoClient:
    """A running scenario.

    events: those read so far; each has its kind at ``event`` and its time at ``at_ms``.
    """

    def __init__(self, process: subprocess.Popen[str], errors: Path) -> None:
        self.events: list[Event] = []
        self._process = process
        self._errors = errors

    def of_kind(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["event"] == kind]

    def until(self, is_enough: Callable[[], bool]) -> None:
        """Read events until there are enough; fails when the program ends or hangs."""
        with self._limit():
            while not is_enough():
                assert self._read(), f"not enough: {self.events}\n{self._last_errors()}"

    def received(self, count: int) -> list[Event]:
        """The events of received messages, at least ``count``."""
        self.until(lambda: len(self.of_kind("received")) >= count)
        return self.of_kind("received")

    def finish(self) -> None:
        """End the scenario and read its last events."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with self._limit():
            while self._read():
                pass
            assert self._process.wait() == 0, self._last_errors()

    def _read(self) -> bool:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            self.events.append(json.loads(line))
        return bool(line)

    @contextlib.contextmanager
    def _limit(self) -> Iterator[None]:
        timer = Timer(TIMEOUT_S, self._process.kill)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _last_errors(self) -> str:
        return self._errors.read_text()[-4000:]


@contextlib.contextmanager
def go_client(scenario: str, nameserver: str, home: Path, **options: object) -> Iterator[GoClient]:
    """A scenario for the length of a block; ``options`` are those of main.go.

    home: folder for the program's log and the offsets of broadcasting consumers.
    """
    errors = home / f"{scenario}.stderr"
    with (
        errors.open("ab") as stderr,
        subprocess.Popen(
            _command(scenario, nameserver, options),
            env=_environment(home),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as process,
    ):
        try:
            client = GoClient(process, errors)
            yield client
            client.finish()
        finally:
            process.kill()


def go_failure(scenario: str, nameserver: str, home: Path, **options: object) -> str:
    """The errors of a scenario that fails."""
    done = subprocess.run(
        _command(scenario, nameserver, options),
        env=_environment(home),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode != 0, done.stdout
    return done.stderr


def _command(scenario: str, nameserver: str, options: Mapping[str, object]) -> list[str]:
    return [
        str(go_build(newest=bool(options.get("tls")))),
        *("-scenario", scenario),
        *("-nameserver", nameserver),
        *("-options", json.dumps(options)),
    ]


def _environment(home: Path) -> dict[str, str]:
    return {"HOME": str(home), "ROCKETMQ_GO_LOG_LEVEL": "warn"}
