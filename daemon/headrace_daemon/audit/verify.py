"""Check the chain of an audit log: which line was changed, removed or added first.

A line is proved by the hash in the next one, so nothing proves the last line, or shows that lines
were cut off at the end. For that, keep the last hash elsewhere and pass it to a later check.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from headrace_daemon.audit.lines import CONTINUED, NOTHING, Line, Link, decode, hash_of
from headrace_daemon.audit.log_file import rotation_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path


class Place(NamedTuple):
    """A line of a file, from 1 on."""

    path: Path
    number: int

    def __str__(self) -> str:
        return f"{self.path}:{self.number}"


class Raw(NamedTuple):
    """A line as it stands in its file. is_whole: it has a line end."""

    place: Place
    data: bytes
    is_whole: bool


class Checked(NamedTuple):
    """The outcome of a check.

    line_count: lines that were checked. begins_after, ends_with: hashes of the line before the
    first one, and of the last one; 64 zeros if there is none.
    problem: the first line that is not as it was written; None if all are.
    notes: what a reader should know of an unbroken chain.
    """

    line_count: int
    begins_after: str
    ends_with: str
    problem: str | None
    notes: list[str]


class _Broken(Exception):
    """The chain does not hold."""


def in_order(paths: Iterable[Path]) -> list[Path]:
    """Rotated files by their numbers, then the file that is written."""
    return sorted(paths, key=lambda path: rotation_number(path.name) or math.inf)


def check(paths: Sequence[Path], expected: str = "") -> Checked:
    """Check files in the order in which they were written. Raises OSError.

    expected: the hash of a line that must be among them.
    """
    chain = _Chain(expected)
    problem = None
    try:
        following: Raw | None = None
        for raw in read(paths):
            if following is not None:
                chain.add(following, raw)
            following = raw
        if following is not None:
            chain.add(following, None)
        chain.finish()
    except _Broken as error:
        problem = str(error)
    return Checked(chain.count, chain.begins_after, chain.end.hash, problem, chain.notes)


class _Chain:
    """The lines so far. before: the link before the last line."""

    def __init__(self, expected: str) -> None:
        self.count = 0
        self.begins_after = NOTHING.hash
        self.end = self._before = NOTHING
        self.notes: list[str] = []
        self._place: Place | None = None
        self._torn: Raw | None = None
        self._expected = expected
        self._found_at = 0
        self._time = ""

    def add(self, raw: Raw, following: Raw | None) -> None:
        """Check one line. following: the one behind it. Raises _Broken."""
        if not raw.is_whole:
            self._note_torn(raw)
            return
        line = _decoded(raw.data)
        if line is None:
            raise _Broken(f"{raw.place}: not a line of an audit log: it was changed or added")
        if self._place is None:
            self._begin(raw, line)
        elif line.previous != self.end.hash:
            raise _Broken(self._why(raw, line, following))
        elif line.number != self.end.number + 1:
            raise _Broken(f"{raw.place}: this line was changed")
        self._check_torn(raw, line)
        if line.time < self._time:
            self.notes.append(f"{raw.place}: the clock was set back, from {self._time}")
        self._advance(raw, line)

    def finish(self) -> None:
        """Check that the expected line was there. Raises _Broken."""
        if self._torn is not None:
            self.notes.append(
                f"{self._torn.place}: unfinished; the daemon was killed, or is writing it"
            )
        if not self._expected:
            return
        if not self._found_at:
            raise _Broken(
                f"no line has the hash {self._expected}: lines were cut off, or all were rewritten"
            )
        self.notes.append(f"{self.count - self._found_at} lines follow the expected one")

    def _begin(self, raw: Raw, line: Line) -> None:
        if line.number == 1 and line.previous != NOTHING.hash:
            raise _Broken(f"{raw.place}: this line was changed: the first one has none before it")
        if line.number != 1:
            self.notes.append(f"{raw.place}: line {line.number} of the log; others came before it")
        self.begins_after = line.previous
        self.end = Link(line.number - 1, line.previous)

    def _advance(self, raw: Raw, line: Line) -> None:
        self._before, self.end = self.end, Link(line.number, hash_of(raw.data))
        self._place, self._time = raw.place, line.time
        self.count += 1
        if self.end.hash == self._expected:
            self._found_at = self.count

    def _note_torn(self, raw: Raw) -> None:
        if self._torn is not None:
            self.notes.append(f"{self._torn.place}: unfinished")
        self._torn = raw

    def _check_torn(self, raw: Raw, line: Line) -> None:
        """Bytes without a line end are the daemon's if the next line names them."""
        torn, self._torn = self._torn, None
        if torn is None:
            return
        named = line.detail.get("unfinishedHash") if line.event == CONTINUED else None
        if named != hash_of(torn.data):
            raise _Broken(f"{torn.place}: this unfinished line was changed or added")
        self.notes.append(f"{torn.place}: unfinished, as {raw.place} says: the daemon was killed")

    def _why(self, raw: Raw, line: Line, following: Raw | None) -> str:
        """What happened before or to a line that does not continue the chain."""
        assert self._place is not None
        if line.previous == self._before.hash:
            return f"{self._place}: this line was added"
        next_line = _decoded(following.data) if following and following.is_whole else None
        if next_line is not None and next_line.previous == self.end.hash:
            return f"{raw.place}: this line was added"
        if next_line is not None and next_line.previous != hash_of(raw.data):
            return f"{raw.place}: this line was changed"
        # From here on the next line proves this one, if there is a next line.
        missing_count = line.number - self.end.number - 1
        if missing_count > 0:
            return f"{raw.place}: {missing_count} lines before this one were removed"
        if missing_count < 0:
            return f"{self._place}: this line was added, and maybe others before it"
        if next_line is None:
            return f"{self._place}: this line or the next one was changed"
        return f"{self._place}: this line was changed"


def _decoded(data: bytes) -> Line | None:
    try:
        return decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def read(paths: Sequence[Path]) -> Iterator[Raw]:
    """The lines of files, in order. Raises OSError."""
    for path in paths:
        with path.open("rb") as file:
            for number, data in enumerate(file, 1):
                is_whole = data.endswith(b"\n")
                yield Raw(Place(path, number), data[:-1] if is_whole else data, is_whole)
