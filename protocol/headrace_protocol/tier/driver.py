"""The interface of all drivers, and the failures that they return.

A path is relative and has ``/`` between its parts. All methods may block, so they run in threads; a
driver may be used by several threads at once. What a driver can't do or find is a returned
``Failure``, never an exception, so a caller can't overlook it.
"""

from __future__ import annotations

import enum
from functools import wraps
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# More than an append has, so that an append that failed is rewritten as a whole.
REWRITTEN_BYTES_MAX: Final = 64 << 20

Buffer = bytes | bytearray | memoryview
Range = tuple[int, int]
A = ParamSpec("A")
K = TypeVar("K")
T = TypeVar("T")


class FailureKind(enum.Enum):
    """The kinds of failures; only ``UNREACHABLE`` is worth a retry as it is.

    DAMAGED: bytes are there, and are not those that were written; no driver returns it.
    """

    MISSING = "missing"
    EXISTS = "exists"
    CHANGED = "changed"
    SHORT = "short"
    DAMAGED = "damaged"
    UNREACHABLE = "unreachable"


class Failure(NamedTuple):
    """A failed operation. reason: a sentence for logs; it never has a secret in it."""

    kind: FailureKind
    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class Failed(Exception):
    """An operation has failed, in a function that ``returns_failure`` decorates."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


def expect(found: T | Failure) -> T:
    """The result of an operation. Raises Failed."""
    if isinstance(found, Failure):
        raise Failed(found)
    return found


def returns_failure(operate: Callable[A, T]) -> Callable[A, T | Failure]:
    """Have a function return the failure at which ``expect`` ends it."""

    @wraps(operate)
    def guarded(*args: A.args, **kwargs: A.kwargs) -> T | Failure:
        try:
            return operate(*args, **kwargs)
        except Failed as failed:
            return failed.failure

    return guarded


class Entry(NamedTuple):
    """A stored file or object."""

    path: str
    size: int


class Readable(Protocol):
    """A driver as readers need it."""

    def read(self, path: str, /, ranges: Sequence[Range]) -> list[Buffer] | Failure:
        """The bytes of each range ``(start, end)``, all of them.

        ranges: none is empty. Fails with MISSING, UNREACHABLE, and SHORT if there are fewer bytes.
        """

    def size(self, path: str, /) -> int | Failure:
        """Bytes stored at a path. Fails with MISSING, UNREACHABLE."""

    def entries(self, folder: str, /) -> list[Entry] | Failure:
        """All that is stored below a folder, sorted by path; empty if there is no such folder.

        Fails with UNREACHABLE.
        """


class Driver(Readable, Protocol):
    """A driver as the broker needs it."""

    def delete(self, paths: Sequence[str], /) -> Failure | None:
        """Delete what is there; a missing path is no failure. Fails with UNREACHABLE."""


class AppendDriver(Driver, Protocol):
    """A driver of files that grow, as a file system's."""

    def append(self, path: str, /, position: int, data: Buffer) -> Failure | None:
        """Write at the end; the bytes are durable when this returns.

        position: the expected size; 0 creates the file. After UNREACHABLE a part of ``data`` may
        be there. Fails with CHANGED if the size is another, MISSING, UNREACHABLE.
        """

    def cut(self, path: str, /, size: int) -> Failure | None:
        """Discard all bytes from ``size`` on; those before are durable when this returns.

        Fails with MISSING, SHORT, UNREACHABLE.
        """

    def rewrite(self, path: str, /, start: int) -> Failure | None:
        """Write all bytes from ``start`` on once more; all are durable when this returns.

        After a write that failed, a sync may succeed without them: they are in memory as if they
        were on disk. Fails with MISSING, SHORT, UNREACHABLE.
        """


class PutDriver(Driver, Protocol):
    """A driver of objects that are written whole."""

    def put(self, path: str, /, data: Buffer, replaces: str = "") -> str | Failure:
        """Store a whole object and return its etag; it is durable when this returns.

        replaces: the etag of the object to replace; "" creates a new one. After UNREACHABLE the
        object may be there nevertheless. Fails with EXISTS, CHANGED, UNREACHABLE.
        """

    def etag(self, path: str, /) -> str | Failure:
        """The etag of an object. Fails with MISSING, UNREACHABLE."""


@returns_failure
def read_whole(driver: Readable, path: str, bytes_max: int) -> Buffer:
    """A small object. Fails as ``read``, and with DAMAGED for a larger one.

    Others may write to the location as well.
    """
    size = expect(driver.size(path))
    if size > bytes_max:
        reason = f"has {size} bytes; at most {bytes_max} are read"
        raise Failed(Failure(FailureKind.DAMAGED, path, reason))
    return expect(driver.read(path, [(0, size)]))[0] if size else b""


def short_read(path: str, wanted: Range, got_bytes: int) -> Failure:
    """The failure of a range that ends behind the file, or was answered in part."""
    start, end = wanted
    return Failure(
        FailureKind.SHORT, path, f"{got_bytes} bytes at {start} instead of {end - start}"
    )


class Extent(NamedTuple, Generic[K]):
    """Bytes ``base`` to ``end`` of an address space, which begin at ``position`` in a file."""

    file: K
    base: int
    end: int
    position: int


@returns_failure
def read_extents(
    ranges: Sequence[Range],
    find: Callable[[int], Extent[K] | Failure],
    read: Callable[[K, list[Range]], list[Buffer] | Failure],
) -> list[Buffer]:
    """Ranges of an address space that lies in several files, each of which is read once.

    find: the extent that has a byte. read: ranges of a file. Fails as these.
    """
    asked: dict[K, list[Range]] = {}
    owners: list[list[tuple[K, int]]] = []
    for start, end in ranges:
        owner: list[tuple[K, int]] = []
        at = start
        while at < end:
            extent = expect(find(at))
            upto, moved = min(end, extent.end), extent.position - extent.base
            wanted = asked.setdefault(extent.file, [])
            owner.append((extent.file, len(wanted)))
            wanted.append((at + moved, upto + moved))
            at = upto
        owners.append(owner)
    found = {file: expect(read(file, wanted)) for file, wanted in asked.items()}
    parts = [[found[file][number] for file, number in owner] for owner in owners]
    return [part[0] if len(part) == 1 else b"".join(part) for part in parts]
