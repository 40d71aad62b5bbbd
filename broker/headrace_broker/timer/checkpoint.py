"""How far timers were delivered: ``config/timercheck``, and our mark beside it.

The file is an Apache broker's and counts whole seconds. The mark is exact, and holds as long as
the file is the one that it was saved with.

Source: docs/store-format.md "timercheck"; tests/broker/test_timers.py.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from headrace_broker.inner.marks import Mark
from headrace_broker.store.files.filesystem import read_file

if TYPE_CHECKING:
    from pathlib import Path

    from headrace_broker.inner.marks import Marks
    from headrace_broker.store.files.filesystem import Files

TIMER_CHECK_FILE: Final = "timercheck"
_FIELDS: Final = struct.Struct(">7q")
CHECK_BYTES: Final = 4096
_MARK_NAME: Final = "timer"
_VERSIONS: Final = ("timestampBefore", "counterBefore", "timestamp", "counter")


class TimerCheck(NamedTuple):
    """The fields of the file.

    read_ms: all slots before this time were delivered. log_position: where the timer log ends on
    disk. queue_offset, master_queue_offset: of the first message that is not in the log.
    state_version, timestamp, counter: the DataVersion.
    """

    read_ms: int = 0
    log_position: int = 0
    queue_offset: int = 0
    master_queue_offset: int = 0
    state_version: int = 0
    timestamp: int = 0
    counter: int = 0

    @classmethod
    def decode(cls, data: bytes) -> TimerCheck:
        """The check of a file, which has at least 56 bytes."""
        return cls(*_FIELDS.unpack_from(data))

    def encode(self) -> bytes:
        """The file's first 56 bytes, which GET_TIMER_CHECK_POINT answers."""
        return _FIELDS.pack(*self)


class Settled(NamedTuple):
    """What is known to be delivered.

    due_ms, queue_offset: every timer before this offset of the queue that was due at this time.
    log_offset: no other timer was delivered before this offset of the log.
    oldest: all before this offset of the queue.
    """

    due_ms: int = 0
    queue_offset: int = 0
    log_offset: int = 0
    oldest: int = 0


class TimerCheckFile:
    """The file, and the mark.

    saved: what the file holds; None without one that can be read. settled: what the mark says;
    None if another broker wrote the file since.
    """

    def __init__(self, path: Path, fs: Files, marks: Marks) -> None:
        """Raises OSError, but not for a file that is missing or no checkpoint."""
        self._path = path
        self._fs = fs
        self._marks = marks
        self.saved = self._load()
        self.settled: Settled | None = None
        mark = marks.find(_MARK_NAME)
        if mark and _version(self.saved) in _versions(mark.progress):
            progress = mark.progress
            self.settled = Settled(
                progress["settledMs"],
                progress["settledOffset"],
                mark.log_offset,
                progress["oldest"],
            )

    def _load(self) -> TimerCheck | None:
        try:
            data = read_file(self._path)
        except FileNotFoundError:
            return None
        check = TimerCheck.decode(data) if len(data) >= _FIELDS.size else None
        return check if check and min(check) >= 0 else None

    def save(self, check: TimerCheck, settled: Settled) -> None:
        """Write both, on disk when this returns; in one thread at a time. Raises OSError."""
        # The mark first, and it holds with the file as it was as well: a crash may come in between.
        before, now = _version(self.saved), _version(check)
        progress = {
            **dict(zip(_VERSIONS, (*before, *now), strict=True)),
            "settledMs": settled.due_ms,
            "settledOffset": settled.queue_offset,
            "oldest": settled.oldest,
        }
        self._marks.save(_MARK_NAME, Mark(progress, settled.log_offset))
        self._write(check)
        self.saved, self.settled = check, settled

    def _write(self, check: TimerCheck) -> None:
        fs = self._fs
        is_new = not self._path.exists()
        descriptor = fs.open(self._path, os.O_RDWR | os.O_CREAT)
        try:
            fs.write(descriptor, check.encode(), 0)
            if is_new:
                fs.truncate(descriptor, CHECK_BYTES)
            fs.fdatasync(descriptor)
        finally:
            fs.close(descriptor)
        if is_new:
            fs.fsync_directory(self._path.parent)


def _version(check: TimerCheck | None) -> tuple[int, int]:
    return (check.timestamp, check.counter) if check else (0, 0)


def _versions(progress: dict[str, int]) -> list[tuple[int, int]]:
    """Those of the file with which the mark holds."""
    before_ms, before, now_ms, now = (progress[name] for name in _VERSIONS)
    return [(before_ms, before), (now_ms, now)]
