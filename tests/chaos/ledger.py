"""The clients' knowledge in a run: messages acknowledged and read, and errors."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.chaos.faults import Episode

# What is written later is no more about the fault.
AFTER_S = 10.0
LINES_MAX = 40
POLL_S = 0.2


class Ledger:
    """Messages by topic, keys by version. Threads share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._acknowledged: defaultdict[str, set[str]] = defaultdict(set)
        self._versions: dict[str, int] = {}
        self._violations: list[str] = []
        self.counts: Counter[str] = Counter()

    def acknowledge(self, topic: str, name: str) -> None:
        """A message was acknowledged."""
        with self._lock:
            self._acknowledged[topic].add(name)

    def acknowledged(self, topic: str) -> frozenset[str]:
        """The messages that every reader of the topic must find from now on."""
        with self._lock:
            return frozenset(self._acknowledged[topic])

    def acknowledge_version(self, key: str, version: int) -> None:
        """A version of a key was acknowledged."""
        with self._lock:
            self._versions[key] = version

    def versions(self) -> dict[str, int]:
        """The least version of each key that a reader must find from now on."""
        with self._lock:
            return dict(self._versions)

    def count(self, what: str) -> None:
        """Count something, for the summary."""
        with self._lock:
            self.counts[what] += 1

    def violate(self, what: str) -> None:
        """Something broke a promise."""
        with self._lock:
            self._violations.append(what)

    @property
    def violations(self) -> list[str]:
        """The broken promises so far."""
        with self._lock:
            return list(self._violations)

    def check_names(
        self, reader: str, wanted: Iterable[str], read: frozenset[str] | set[str]
    ) -> None:
        """A reader must have every message that was acknowledged before it began."""
        missing = sorted(set(wanted) - read)
        if missing:
            self.violate(f"{reader} lacks {len(missing)} messages, such as {missing[:5]}")

    def check_value(self, reader: str, key: str, floor: int, value: str | None) -> None:
        """A value must be at least the version that was acknowledged before it was asked for."""
        if value is None:
            if floor:
                self.violate(f"{reader}: no such key {key}, but version {floor} was acknowledged")
        elif int(value) < floor:
            self.violate(f"{reader}: version {value} of {key}, but {floor} was acknowledged")


class Line(NamedTuple):
    """A line that a daemon or a client logged. at_s: seconds of the run."""

    at_s: float
    source: str
    text: str


class LogBook(logging.Handler):
    """Every line of all log files of a folder and of this process's clients."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._read: defaultdict[str, int] = defaultdict(int)
        self._began = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.lines: list[Line] = []

    def now(self) -> float:
        """Seconds of the run."""
        return time.monotonic() - self._began

    def emit(self, record: logging.LogRecord) -> None:
        """Take a line of a client of this process."""
        self.add("clients", record.getMessage())

    def add(self, source: str, text: str) -> None:
        """Take a line."""
        self.add_at(self.now(), source, text)

    def add_at(self, at_s: float, source: str, text: str) -> None:
        """Take a line of some time."""
        self.lines.append(Line(at_s, source, text))

    def start(self) -> None:
        """Begin to take lines; what is there already is not of interest."""
        self._poll()
        self.lines.clear()
        logging.getLogger("headrace").addHandler(self)
        self._thread.start()

    def stop(self) -> None:
        """Take no more."""
        self._stop.set()
        self._thread.join()
        logging.getLogger("headrace").removeHandler(self)
        self._poll()

    def _run(self) -> None:
        while not self._stop.wait(POLL_S):
            self._poll()

    def _poll(self) -> None:
        for path in self._folder.glob("*.log"):
            with path.open("rb") as file:
                file.seek(self._read[path.name])
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read[path.name] += len(whole)
            for line in whole.decode(errors="replace").splitlines():
                self.add(path.stem, line)

    def share(self, episode: Episode, episodes: Sequence[Episode]) -> float:
        """The lines from the fault's begin until soon after its end.

        A line that falls into the time of several faults counts for each of them in equal parts.
        """
        return sum(
            1 / sum(_is_about(line, each) for each in episodes) for line in self.during(episode)
        )

    def during(self, episode: Episode) -> list[Line]:
        """The lines from the fault's begin until soon after its end, whatever they are about."""
        return [line for line in self.lines if _is_about(line, episode)]


def _is_about(line: Line, episode: Episode) -> bool:
    assert episode.ended_s is not None
    return episode.began_s <= line.at_s <= episode.ended_s + AFTER_S
