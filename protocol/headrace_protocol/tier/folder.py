"""A driver that reads files below a folder."""

from __future__ import annotations

import os
import stat
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from headrace_protocol.tier.driver import Entry, Failure, FailureKind, short_read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from headrace_protocol.tier.driver import Buffer, Range

P = ParamSpec("P")
T = TypeVar("T")
D = TypeVar("D", bound="FolderDriver")


def returning_failures(
    operate: Callable[Concatenate[D, str, P], T],
) -> Callable[Concatenate[D, str, P], T | Failure]:
    """Have a method return errors of the file system as failures of its path."""

    @wraps(operate)
    def guarded(driver: D, path: str, /, *args: P.args, **kwargs: P.kwargs) -> T | Failure:
        try:
            return operate(driver, path, *args, **kwargs)
        except FileNotFoundError as error:
            return driver.missing(path, error)
        except OSError as error:
            is_foreign = isinstance(error, ForeignPath)
            kind = FailureKind.DAMAGED if is_foreign else FailureKind.UNREACHABLE
            return Failure(kind, path, str(error))

    return guarded


class ForeignPath(OSError):
    """A path at which no tier has stored anything."""


class FolderDriver:
    """Files below a folder.

    Each operation opens its file anew, and reads at stated positions, so threads share no position
    (apache/rocketmq #10462), and a folder that was mounted again is found. Without the folder all
    operations fail with UNREACHABLE.
    """

    # A file of this name is being written.
    temporary = ".tmp"

    def __init__(self, root: Path) -> None:
        self._root = root

    def missing(self, path: str, error: OSError) -> Failure:
        """The failure of a path that does not exist; without the folder all paths are away."""
        if self._root.is_dir():
            return Failure(FailureKind.MISSING, path, str(error))
        reason = f"the folder {self._root} is not there: mount its file system"
        return Failure(FailureKind.UNREACHABLE, path, reason)

    @returning_failures
    def read(self, path: str, ranges: Sequence[Range]) -> list[Buffer] | Failure:
        """As ``Driver.read``."""
        found: list[Buffer] = []
        with self.opened(path) as descriptor:
            for start, end in ranges:
                data = read_range(descriptor, start, end)
                if len(data) < end - start:
                    return short_read(path, (start, end), len(data))
                found.append(data)
        return found

    @returning_failures
    def size(self, path: str) -> int:
        """As ``Driver.size``."""
        return (self._root / path).stat().st_size

    @returning_failures
    def entries(self, folder: str) -> list[Entry]:
        """As ``Driver.entries``; "" is the folder itself."""
        found = []
        self._root.stat()
        for parent, _, names in os.walk(self._root / folder, onerror=_raise_unless_missing):
            for name in names:
                if name != self.temporary:
                    path = Path(parent, name)
                    with suppress(FileNotFoundError):  # deleted since
                        size = path.stat().st_size
                        found.append(Entry(path.relative_to(self._root).as_posix(), size))
        return sorted(found)

    @contextmanager
    def opened(self, path: str) -> Iterator[int]:
        """The descriptor of a regular file below the folder, to read it.

        Whoever can write to the folder chooses the names that are read.
        """
        full = (self._root / path).resolve()
        if not full.is_relative_to(self._root.resolve()):
            raise ForeignPath("leads out of the tier's folder")
        descriptor = os.open(full, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ForeignPath("is no regular file")
            yield descriptor
        finally:
            os.close(descriptor)


def read_range(descriptor: int, start: int, end: int) -> bytes:
    """The bytes of a range, fewer at the end of the file; a call reads 2 GiB at most."""
    data = os.pread(descriptor, end - start, start)
    while 0 < len(data) < end - start:
        more = os.pread(descriptor, end - start - len(data), start + len(data))
        if not more:
            break
        data += more
    return data


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
