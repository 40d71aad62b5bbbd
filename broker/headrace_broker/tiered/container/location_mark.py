"""The mark of a tier's folder or bucket, which tells it from an empty one behind the same name.

Without it a folder below an unmounted file system would look like an empty tier. The mark is a
small file beside the queues, with a random id. The store has a copy of it. What always holds:

1. The folder is made, and the location marked, once: when neither it nor the store has a mark.
2. Nothing is written unless the location has the store's mark, and on the file system that had it:
   a folder may be unmounted between the look and the write.
3. A missing file is believed only of a location with the mark. Any other is away, and may return.
"""

from __future__ import annotations

import secrets
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, Final

import msgspec

from headrace_protocol.tier.driver import (
    Failed,
    Failure,
    FailureKind,
    expect,
    read_whole,
    returns_failure,
)
from headrace_protocol.tier.operations import Operation, Wrapped

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import TypeVar

    from headrace_broker.store.files.config_file import ConfigFile
    from headrace_broker.store.files.filesystem import Files
    from headrace_protocol.tier.driver import Driver
    from headrace_protocol.tier.paths import Home
    from headrace_protocol.tier.time_limits import TimeLimits

    T = TypeVar("T")

MARK_FILE: Final = "tieredPlace.json"
_ID_BYTES: Final = 8
# Failures that another location behind the same name may explain.
_DOUBTFUL: Final = {
    FailureKind.MISSING,
    FailureKind.SHORT,
    FailureKind.CHANGED,
    FailureKind.EXISTS,
}


class Mark(msgspec.Struct, frozen=True):
    """The owner of a tier. id: of the tier itself."""

    cluster: str
    broker: str
    id: str


# Two names of at most some hundred bytes each, and an id.
_MARK_BYTES_MAX = 16 * 1024


def mark_path(home: Home) -> str:
    """The path of a broker's mark, beside its queues."""
    return f"{home.folder}/place.json"


@returns_failure
def read_mark(driver: Driver, home: Home) -> bytes:
    """The mark in a location. Fails with MISSING, UNREACHABLE, DAMAGED."""
    path = mark_path(home)
    text = bytes(expect(read_whole(driver, path, _MARK_BYTES_MAX)))
    try:
        mark = msgspec.json.decode(text, type=Mark)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        reason = f"is no mark of a tier: {error}"
        raise Failed(Failure(FailureKind.DAMAGED, path, reason)) from None
    if (mark.cluster, mark.broker) != home:
        reason = f"is the mark of {mark.broker} of {mark.cluster}"
        raise Failed(Failure(FailureKind.DAMAGED, path, reason))
    return text


def mark_text(text: bytes, home: Home) -> bytes:
    """The same mark for another home."""
    mark = msgspec.json.decode(text, type=Mark)
    return msgspec.json.encode(Mark(*home, mark.id))


class Folder:
    """A folder that may be unmounted."""

    def __init__(self, root: Path, files: Files) -> None:
        self.root = root
        self._files = files

    def make(self) -> None:
        """Create it. Raises OSError."""
        self._files.make_directories(self.root)

    def device(self) -> int:
        """The number of its file system. Raises OSError."""
        return self.root.stat().st_dev


class LocationMark:
    """Looks for the mark of one location.

    problem: found by the last look; "" for the mark. folder: None for a bucket.
    """

    def __init__(
        self,
        open_driver: Callable[[], Wrapped],
        limits: TimeLimits,
        home: Home,
        file: ConfigFile,
        folder: Folder | None,
        has_content: Callable[[], bool],
    ) -> None:
        """open_driver: of the location, unmarked. file: the copy of the store.

        has_content: True if the store knows of messages there, though it has no copy of the mark.
        """
        self.problem = ""
        self.folder = folder
        self._open_driver = open_driver
        self._limits = limits
        self._home = home
        self._path = mark_path(home)
        self._file = file
        self._has_content = has_content
        self._lock = Lock()
        self._text: bytes | None = None
        self._device = 0
        self._problem_s = 0.0

    @property
    def problem_seconds(self) -> float:
        """Seconds for which the mark has been missing; 0 if the last look found it."""
        return monotonic() - self._problem_s if self.problem else 0.0

    def check(self) -> Failure | None:
        """Look for the mark; the first look makes it. Fails with UNREACHABLE.

        Raises OSError, and the first time as ``open_driver``.
        """
        with self._lock:
            failure = self._claim() if self._text is None else None
            failure = failure or self._look()
            if failure is not None and not self.problem:
                self._problem_s = monotonic()
            self.problem = str(failure or "")
            return failure

    @returns_failure
    def check_device(self) -> None:
        """Fail with UNREACHABLE if the folder is on another file system than at the last look."""
        if expect(self._device_now()) != self._device:
            raise Failed(self._away("its file system was changed"))

    @returns_failure
    def _look(self) -> None:
        assert self._text is not None
        device = expect(self._device_now())
        read = self._open_driver().read(self._path, [(0, len(self._text))])
        if isinstance(read, Failure) and read.kind is not FailureKind.UNREACHABLE:
            raise Failed(self._away("it is not there"))
        if bytes(expect(read)[0]) != self._text:
            raise Failed(self._away("it is that of another tier"))
        self._device = device

    def _claim(self) -> Failure | None:
        """Find out the mark that the location must have."""
        text = self._file.load()
        if text is None:
            found = read_mark(self._open_driver(), self._home)
            if isinstance(found, Failure):
                is_there = not isinstance(self._device_now(), Failure)
                is_new = found.kind is FailureKind.MISSING or not is_there
                found = self._make() if is_new else found
            if isinstance(found, Failure):
                return found._replace(kind=FailureKind.UNREACHABLE)
            text = found
            self._file.save(text)
        self._text = text
        return None

    @returns_failure
    def _make(self) -> bytes:
        if self._has_content():
            entries = self._open_driver().entries(self._home.folder)
            if isinstance(entries, Failure) or not entries:
                reason = "the store has messages in this tier, and it has none"
                raise Failed(self._away(reason))
        if self.folder is not None:
            expect(self._limits.run(Operation("write", self._path), self.folder.make))
        mark = Mark(*self._home, secrets.token_hex(_ID_BYTES))
        text = msgspec.json.encode(mark)
        expect(self._open_driver().put(self._path, text))
        return text

    def _device_now(self) -> int | Failure:
        """The file system of a folder; 0 for a bucket."""
        folder = self.folder
        if folder is None:
            return 0

        def device() -> int | Failure:
            try:
                return folder.device()
            except OSError as error:
                return self._away(str(error))

        return self._limits.run(Operation("size", self._path), device)

    def _away(self, reason: str) -> Failure:
        where = "the bucket" if self.folder is None else self.folder.root
        return Failure(
            FailureKind.UNREACHABLE,
            self._path,
            f"{where} lacks the mark of this broker's tier ({reason}): mount its file system, or "
            "set its own folder or bucket. Nothing is written there. To begin an empty tier, stop "
            f"the broker and remove {self._file.path} and its .bak",
        )


class Marked(Wrapped):
    """A driver that fails with UNREACHABLE while its location lacks the mark."""

    def __init__(self, driver: Wrapped, mark: LocationMark) -> None:
        super().__init__(driver)
        self._mark = mark

    def _run(self, operation: Operation, operate: Callable[[], T]) -> T | Failure:
        if operation.name == "list":
            found = operate()
            return found if isinstance(found, Failure) else self._mark.check() or found
        if not operation.changes:
            return self._believed(operate())
        # An object to replace is in the right location.
        failure = None if operation.replaces else self._mark.check()
        if failure is not None:
            return failure
        result = self._believed(operate())
        return result if isinstance(result, Failure) else self._mark.check_device() or result

    def _believed(self, result: T) -> T | Failure:
        """The result; UNREACHABLE for a failure that a missing mark explains."""
        is_doubtful = isinstance(result, Failure) and result.kind in _DOUBTFUL
        return (self._mark.check() if is_doubtful else None) or result
