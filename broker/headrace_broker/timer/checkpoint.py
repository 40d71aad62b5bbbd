"""The progress of timers: ``config/timercheck``, and headrace's own mark beside it.

The file has Apache's format and counts whole seconds. The mark is exact, and counts while the file
is the one that it was saved with.

Source: docs/store-format.md "timercheck"; tests/broker/timer/test_timers.py.
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

    read_ms: all slots before this time are delivered. log_position: end of the timer log on disk.
    queue_offset, master_queue_offset: of the first message that is not in the timer log.
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
    """The timers that are known to be delivered.

    due_ms, queue_offset: all timers before this offset of the queue that are due at this time.
    log_offset: the log has no delivery of another timer before this offset.
    oldest: all timers before this offset of the queue.
    """

    due_ms: int = 0
    queue_offset: int = 0
    log_offset: int = 0
    oldest: int = 0


class TimerCheckFile:
    """The file, and the mark.

    saved: contents of the file; None if it is missing or unreadable. settled: contents of the mark;
    None if another broker has written the file since.
    """

    def __init__(self, path: Path, fs: Files, marks: Marks) -> None:
        """Raises OSError, but not for a missing file, or one that is no checkpoint."""
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
        # The mark first; it names the old version of the file too, for a crash in between.
        before, now = _version(self.saved), _version(check)
        progress = {
            **dict(zip(_VERSIONS, (*before, *now), strict=True)),
            "settledMs": settled.due_ms,
            "settledOffset": settled.queue_offset,
            "oldest": settled.oldest,
        }
        self._marks.save(_MARK_NAME, Mark(progress, settled.log_offset))
        self._fs.reserve.save(lambda: self._write(check))
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
    """The versions of the file with which the mark counts."""
    before_ms, before, now_ms, now = (progress[name] for name in _VERSIONS)
    return [(before_ms, before), (now_ms, now)]
