"""The checkpoint of timers: ``positions/timer.json``.

``config/timercheck`` counts whole seconds and is for Apache's brokers. A start reads it back, and
one that is newer than our own file was written by one of them.

Source: docs/store-format.md "timercheck"; tests/broker/timer/test_timers.py.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from headrace_broker.store.files.filesystem import read_file

if TYPE_CHECKING:
    from pathlib import Path

    from headrace_broker.store.files.filesystem import Files
    from headrace_broker.store.files.positions import PositionFile

TIMER_CHECK_FILE: Final = "timercheck"
_FIELDS: Final = struct.Struct(">7q")
CHECK_BYTES: Final = 4096


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


class TimerPosition(NamedTuple):
    """The timers that are known to be delivered.

    due_ms, queue_offset: all timers before this offset of the queue that are due at this time.
    log_offset: the log has no delivery of another timer before this offset.
    oldest: all timers before this offset of the queue.
    """

    due_ms: int = 0
    queue_offset: int = 0
    log_offset: int = 0
    oldest: int = 0


class TimerCheckpoint(msgspec.Struct, frozen=True, rename="camel"):
    """``TimerPosition`` on disk. timestamp, counter: of the check that was saved with it."""

    due_ms: int
    queue_offset: int
    log_offset: int
    oldest: int
    timestamp: int
    counter: int


class TimerCheckFile:
    """Both files.

    saved: contents of timercheck; None if it is missing or unreadable.
    position: our own checkpoint; None if another broker has delivered since.
    """

    def __init__(self, path: Path, fs: Files, position: PositionFile[TimerCheckpoint]) -> None:
        """Raises OSError, StoreFormatError, but not for a file that is no timercheck."""
        self._path = path
        self._fs = fs
        self._position = position
        self.saved = self._load()
        self.position: TimerPosition | None = None
        own = position.load()
        if own and _version(self.saved) <= (own.timestamp, own.counter):
            self.position = TimerPosition(own.due_ms, own.queue_offset, own.log_offset, own.oldest)

    def _load(self) -> TimerCheck | None:
        try:
            data = read_file(self._path)
        except FileNotFoundError:
            return None
        check = TimerCheck.decode(data) if len(data) >= _FIELDS.size else None
        return check if check and min(check) >= 0 else None

    def save(self, check: TimerCheck, position: TimerPosition) -> None:
        """Write both, on disk when this returns; in one thread at a time. Raises OSError."""
        # Ours first: after a crash in between, timercheck must not pass for another broker's.
        self._position.save(TimerCheckpoint(*position, *_version(check)))
        self._fs.replace(self._path, check.encode().ljust(CHECK_BYTES, b"\0"))
        self.saved, self.position = check, position


def _version(check: TimerCheck | None) -> tuple[int, int]:
    return (check.timestamp, check.counter) if check else (0, 0)
