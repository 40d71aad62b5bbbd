"""Positions of readers, their speeds, and how much is read ahead for them.

A reader is known by where it continues, so each group counts, each client of a
broadcasting group, and each reader without a group.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from headrace_broker.cold.queue import Stream

# A reader's speed is that of a second, or of more until it reads again.
_SPEED_S: Final = 1.0
_CURSORS_MAX: Final = 4096
_QUEUE_CURSORS_MAX: Final = 256


class ReadCursor:
    """One reader of a stream.

    position: where it continues. seen_s: when it read last. window: messages to read from there on.
    """

    __slots__ = (
        "_speed",
        "_speed_from",
        "_speed_since_s",
        "position",
        "seen_s",
        "stream",
        "window",
    )

    def __init__(self, stream: Stream, position: int, now_s: float) -> None:
        self.stream = stream
        self.position = self._speed_from = position
        self.seen_s = self._speed_since_s = now_s
        self.window = 0
        self._speed = math.inf

    def move(self, position: int, now_s: float) -> None:
        """Continue at a position after a read."""
        if now_s - self._speed_since_s >= _SPEED_S:
            self._speed = self._measured(now_s)
            self._speed_from, self._speed_since_s = self.position, self.seen_s
        self.position, self.seen_s = position, now_s

    def wait_s(self, queue_offset: int, now_s: float) -> float:
        """The seconds until it reads a message, at its speed; infinite if it never does."""
        distance = queue_offset - self.position
        if distance <= 0:
            return 0.0
        speed = self._measured(now_s)
        return distance / speed if speed else math.inf

    def _measured(self, now_s: float) -> float:
        """Messages/s; infinite while that is unknown."""
        elapsed_s = now_s - self._speed_since_s
        if elapsed_s < _SPEED_S:
            return self._speed
        return (self.position - self._speed_from) / elapsed_s


class ReadCursors:
    """The readers by stream and position; the one that was seen longest ago is forgotten first."""

    def __init__(self) -> None:
        # Those that were seen longest ago first, also of a queue.
        self._cursors: OrderedDict[ReadCursor, None] = OrderedDict()
        self._at: defaultdict[tuple[Stream, int], list[ReadCursor]] = defaultdict(list)
        self._of_queue: defaultdict[Hashable, dict[ReadCursor, None]] = defaultdict(dict)

    def find(self, stream: Stream, position: int) -> ReadCursor | None:
        """A reader that continues at a position."""
        found = self._at.get((stream, position))
        return found[-1] if found else None

    def move(self, stream: Stream, position: int, end: int, now_s: float) -> ReadCursor:
        """Note that a reader has read from ``position`` to ``end``; returns it."""
        cursor = self.find(stream, position) or self._new(stream, position, now_s)
        self._leave(cursor)
        cursor.move(end, now_s)
        self._at[stream, end].append(cursor)
        self._cursors.move_to_end(cursor)
        cursors = self._of_queue[stream[0]]
        cursors[cursor] = cursors.pop(cursor)
        return cursor

    def expect(self, stream: Stream, position: int, count: int, now_s: float) -> None:
        """Have so many readers at a position at least."""
        for _ in range(len(self._at.get((stream, position), ())), count):
            self._new(stream, position, now_s)

    def _new(self, stream: Stream, position: int, now_s: float) -> ReadCursor:
        self._make_room(stream[0])
        cursor = ReadCursor(stream, position, now_s)
        self._cursors[cursor] = self._of_queue[stream[0]][cursor] = None
        self._at[stream, position].append(cursor)
        return cursor

    def _leave(self, cursor: ReadCursor) -> None:
        """Take a reader from its position."""
        key = cursor.stream, cursor.position
        cursors = self._at[key]
        if len(cursors) > 1:
            cursors.remove(cursor)
        else:
            del self._at[key]

    def _make_room(self, queue: Hashable) -> None:
        if len(self._cursors) >= _CURSORS_MAX:
            self._forget(next(iter(self._cursors)))
        if len(self._of_queue.get(queue, ())) >= _QUEUE_CURSORS_MAX:
            self._forget(next(iter(self._of_queue[queue])))

    def of(self, stream: Stream) -> Iterator[ReadCursor]:
        """The readers whom messages of a stream serve: those of one for all tags serve everyone."""
        queue, tags = stream
        for cursor in self._of_queue.get(queue, ()):
            if tags is None or cursor.stream == stream:
                yield cursor

    def forget(self, before_s: float) -> None:
        """Forget readers that were last seen before a time."""
        while self._cursors:
            cursor = next(iter(self._cursors))
            if cursor.seen_s >= before_s:
                return
            self._forget(cursor)

    def _forget(self, cursor: ReadCursor) -> None:
        queue = cursor.stream[0]
        self._leave(cursor)
        del self._cursors[cursor]
        del self._of_queue[queue][cursor]
        if not self._of_queue[queue]:
            del self._of_queue[queue]
