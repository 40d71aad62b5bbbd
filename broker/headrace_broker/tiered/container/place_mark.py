"""The mark of a tier's place, which tells it from an empty folder below an unmounted file system.

The mark is a small file beside the queues, with a random id. The store has a copy of it. What
always holds:

1. The place is made, and marked, once: when neither it nor the store has a mark.
2. Nothing is written unless the place has the store's mark, and on the file system that had it: a
   folder may be unmounted between the look and the write.
3. A missing file is believed only of a place with the mark. Any other is away, and may come back.
"""

from __future__ import annotations

import secrets
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import msgspec

from headrace_protocol.tier.driver import Failure, FailureKind
from headrace_protocol.tier.operations import Operation, Wrapped
from headrace_protocol.tier.paths import cluster_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import TypeVar

    from headrace_broker.store.files.config_file import ConfigFile
    from headrace_broker.store.files.filesystem import Files
    from headrace_broker.tiered.container.tier import Home
    from headrace_protocol.tier.driver import Driver, PutDriver
    from headrace_protocol.tier.time_limits import TimeLimits

    T = TypeVar("T")

PLACE_FILE: Final = "tieredPlace.json"
_ID_BYTES: Final = 8
# What may be wrong only because the place is another one.
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


# Two names of at most some hundred bytes each, and an id. Others may write to the place as well.
_MARK_BYTES_MAX = 16 * 1024


def mark_path(home: Home) -> str:
    """The path of a broker's mark, beside its queues."""
    return f"{cluster_folder(home.cluster)}/{home.broker}/place.json"


def read_mark(driver: Driver, home: Home) -> bytes | Failure:
    """The mark in a place. Fails with MISSING, UNREACHABLE, DAMAGED."""
    path = mark_path(home)
    size = driver.size(path)
    if isinstance(size, Failure):
        return size
    if size > _MARK_BYTES_MAX:
        return Failure(FailureKind.DAMAGED, path, f"has {size} bytes: too large for a mark")
    read = driver.read(path, [(0, size)]) if size else [b""]
    if isinstance(read, Failure):
        return read
    text = bytes(read[0])
    try:
        mark = msgspec.json.decode(text, type=Mark)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return Failure(FailureKind.DAMAGED, path, f"is no mark of a tier: {error}")
    if (mark.cluster, mark.broker) != home:
        reason = f"is the mark of {mark.broker} of {mark.cluster}"
        return Failure(FailureKind.DAMAGED, path, reason)
    return text


def mark_text(text: bytes, home: Home) -> bytes:
    """The same mark for another home."""
    mark = msgspec.json.decode(text, type=Mark)
    return msgspec.json.encode(Mark(*home, mark.id))


class PlaceMark:
    """Looks for the mark of one place. problem: what the last look found, "" for the mark."""

    def __init__(
        self,
        open_driver: Callable[[], PutDriver],
        home: Home,
        file: ConfigFile,
        limits: TimeLimits,
        *,
        root: Path | None,
        files: Files,
        has_content: Callable[[], bool] = lambda: False,
    ) -> None:
        """open_driver: of the place, unmarked. file: the copy of the store. root: of a folder.

        Raises what ``open_driver`` does at the first look.

        has_content: whether the store knows of messages there, though it has no copy of the mark.
        """
        self.problem = ""
        self._open_driver = open_driver
        self._opened: PutDriver | None = None
        self._home = home
        self._path = mark_path(home)
        self._file = file
        self._limits = limits
        self._root = root
        self._files = files
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
        """Look for the mark; the first look makes it. Fails with UNREACHABLE. Raises OSError."""
        with self._lock:
            failure = self._claim() if self._text is None else None
            failure = failure or self._look()
            if failure is not None and not self.problem:
                self._problem_s = monotonic()
            self.problem = str(failure or "")
            return failure

    def check_device(self) -> Failure | None:
        """Fail with UNREACHABLE if the place is on another file system than at the last look."""
        device = self._device_now()
        if isinstance(device, Failure):
            return device
        return None if device == self._device else self._away("its file system was changed")

    @property
    def _driver(self) -> PutDriver:
        if self._opened is None:
            self._opened = self._open_driver()
        return self._opened

    def _look(self) -> Failure | None:
        assert self._text is not None
        device = self._device_now()
        if isinstance(device, Failure):
            return device
        read = self._driver.read(self._path, [(0, len(self._text))])
        if isinstance(read, Failure):
            return read if read.kind is FailureKind.UNREACHABLE else self._away("it is not there")
        if bytes(read[0]) != self._text:
            return self._away("it is that of another tier")
        self._device = device
        return None

    def _claim(self) -> Failure | None:
        """Find out which mark the place must have."""
        text = self._file.load()
        if text is None:
            found = read_mark(self._driver, self._home)
            if isinstance(found, Failure):
                is_new = found.kind is FailureKind.MISSING or not self._has_root()
                found = self._make() if is_new else found
            if isinstance(found, Failure):
                return found._replace(kind=FailureKind.UNREACHABLE)
            text = found
            self._file.save(text)
        self._text = text
        return None

    def _make(self) -> bytes | Failure:
        if self._has_content():
            folder = f"{cluster_folder(self._home.cluster)}/{self._home.broker}"
            entries = self._driver.entries(folder)
            if isinstance(entries, Failure) or not entries:
                return self._away("the store has messages in this tier, and it has none")
        root, files = self._root, self._files
        if root is not None:
            made = self._limits.run(
                Operation("write", self._path), lambda: files.make_directories(root)
            )
            if isinstance(made, Failure):
                return made
        mark = Mark(*self._home, secrets.token_hex(_ID_BYTES))
        text = msgspec.json.encode(mark)
        put = self._driver.put(self._path, text)
        return put if isinstance(put, Failure) else text

    def _has_root(self) -> bool:
        return not isinstance(self._device_now(), Failure)

    def _device_now(self) -> int | Failure:
        """The file system of a folder."""
        root = self._root
        if root is None:
            return 0

        def device() -> int | Failure:
            try:
                return root.stat().st_dev
            except OSError as error:
                return self._away(str(error))

        return self._limits.run(Operation("size", self._path), device)

    def _away(self, reason: str) -> Failure:
        where = self._root or "the bucket"
        return Failure(
            FailureKind.UNREACHABLE,
            self._path,
            f"{where} lacks the mark of this broker's tier ({reason}): mount its file system, or "
            "set its own folder or bucket. Nothing is written there. To begin an empty tier, stop "
            f"the broker and remove {self._file.path} and its .bak",
        )


class Marked(Wrapped):
    """A driver that fails with UNREACHABLE while its place lacks the mark."""

    def __init__(self, driver: Any, mark: PlaceMark) -> None:
        super().__init__(driver)
        self._mark = mark

    def _run(self, operation: Operation, operate: Callable[[], T]) -> T | Failure:
        if operation.name == "list":
            found = operate()
            return found if isinstance(found, Failure) else self._mark.check() or found
        if not operation.changes:
            return self._believed(operate())
        # What is replaced is in the right place.
        failure = None if operation.replaces else self._mark.check()
        if failure is not None:
            return failure
        result = self._believed(operate())
        return result if isinstance(result, Failure) else self._mark.check_device() or result

    def _believed(self, result: T) -> T | Failure:
        """A result that a missing mark explains is that the place is away."""
        is_doubtful = isinstance(result, Failure) and result.kind in _DOUBTFUL
        return (self._mark.check() if is_doubtful else None) or result
