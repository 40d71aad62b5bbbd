"""The log of pops: files of frames, each the events of one turn.

A frame is its length, its CRC and as MSGPACK an array: where the CommitLog ended, then the events.
Zeros follow the last frame. Files
are allocated before they are needed, so that no frame finds the disk full. The log holds what its
files say of the queues and checkpoints that are still kept: what the oldest file alone says of them
is written again, little by little, until that file can go. So the log stays within a small multiple
of what is out, and no turn writes all of it.

Source: docs/store-format.md "pop"; tests/broker/pop/test_pop_log.py.
"""

from __future__ import annotations

import struct
from collections import deque
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Final

import msgspec
from zlib_ng.zlib_ng import crc32

from headrace_broker.pop.events import Event, Kind, checkpoint_event, queue_event
from headrace_broker.pop.pop_queue import PopQueue
from headrace_broker.store.errors import StoreFormatError
from headrace_broker.store.files.filesystem import read_file
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError, reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from pathlib import Path

    from headrace_broker.pop.pop_queue import Checkpoint
    from headrace_broker.store.files.filesystem import Files

    Entry = PopQueue | Checkpoint

FILE_BYTES: Final = 4 << 20
_MAGIC: Final = b"HRPOP\0\0\1"
_FRAME: Final = struct.Struct(">II")
# Share of a file that the requests of a turn may fill.
_TURN_SHARE: Final = 8
# What an entry takes, roughly; the files may take as much again, and these besides.
_ENTRY_BYTES: Final = 64
_SPARE_FILES: Final = 4
_MOVED_MIN: Final = 8
_DIGITS: Final = 20
_SNAPSHOT_EVENTS: Final = 4096
# Approximate maximum that a start reads of the CommitLog.
_LOG_BYTES_MAX: Final = 64 << 20


class PopsNotWritable(RequestError):
    """What is popped can't be written now; a request is refused, and may be sent again."""


class _Segment:
    """A file. live: the entries that no later file describes. end: of its frames."""

    __slots__ = ("descriptor", "end", "live", "number", "path")

    def __init__(self, number: int, path: Path, descriptor: int) -> None:
        self.number = number
        self.path = path
        self.descriptor = descriptor
        self.end = len(_MAGIC)
        self.live: dict[Entry, None] = {}


class PopLog:
    """Writes events in the loop's thread; ``flush`` may run in another.

    written: bytes of frames so far. flushed: how many of them are on disk. log_end: where the
    CommitLog ended at the last frame; a start reads it from there. problem: why the last write has
    failed; "" if it has not.
    """

    def __init__(
        self, folder: Path, files: Files, log_end: Callable[[], int], file_bytes: int
    ) -> None:
        """log_end: where the CommitLog ends now."""
        self.folder = folder
        self._files = files
        self._file_bytes = file_bytes
        self._segments: deque[_Segment] = deque()
        self._spare: _Segment | None = None
        self._events: list[Event] = []
        self._kept: dict[Entry, None] = {}
        self._live_count = 0
        self._dirty: list[_Segment] = []
        self._encode = msgspec.msgpack.Encoder().encode
        # Files of earlier starts, until the first write replaces them.
        self._old: deque[Path] = deque()
        self._first_number = 0
        self.problem = ""
        self.written = self.flushed = self.log_end = 0
        self._log_end_now = log_end

    # -- events ------------------------------------------------------------------------------------

    @property
    def is_pending(self) -> bool:
        """True if ``write_out`` has something to do."""
        return bool(self._events or self._old)

    def note(self, event: Event) -> None:
        """See ``EventLog``."""
        self._events.append(event)

    def keep(self, entry: Entry) -> None:
        """See ``EventLog``."""
        self._kept[entry] = None

    def drop(self, entry: Entry) -> None:
        """See ``EventLog``."""
        self._kept.pop(entry, None)
        if (segment := self._segment_of(entry)) is not None:
            del segment.live[entry]
            self._live_count -= 1
            entry.segment = -1

    def _segment_of(self, entry: Entry) -> _Segment | None:
        if entry.segment < 0 or not self._segments:
            return None
        return self._segments[entry.segment - self._segments[0].number]

    # -- writing -----------------------------------------------------------------------------------

    def check_room(self) -> None:
        """Raise PopsNotWritable unless the events of a turn can be written."""
        if problem := self.problem or self._room_problem():
            raise PopsNotWritable(
                ResponseCode.SERVICE_NOT_AVAILABLE,
                f"what is popped can't be written to {self.folder}: {problem}; "
                "free space on the disk, or mend it",
            )

    def _room_problem(self) -> str:
        """Why a turn that fills much of a file would find no room; "" if there is room."""
        if self._segments and self._room >= self._file_bytes // _TURN_SHARE:
            return ""
        try:
            self._prepare()
        except OSError as error:
            return reason_of(error)
        return ""

    @property
    def _room(self) -> int:
        return self._file_bytes - self._segments[-1].end

    def _prepare(self) -> None:
        if self._spare is None:
            self._spare = self._new_segment()

    def _new_segment(self) -> _Segment:
        files, folder = self._files, self.folder
        if not folder.exists():
            files.make_directories(folder)
        number = self._segments[-1].number + 1 if self._segments else self._first_number
        path = self._path(number)
        descriptor = files.create(path)
        try:
            files.allocate(descriptor, 0, self._file_bytes)
            files.write(descriptor, _MAGIC, 0)
        except OSError:
            files.close(descriptor)
            with suppress(OSError):
                files.unlink(path)
            raise
        return _Segment(number, path, descriptor)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:0{_DIGITS}}"

    def write_out(self) -> None:
        """Write the events so far, and how far a start need not read the CommitLog.

        Raises OSError; they are written next time then.
        The first write after ``read`` replaces all files, by one that has what is kept.
        """
        try:
            if self._old:
                self._begin_anew()
            elif self._events:
                self._write_events()
            elif self._is_far_behind:
                self._write([])
        except OSError as error:
            self.problem = reason_of(error)
            raise
        self.problem = ""

    def _write_events(self) -> None:
        """One frame."""
        moved = self._old_entries()
        self._write([*self._events, *map(_event_of, moved)])
        self._events = []
        self._kept |= moved
        self._place_kept()

    @property
    def _is_far_behind(self) -> bool:
        """True if the CommitLog has grown much since the last frame, which names its end."""
        return bool(self._segments) and self._log_end_now() - self.log_end >= _LOG_BYTES_MAX

    def _write(self, events: list[Event]) -> None:
        log_end = self._log_end_now()
        frame = self._frame(log_end, events)
        if not self._segments or len(frame) > self._room:
            self._begin_file()
        self._append(frame)
        self.log_end = log_end

    def _frame(self, log_end: int, events: list[Event]) -> bytes:
        body = self._encode([log_end, *events])
        return _FRAME.pack(len(body), crc32(body)) + body

    def _begin_file(self) -> None:
        self._prepare()
        assert self._spare is not None
        self._segments.append(self._spare)
        self._spare = None

    def _append(self, frame: bytes) -> None:
        segment = self._segments[-1]
        self._files.write(segment.descriptor, frame, segment.end)
        segment.end += len(frame)
        self.written += len(frame)
        if segment not in self._dirty:
            self._dirty.append(segment)

    def _place_kept(self) -> None:
        segment = self._segments[-1]
        kept, self._kept = self._kept, {}
        for entry in kept:
            if (before := self._segment_of(entry)) is not None:
                del before.live[entry]
            else:
                self._live_count += 1
            entry.segment = segment.number
        segment.live.update(kept)

    def _old_entries(self) -> dict[Entry, None]:
        """What only the oldest file says and is to be written again, if the files are too many."""
        allowed = _SPARE_FILES + 2 * self._live_count * _ENTRY_BYTES // self._file_bytes
        if len(self._segments) <= allowed:
            return {}
        oldest = islice(self._segments[0].live, _MOVED_MIN + len(self._events))
        return {entry: None for entry in oldest if entry not in self._kept}

    # -- the disk ----------------------------------------------------------------------------------

    def start_flush(self) -> Callable[[], None]:
        """A function for any thread that brings all frames so far to disk.

        It also removes the old files of which nothing is kept, once what was written again is on
        disk. It raises OSError; ``note_flushed`` follows.
        """
        dirty, self._dirty = self._dirty, []
        gone = []
        while len(self._segments) > 1 and not self._segments[0].live:
            gone.append(self._segments.popleft())
        files = self._files

        def flush() -> None:
            for segment in dirty:
                files.fdatasync(segment.descriptor)
            files.sync_names()
            for segment in gone:
                files.close(segment.descriptor)
                files.unlink(segment.path)

        return flush

    def note_flushed(self, written: int) -> None:
        """Note that as many bytes are on disk."""
        self.flushed = max(self.flushed, written)

    # -- start and stop ----------------------------------------------------------------------------

    def read(self) -> Iterator[Event]:
        """The events of all files in order, up to the first frame that is torn.

        A file that a start has written follows nevertheless: it replaces those before it, which a
        kill may have left there.

        Raises StoreFormatError for a file that is not one of the log, OSError.
        """
        self._old = deque(self._paths())
        self._first_number = int(self._old[-1].name) + 1 if self._old else 0
        is_whole = True
        for path in self._old:
            data = read_file(path)
            # A power cut may have kept a part of it.
            if any(byte not in {0, of_magic} for byte, of_magic in zip(data, _MAGIC, strict=False)):
                raise StoreFormatError(path, "is no log of pops", "move it out of the store folder")
            if is_whole or _is_anew(data):
                end = yield from self._read_file(data)
                is_whole = _is_end(data, end)

    def _read_file(self, data: bytes) -> Generator[Event, None, int]:
        frames = _frames_of(data)
        while True:
            try:
                self.log_end, events = next(frames)
            except StopIteration as stop:
                end: int = stop.value
                return end
            yield from events

    def _paths(self) -> list[Path]:
        if not self.folder.exists():
            return []
        return sorted(path for path in self.folder.iterdir() if path.name.isdigit())

    def _begin_anew(self) -> None:
        """Write what was noted and kept to one file of any size, then remove the old ones.

        Raises OSError; the old files have it until all is on disk.
        """
        self._segments.append(self._replacement())
        self._events = []
        self._place_kept()
        while self._old:
            self._files.unlink(self._old[0])
            self._old.popleft()
        self._files.sync_names()

    def _replacement(self) -> _Segment:
        """A file of what was noted, whole or not there, which takes no more. Raises OSError."""
        self.log_end = self._log_end_now()
        events = [(Kind.ANEW, 0), *self._events]
        frames = [
            self._frame(self.log_end, events[start : start + _SNAPSHOT_EVENTS])
            for start in range(0, len(events), _SNAPSHOT_EVENTS)
        ]
        path = self._path(self._first_number)
        self._files.replace(path, [_MAGIC, *frames])
        segment = _Segment(self._first_number, path, self._files.open(path))
        segment.end = self._file_bytes
        return segment

    def close(self) -> None:
        """Let go of the files."""
        spare = [self._spare] if self._spare else []
        for segment in (*self._segments, *spare):
            with suppress(OSError):
                self._files.close(segment.descriptor)
        self._segments.clear()
        self._spare = None


def _event_of(entry: Entry) -> Event:
    return queue_event(entry) if isinstance(entry, PopQueue) else checkpoint_event(entry)


def _frames_of(data: bytes) -> Generator[tuple[int, list[Event]], None, int]:
    """The frames of a file; returns where the last whole one ends."""
    position = len(_MAGIC)
    while position + _FRAME.size <= len(data):
        size, crc = _FRAME.unpack_from(data, position)
        body = data[position + _FRAME.size : position + _FRAME.size + size]
        if not size or len(body) < size or crc32(body) != crc:
            break
        log_end, *events = msgspec.msgpack.decode(body)
        yield log_end, events
        position += _FRAME.size + size
    return position


def _is_anew(data: bytes) -> bool:
    """True if a start has written the file, so that nothing before it counts."""
    _, events = next(_frames_of(data), (0, []))
    return bool(events) and events[0][0] == Kind.ANEW


def _is_end(data: bytes, position: int) -> bool:
    """True if nothing follows, so that the next file continues."""
    return not any(data[position : position + _FRAME.size])
