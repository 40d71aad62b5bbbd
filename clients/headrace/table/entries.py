"""The local copy of a table: the newest body of every key, and changes that wait for readers."""

from __future__ import annotations

from itertools import compress, repeat
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakSet

import anyio

from headrace_protocol.message import DELETE, property_text, property_value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.received import MessageBatch

# Body, or the error of reading it; store time in ms; number of the queue. A plain tuple of numbers
# and bytes: millions of them must not slow the garbage collector down.
Entry = tuple[bytes | Exception, int, int]

# The body of a deleted key.
DELETED = b""
_DELETE_NAME = DELETE.encode()
_DELETE = _DELETE_NAME + b"\x01true"


class Keyed(NamedTuple):
    """The messages of a batch that have a key, in order; the body of a delete marker is DELETED."""

    keys: list[str]
    bodies: list[bytes | Exception]
    timestamps_ms: list[int]

    @classmethod
    def of(cls, batch: MessageBatch) -> Keyed:
        """Extract keys and bodies; a damaged or unreadable body becomes its error."""
        from headrace_protocol.columns import split
        from headrace_protocol.record_keys import find_keys

        columns = batch.columns
        data = bytes(columns.data)
        # Keys have no 0x02, so many are decoded at once.
        joined = b"\x02".join(split(data, *find_keys(columns)))
        keys = property_text(joined).split("\x02")
        bodies = _bodies(batch)
        if _DELETE in data:
            for index, raw in enumerate(columns.properties()):
                if property_value(raw, _DELETE_NAME) == b"true":
                    bodies[index] = DELETED
        timestamps_ms: list[int] = columns.store_timestamp.tolist()
        if all(keys):
            return cls(keys, bodies, timestamps_ms)
        kept = (list(compress(column, keys)) for column in (keys, bodies, timestamps_ms))
        return cls(*kept)  # type: ignore[arg-type]


def _bodies(batch: MessageBatch) -> list[bytes | Exception]:
    try:
        return [*batch.values()]
    except ValueError:
        return [_body(batch, index) for index in range(len(batch))]


def _body(batch: MessageBatch, index: int) -> bytes | Exception:
    try:
        return batch[index].body
    except ValueError as error:
        return error


class Entries:
    """The newest entry of each key in all queues of a topic.

    A key that several queues have, because its writers choose queues differently, has the entry
    that was stored last.
    """

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        # Deleted keys stay in ``_entries`` while queues are loaded: an older value may follow
        # from another queue.
        self._deleted: set[str] | None = set()
        # Weak: a loop over changes that was left must not collect them for ever.
        self.waiting: WeakSet[Waiting] = WeakSet()

    def __len__(self) -> int:
        return len(self._entries) - len(self._deleted or ())

    def get(self, key: str) -> bytes | Exception | None:
        """The body of a key, or the error of reading it; None without the key."""
        entry = self._entries.get(key)
        return entry[0] if entry and entry[0] != DELETED else None

    def items(self) -> Iterator[tuple[str, bytes | Exception]]:
        """Keys and bodies as they are now."""
        for key, (body, _, _) in list(self._entries.items()):
            if body != DELETED:
                yield key, body

    def apply(self, queue_number: int, messages: Keyed) -> None:
        """Add the next messages of a queue."""
        keys, bodies, timestamps_ms = messages
        newest: dict[str, Entry] = dict(
            zip(keys, zip(bodies, timestamps_ms, repeat(queue_number)), strict=False)
        )
        for key in newest.keys() & self._entries.keys():
            _, stored_ms, number = self._entries[key]
            if number != queue_number and stored_ms > newest[key][1]:  # newer in another queue
                del newest[key]
        self._entries.update(newest)
        self._note_deleted(newest, has_deleted=DELETED in bodies)
        for waiting in self.waiting:
            waiting.add(newest)

    def _note_deleted(self, newest: dict[str, Entry], *, has_deleted: bool) -> None:
        if self._deleted:
            self._deleted.difference_update(newest)
        if not has_deleted:
            return
        deleted = [key for key, entry in newest.items() if entry[0] == DELETED]
        if self._deleted is None:
            for key in deleted:
                del self._entries[key]
        else:
            self._deleted.update(deleted)

    def forget_deleted(self) -> None:
        """Drop deleted keys, now and from now on: all queues are loaded."""
        for key in self._deleted or ():
            del self._entries[key]
        self._deleted = None

    def drop_queue(self, queue_number: int) -> None:
        """Remove the entries of a queue that begins anew: its topic was created again."""
        for key, entry in list(self._entries.items()):
            if entry[2] == queue_number:
                del self._entries[key]
                if self._deleted:
                    self._deleted.discard(key)


class Waiting:
    """Changes for one reader; a slow reader gets only the newest one of each key."""

    def __init__(self) -> None:
        self._changes: dict[str, Entry] = {}
        self._added = anyio.Event()

    def add(self, newest: dict[str, Entry]) -> None:
        """Add changes, behind those that wait already."""
        for key in newest:
            self._changes.pop(key, None)
        self._changes.update(newest)
        self._added.set()

    async def next(self) -> tuple[str, Entry]:
        """The next change, as soon as there is one."""
        while not self._changes:
            self._added = anyio.Event()
            await self._added.wait()
        key = next(iter(self._changes))
        return key, self._changes.pop(key)
