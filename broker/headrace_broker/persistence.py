"""Shared code of the tables in ``config/*.json``: reading them, and writing them off the loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import structlog
import trio

from headrace_broker.store.files.config_file import ConfigSource
from headrace_protocol import fastjson
from headrace_protocol.bodies import DataVersion
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.outages import Outages
from headrace_protocol.waiting import Until

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import msgspec

    from headrace_broker.store.files.config_file import ConfigFile

log = structlog.get_logger("headrace.broker")

NowMs = Callable[[], int]
Table = TypeVar("Table")
Item = TypeVar("Item")

# The name of the wait, for logs.
SAVES: Final = "saves of tables"
_RETRY_S = 1.0
_UNEXPECTED_RETRY_S = 60.0
_ITEMS_AT_ONCE = 20  # half a millisecond of structs


def load_table(file: ConfigFile, parse: Callable[[bytes], Table]) -> Table | None:
    """The table parsed from a file or its backup; None if neither exists.

    parse: raises ValueError for invalid data. Raises StoreFormatError.
    """
    table = file.read(parse)
    warn_of_backup(file)
    return table


def warn_of_backup(file: ConfigFile) -> None:
    """Warn if a file was read from its backup."""
    if file.source is ConfigSource.BACKUP:
        log.warning(
            "file damaged or missing, backup used: the last changes may be lost",
            path=str(file.path),
            problem=file.problem,
        )


def warn_if_missing(file: ConfigFile, meaning: str) -> None:
    """Warn if a file that every store has is missing although the log has messages.

    meaning: consequence for users of starting with an empty table.
    """
    if any((file.path.parent.parent / "commitlog").glob("*")):
        log.warning(
            "file missing beside a log with messages, starting with an empty table",
            path=str(file.path),
            meaning=meaning,
            remedy="if it was lost, stop this broker and restore a copy of it",
        )


def next_version(version: DataVersion, now_ms: int) -> DataVersion:
    """The version after a change at ``now_ms``."""
    return DataVersion(
        state_version=version.state_version, timestamp=now_ms, counter=version.counter + 1
    )


# -- text ------------------------------------------------------------------------------------------


def file_text(fields: Mapping[str, bytes]) -> bytes:
    """A file in the peer's layout, from encoded fields."""
    lines = (b'"%s":%s' % (name.encode(), text) for name, text in fields.items())
    return b"{\n\t" + b",\n\t".join(lines) + b"\n}"


def field_text(value: Any, level: int = 1) -> bytes:
    """A value encoded as in a file, indented by ``level``."""
    return fastjson.dumps(value, pretty=True).replace(b"\n", b"\n" + b"\t" * level)


def table_text(lines: Iterable[bytes]) -> bytes:
    """A table as a field of a file, from encoded entries."""
    text = b",\n\t\t".join(lines)
    return b"{\n\t\t" + text + b"\n\t}" if text else b"{}"


class TableText:
    """The encoded form of a table; encodes only entries that changed since the last call."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[msgspec.Struct, bytes]] = {}

    def text(self, table: Mapping[str, msgspec.Struct]) -> bytes:
        """The table as a field of its file; for one thread at a time.

        table: entries are replaced, never changed.
        Raises ValueError naming an entry that the next start could not read back.
        """
        entries = self._entries
        for name in [name for name in entries if name not in table]:
            del entries[name]
        changed = [item for item in table.items() if entries.get(item[0], _NONE)[0] is not item[1]]
        for name, value in with_breaks(changed):
            entries[name] = value, _entry_text(name, value)
        return table_text(line for _, line in entries.values())


_NONE = (None, b"")


def _entry_text(name: str, value: msgspec.Struct) -> bytes:
    try:
        line = fastjson.dumps(name) + b":" + field_text(value, 2)
        # Nested as deeply as in the file.
        table_type: Any = dict[str, dict[str, type(value)]]  # type: ignore[misc]
        fastjson.decode(b'{"":{%s}}' % line, table_type)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{name} can't be encoded: {error}; delete or change it") from error
    return line


def with_breaks(items: Iterable[Item]) -> Iterable[Item]:
    """The items; yields the interpreter lock now and then, which the loop would wait 5 ms for."""
    for number, item in enumerate(items, 1):
        if not number % _ITEMS_AT_ONCE:
            time.sleep(0)
        yield item


# -- files -----------------------------------------------------------------------------------------


class SavedFile:
    """The file of a table, written after every change.

    While ``run`` runs, a thread writes, and all changes made meanwhile share the next write.
    Otherwise a change is written at once.

    snapshot: called in the loop's thread; returns a function that encodes the file in another.
    unexpected_errors: number of writes that failed for a reason other than the disk.
    retry_s, unexpected_retry_s: pauses after a failure of the disk, and after another one, which
    will probably recur.
    """

    def __init__(self, file: ConfigFile, snapshot: Callable[[], Callable[[], bytes]]) -> None:
        self._file = file
        self._snapshot = snapshot
        self.unexpected_errors = 0
        self.retry_s, self.unexpected_retry_s = _RETRY_S, _UNEXPECTED_RETRY_S
        self._outages = Outages(log.error, ended=log.warning)
        self._change_count = self._saved_count = 0
        self._is_running = False
        self._save_requested = trio.Event()
        self._waiting: list[tuple[int, Callable[[Exception | None], None]]] = []

    def changed(self) -> None:
        """Save the table, which has changed. Raises OSError if it is written at once."""
        self._change_count += 1
        if self._is_running:
            self._save_requested.set()
        else:
            self.finish()

    @property
    def is_saved(self) -> bool:
        """True if all changes so far are on disk."""
        return self._saved_count == self._change_count

    def when_saved(self, callback: Callable[[Exception | None], None]) -> None:
        """Call back once all changes so far are on disk, or with the error that prevented it."""
        if self._saved_count == self._change_count:
            callback(None)
        else:
            self._waiting.append((self._change_count, callback))

    async def wait_saved(self) -> None:
        """Wait until all changes so far are on disk, or saving them has failed."""
        await save_ended(self.when_saved)

    async def run(self) -> None:
        """Write changes until cancelled; retry failed writes."""
        self._is_running = True
        if self._saved_count != self._change_count:  # the last run failed before saving
            self._save_requested.set()
        try:
            while True:
                await self._save_requested.wait()
                self._save_requested = trio.Event()
                if (problem := await self._save()) is not None:
                    self._save_requested.set()
                    is_disk = isinstance(problem, OSError)
                    await trio.sleep(self.retry_s if is_disk else self.unexpected_retry_s)
        finally:
            self._is_running = False

    def finish(self) -> None:
        """Write unsaved changes now. Raises OSError."""
        if self._saved_count != self._change_count:
            self._file.save(self._snapshot()())
            self._answer(self._change_count, None)

    @property
    def _name(self) -> str:
        return f"the folder of {self._file.path}"

    async def _save(self) -> Exception | None:
        """Write the table; return the error that prevented it, if any."""
        count = self._change_count
        problem: Exception | None = None
        try:
            text = self._snapshot()
            await trio.to_thread.run_sync(lambda: self._file.save(text()))
            self._outages.worked(self._name)
        except OSError as error:
            self._outages.failed(self._name, error)
            problem = error
        except Exception as error:  # an entry that can't be encoded must not end the daemon
            log.error("table not saved, retrying", path=str(self._file.path), exc_info=error)
            self.unexpected_errors += 1
            problem = error
        self._answer(count, problem)
        return problem

    def _answer(self, count: int, problem: Exception | None) -> None:
        if problem is None:
            self._saved_count = count
        waiting, self._waiting = self._waiting, []
        for change_count, callback in waiting:
            if change_count <= count:
                callback(problem)
            else:
                self._waiting.append((change_count, callback))


# Calls back once a change is on disk, or with the error of its save.
WhenSaved = Callable[[Callable[[Exception | None], None]], None]


async def save_ended(when_saved: WhenSaved) -> Exception | None:
    """As ``save_error``, which is for requests, in the task of a service."""
    ended = trio.Event()
    problem: Exception | None = None

    def end(error: Exception | None) -> None:
        nonlocal problem
        problem = error
        ended.set()

    when_saved(end)
    await ended.wait()
    return problem


async def save_error(when_saved: WhenSaved) -> Exception | None:
    """Wait until a change is on disk; returns the error if its save has failed."""
    error: Exception | None = await Until(SAVES, lambda run: when_saved(run.resume))
    return error


async def saved(when_saved: WhenSaved) -> None:
    """Wait until a change is on disk.

    Raises RequestError if the save fails; the change then holds until the broker stops.
    """
    if (error := await save_error(when_saved)) is not None:
        remedy = "; free space on the disk" if isinstance(error, OSError) else ""
        raise RequestError(
            ResponseCode.SYSTEM_ERROR,
            f"the change holds until this broker stops, but can't be saved: {error}; "
            f"the broker retries{remedy}",
        )
