"""A small table that is changed on disk first, then in force.

Changes wait in a row. A thread makes all that wait, writes the file once, and the loop then puts
them in force in the same order, before any of their requests is answered.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, Protocol, TypeVar

from headrace_protocol.codes import ResponseCode
from headrace_protocol.drivers.files import file_stamp, replace_file
from headrace_protocol.errors import Lane, RequestError, reason_of
from headrace_protocol.waiting import fetch

if TYPE_CHECKING:
    from pathlib import Path

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

# One thread is enough: a save writes all changes that wait.
_SAVES: Final = Lane("saved tables", threads=1, outlives_client=True)


class Edit(NamedTuple, Generic[Key, Value]):
    """A key's new value; None removes the key."""

    key: Key
    value: Value | None


# Returns the edit that a change amounts to; None for no change. Raises the error of its request.
Change = Callable[[Mapping[Key, Value]], Edit[Key, Value] | None]


class _Pending(NamedTuple, Generic[Key, Value]):
    change: Change[Key, Value]
    done: Future[None]


class TableFile(Protocol):
    """The file of a small table, whole or not at all; the broker's ``ConfigFile`` is one."""

    path: Path

    def read(self, parse: Callable[[bytes], Value]) -> Value | None:
        """The parsed file; None without one. Raises what ``parse`` does, and OSError."""

    def save(self, data: bytes) -> None:
        """Replace the file. Raises OSError."""


class PlainFile:
    """The file of a table at a daemon that has no store."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, parse: Callable[[bytes], Value]) -> Value | None:
        """See TableFile."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None
        return parse(data)

    def save(self, data: bytes) -> None:
        """See TableFile."""
        replace_file(self.path, data)


class SavedTable(Generic[Key, Value]):
    """The entries of a file, which no other program may change. path: None keeps them in memory."""

    def __init__(self, path: Path | None, entries: dict[Key, Value]) -> None:
        """entries: as loaded from the file; put in force at once."""
        self.path = path
        self._stamp = None if path is None else file_stamp(path)
        self._saved = entries
        self._pending: deque[_Pending[Key, Value]] = deque()
        self._edits: deque[Edit[Key, Value]] = deque()
        self._saving = threading.Lock()
        for key, value in entries.items():
            self._put(key, value)

    def _write(self, entries: Mapping[Key, Value]) -> None:
        """Replace the file, in any thread. Raises OSError."""
        raise NotImplementedError

    def _put(self, key: Key, value: Value | None) -> None:
        """Put an edit in force, in the thread of the loop."""
        raise NotImplementedError

    async def change(self, change: Change[Key, Value]) -> None:
        """Make a change; it is on disk and in force when this returns. Raises RequestError."""
        pending = self._begin(change)
        if self.path is None:
            self._save()
        else:
            await fetch(self._save, _SAVES)
        self._put_in_force()
        pending.done.result()

    def change_now(self, change: Change[Key, Value]) -> None:
        """As ``change``, in this thread. Raises RequestError."""
        pending = self._begin(change)
        self._save()
        self._put_in_force()
        pending.done.result()

    def _begin(self, change: Change[Key, Value]) -> _Pending[Key, Value]:
        pending = _Pending(change, Future())
        self._pending.append(pending)
        return pending

    def _save(self) -> None:
        """Make all changes that wait, in any thread."""
        with self._saving:
            waiting = [self._pending.popleft() for _ in range(len(self._pending))]
            entries = dict(self._saved)
            edits, accepted = _make(waiting, entries)
            problem = self._problem(entries) if edits else None
            if problem is None:
                self._saved = entries
                self._edits += edits
        for done in accepted:
            if problem is None:
                done.set_result(None)
            else:
                done.set_exception(problem)

    def _problem(self, entries: Mapping[Key, Value]) -> Exception | None:
        """Write the file; return the error that prevented it, if any."""
        if self.path is None:
            return None
        try:
            self._replace(self.path, entries)
        except OSError as error:
            return RequestError(
                ResponseCode.SERVICE_NOT_AVAILABLE,
                f"the change is not in force, since {self.path} can't be written: "
                f"{reason_of(error)}",
            )
        except Exception as error:  # noqa: BLE001 - raised where the request is served
            return error
        return None

    def _replace(self, path: Path, entries: Mapping[Key, Value]) -> None:
        """Write the file, unless another program has. Raises OSError."""
        if file_stamp(path) != self._stamp:
            raise OSError("another program has changed it: restart this daemon")
        try:
            self._write(entries)
        finally:
            self._stamp = file_stamp(path)

    def _put_in_force(self) -> None:
        while self._edits:
            self._put(*self._edits.popleft())


def _make(
    waiting: list[_Pending[Key, Value]], entries: dict[Key, Value]
) -> tuple[list[Edit[Key, Value]], list[Future[None]]]:
    """Make changes of ``entries``; returns the edits, and the futures of what was accepted."""
    edits: list[Edit[Key, Value]] = []
    accepted: list[Future[None]] = []
    for change, done in waiting:
        try:
            edit = change(entries)
        except Exception as error:  # noqa: BLE001 - raised where the request is served
            done.set_exception(error)
            continue
        accepted.append(done)
        if edit is None:
            continue
        edits.append(edit)
        if edit.value is None:
            entries.pop(edit.key, None)
        else:
            entries[edit.key] = edit.value
    return edits, accepted
