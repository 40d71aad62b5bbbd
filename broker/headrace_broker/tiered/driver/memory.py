"""A driver that keeps everything in memory: for tests, and to try the tier without a folder."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from headrace_protocol.tier.driver import Entry, Failure, FailureKind, short_read

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_protocol.tier.driver import Buffer, Range


class _Stored(NamedTuple):
    data: bytearray
    etag: str


class MemoryDriver:
    """Files that grow and objects that are replaced, in one dictionary."""

    def __init__(self) -> None:
        self.stored: dict[str, _Stored] = {}
        self._write_count = 0
        self._lock = Lock()

    def read(self, path: str, ranges: Sequence[Range]) -> list[Buffer] | Failure:
        """As ``Driver.read``."""
        assert all(start < end for start, end in ranges), "object stores refuse empty ranges"
        with self._lock:
            stored = self.stored.get(path)
            if stored is None:
                return _missing(path)
            found: list[Buffer] = [bytes(stored.data[start:end]) for start, end in ranges]
        for wanted, data in zip(ranges, found, strict=True):
            if len(data) < wanted[1] - wanted[0]:
                return short_read(path, wanted, len(data))
        return found

    def size(self, path: str) -> int | Failure:
        """As ``Driver.size``."""
        stored = self.stored.get(path)
        return _missing(path) if stored is None else len(stored.data)

    def entries(self, folder: str) -> list[Entry] | Failure:
        """As ``Driver.entries``."""
        with self._lock:
            inside = [item for item in self.stored.items() if item[0].startswith(f"{folder}/")]
        return sorted(Entry(path, len(stored.data)) for path, stored in inside)

    def delete(self, paths: Sequence[str]) -> Failure | None:
        """As ``Driver.delete``."""
        with self._lock:
            for path in paths:
                self.stored.pop(path, None)
        return None

    def append(self, path: str, position: int, data: Buffer) -> Failure | None:
        """As ``AppendDriver.append``."""
        with self._lock:
            stored = self.stored.get(path)
            if stored is None:
                if position:
                    return _missing(path)
                stored = self.stored[path] = _Stored(bytearray(), self._next_etag())
            if len(stored.data) != position:
                reason = f"has {len(stored.data)} bytes instead of {position}"
                return Failure(FailureKind.CHANGED, path, reason)
            stored.data.extend(data)
        return None

    def cut(self, path: str, size: int) -> Failure | None:
        """As ``AppendDriver.cut``."""
        with self._lock:
            stored = self.stored.get(path)
            if stored is None:
                return _missing(path)
            if len(stored.data) < size:
                return short_read(path, (0, size), len(stored.data))
            del stored.data[size:]
        return None

    def rewrite(self, path: str, start: int) -> Failure | None:
        """As ``AppendDriver.rewrite``."""
        size = self.size(path)
        if isinstance(size, Failure):
            return size
        return short_read(path, (0, start), size) if size < start else None

    def put(self, path: str, data: Buffer, replaces: str = "") -> str | Failure:
        """As ``PutDriver.put``."""
        with self._lock:
            stored = self.stored.get(path)
            if (stored.etag if stored else "") != replaces:
                kind = FailureKind.CHANGED if replaces else FailureKind.EXISTS
                return Failure(kind, path, "was written by another")
            etag = self._next_etag()
            self.stored[path] = _Stored(bytearray(data), etag)
        return etag

    def etag(self, path: str) -> str | Failure:
        """As ``PutDriver.etag``."""
        stored = self.stored.get(path)
        return _missing(path) if stored is None else stored.etag

    def _next_etag(self) -> str:
        self._write_count += 1
        return str(self._write_count)


def _missing(path: str) -> Failure:
    return Failure(FailureKind.MISSING, path, "is not there")
