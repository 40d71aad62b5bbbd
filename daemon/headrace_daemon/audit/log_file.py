"""The file of an audit log and its rotated predecessors, which continue one chain of lines.

1. Only the holder of the file's lock writes. A rotation renames the file to ``PATH.000001`` and so
   on; the numbers grow, and no file is renamed twice.
2. Lines are on disk before they count. After a failure the file is cut to the lines that count,
   closed, and read again before the next attempt.
3. The chain continues after the last whole line of the newest file that has one, so it does not
   matter where a crash interrupts a write or a rotation.
4. Bytes without a line end are left as they are, at the end of a rotated file. The next line names
   them.
5. Others may move the file away, cut it or append to it: the chain continues after the last line
   that was written here, and a check finds what they did.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from headrace_daemon.audit.lines import (
    CONTINUED,
    NOTHING,
    Link,
    chained,
    day_of,
    hash_of,
    is_beginning,
    link_of,
)

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable
    from pathlib import Path

    from headrace_daemon.audit.settings import AuditSettings

_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
_TAIL_BYTES: Final = 64 * 1024
_DIGITS: Final = 6
# Number and hash of a line, and the names of both.
_LINK_BYTES: Final = 100


class LogFile:
    """Appends events to an audit log; for one thread at a time.

    encode_event: makes an event about the log itself, of its name and details.
    """

    def __init__(
        self, settings: AuditSettings, encode_event: Callable[[str, dict[str, object]], bytes]
    ) -> None:
        self._path, self._bytes_max, self._files_max, _ = settings
        self._encode_event = encode_event
        self._descriptor: int | None = None
        self._size = 0
        self._day = b""
        # The last line that counts; NOTHING until one was read or written.
        self._end = NOTHING
        # Bytes that a crash has left without a line end, until a line names them.
        self._torn = b""

    def open(self) -> None:
        """Take the file and find the end of its chain. Raises OSError with a remedy."""
        self._descriptor = descriptor = os.open(self._path, _FLAGS, 0o600)
        try:
            self._lock(descriptor)
            os.fchmod(descriptor, 0o600)
            self._find_end(descriptor)
        except OSError as error:
            self.close()
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        """Release the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def append(self, events: deque[bytes]) -> None:
        """Write events as lines, and remove each that is on disk. Raises OSError; call it again."""
        try:
            while events:
                if not self._holds_path():
                    self.close()
                    self.open()
                self._find_changes()
                if self._torn:
                    events.appendleft(self._continued())
                    self._torn = b""
                self._append_some(events)
        except OSError:
            self.close()
            raise

    # -- writing -----------------------------------------------------------------------------------

    def _append_some(self, events: deque[bytes]) -> None:
        """Write events until the file is full or a day ends."""
        if self._is_due(events[0]):
            self._rotate()
        day, end, block = day_of(events[0]), self._end, bytearray()
        count = 0
        for event in events:
            line = chained(event, end)
            is_too_long = self._size + len(block) + len(line) > self._bytes_max
            if count and (is_too_long or day_of(event) != day):
                break
            block += line + b"\n"
            end = Link(end.number + 1, hash_of(line))
            count += 1
        self._write(block)
        self._end, self._day = end, day
        for _ in range(count):
            events.popleft()

    def _is_due(self, event: bytes) -> bool:
        """True if the file is to be rotated before this event."""
        is_full = self._size + len(event) + _LINK_BYTES > self._bytes_max
        return self._size > 0 and (is_full or day_of(event) != self._day)

    def _write(self, block: bytearray) -> None:
        assert self._descriptor is not None
        try:
            rest = memoryview(block)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            _sync(self._descriptor)
        except OSError as error:
            # Part of a line would be taken for a crash, and pages that were not synced may be lost.
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        self._size += len(block)

    def _rotate(self) -> None:
        """Continue in a new file."""
        rotated = self._rotated()
        number = rotation_number(rotated[-1].name) + 1 if rotated else 1
        target = self._path.with_name(f"{self._path.name}.{number:0{_DIGITS}}")
        self._path.rename(target)
        self.close()
        self.open()
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            _sync(folder)
        finally:
            os.close(folder)
        for oldest in [*rotated, target][: -self._files_max] if self._files_max else ():
            with suppress(OSError):  # the next rotation tries it again
                oldest.unlink()

    # -- the end of the chain ----------------------------------------------------------------------

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(
                errno.EAGAIN,
                "another daemon writes this audit log: give each an auditLogPath of its own",
            ) from None

    def _holds_path(self) -> bool:
        """True if the file that is open is still the one at the path."""
        if self._descriptor is None:
            return False
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._descriptor))  # noqa: PTH116
        except FileNotFoundError:
            return False

    def _find_changes(self) -> None:
        """Note what others have made of the file since the last write."""
        assert self._descriptor is not None
        size = os.fstat(self._descriptor).st_size
        if size != self._size:
            self._size = size
            _, torn = _tail(self._descriptor, size)
            if torn:
                self._rotate_torn(torn)

    def _find_end(self, descriptor: int) -> None:
        self._size = os.fstat(descriptor).st_size
        if not is_beginning(os.pread(descriptor, _TAIL_BYTES, 0)):
            raise OSError(
                errno.EEXIST,
                "this file is not an audit log: move it away, or choose another auditLogPath",
            )
        line, torn = _tail(descriptor, self._size)
        if line is not None:
            self._end, self._day = link_of(line), day_of(line)
        elif self._end is NOTHING:
            older_torn = self._find_rotated_end()
            torn = torn or older_torn
        self._torn = torn
        if torn and self._size:
            self._rotate_torn(torn)

    def _rotate_torn(self, torn: bytes) -> None:
        """Leave unfinished bytes behind in a rotated file."""
        self._rotate()
        self._torn = torn

    def _find_rotated_end(self) -> bytes:
        """Continue after the rotated files; returns unfinished bytes at the end of the newest."""
        newest_torn = b""
        for path in reversed(self._rotated()):
            with path.open("rb") as file:
                line, torn = _tail(file.fileno(), os.fstat(file.fileno()).st_size)
            newest_torn = newest_torn or torn
            if line is not None:
                self._end = link_of(line)
                break
        return newest_torn

    def _rotated(self) -> list[Path]:
        """The rotated files, the oldest first."""
        paths = self._path.parent.glob(f"{self._path.name}.*")
        found = [path for path in paths if rotation_number(path.name)]
        return sorted(found, key=lambda path: rotation_number(path.name))

    def _continued(self) -> bytes:
        detail = {"unfinishedBytes": len(self._torn), "unfinishedHash": hash_of(self._torn)}
        return self._encode_event(CONTINUED, detail)


def rotation_number(name: str) -> int:
    """The number of a rotated file; 0 for the file that is written."""
    digits = name.rpartition(".")[2]
    return int(digits) if len(digits) >= _DIGITS and digits.isdecimal() else 0


def _sync(descriptor: int) -> None:
    os.fsync(descriptor)


def _tail(descriptor: int, size: int) -> tuple[bytes | None, bytes]:
    """The last whole line of a file, None if it has none, and the bytes behind it."""
    wanted = _TAIL_BYTES
    while True:
        start = max(0, size - wanted)
        data = os.pread(descriptor, size - start, start)
        lines = data.rsplit(b"\n", 2)
        if len(lines) == 3 or start == 0:
            return (lines[-2] if len(lines) > 1 else None), lines[-1]
        wanted *= 2
