"""Progress of a broadcasting consumer, in a file of its machine that Java's clients read, too.

Source: docs/clients.md "Broadcasting"; tests/clients/test_broadcast.py.
"""

from __future__ import annotations

import errno
import logging
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from headrace.consumer.offset_store import OffsetStore
from headrace.errors import ConfigurationError, OffsetsNotSaved
from headrace_protocol import fastjson
from headrace_protocol.bodies import LocalOffsets
from headrace_protocol.drivers.files import replace_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.instance import ClientInstance
    from headrace_protocol.bodies import MessageQueue

_log = logging.getLogger("headrace.consumer")

# RocketMQ's names.
_FOLDER = ".rocketmq_offsets"
_FILE = "offsets.json"


class LocalOffsetStore(OffsetStore):
    """Keeps the progress of one group in ``folder/client id/group/offsets.json``.

    The last two contents are kept; the older one ends in ``.bak``. Only one client at a time may
    have it open: two would overwrite each other's progress. Its lock file has a random mark, by
    which each save knows the folder: below an unmounted disk may be another one.
    """

    def __init__(self, instance: ClientInstance, group: str, folder: str | Path | None) -> None:
        """folder: ``.rocketmq_offsets`` in the user's home if None."""
        super().__init__(instance)
        self._base = Path(folder) if folder is not None else Path.home() / _FOLDER
        self.path = self._base / instance.client_id / group / _FILE
        self._table: dict[MessageQueue, int] = {}
        self._is_writing = anyio.Lock()
        self._lock: Any = None
        self._mark = secrets.token_bytes(16)

    async def open(self) -> None:
        """Read the file. Raises ConfigurationError if it is damaged, or open in another client."""
        await anyio.to_thread.run_sync(self._open)

    def _open(self) -> None:
        try:
            # Not its parents: they exist unless a disk is not mounted.
            self._base.mkdir(exist_ok=True)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = self._lock_path.open("ab")  # nothing is cut off before it is locked
        except OSError as error:
            raise ConfigurationError(
                f"{self.path.parent} cannot hold offsets: {error}; give another offsets_dir="
            ) from error
        try:
            _lock(lock, self.path)
            self._table = self._read()
            self._set_mark(lock)
        except BaseException:
            lock.close()
            raise
        self._lock = lock

    @property
    def _lock_path(self) -> Path:
        return self.path.with_suffix(".lock")

    def _set_mark(self, lock: Any) -> None:
        try:
            lock.truncate(0)
            lock.write(self._mark)
            lock.flush()
        except OSError as error:
            raise ConfigurationError(f"{self._lock_path} can't be written: {error}") from error

    def _check_mark(self) -> None:
        """Raise OSError unless the folder is the one that was opened."""
        try:
            found = self._lock_path.read_bytes()
        except FileNotFoundError:
            found = None
        if found != self._mark:
            reason = "the folder is not the one of the start; its disk may not be mounted"
            raise OSError(errno.ESTALE, reason)

    def _read(self) -> dict[MessageQueue, int]:
        """The newer of the two contents that can be read."""
        problems = []
        for path in (self.path, self.path.with_suffix(".json.bak")):
            try:
                table = fastjson.decode(path.read_bytes(), LocalOffsets).offset_table
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                problems.append(f"{path}: {error}")
                continue
            for problem in problems:
                _log.warning("offsets taken from the backup: %s", problem)
            return table
        if problems:
            raise ConfigurationError(
                f"offsets can't be read: {'; '.join(problems)}; remove the files to begin at start="
            )
        return {}

    async def close(self) -> None:
        """Let another client open it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # -- progress ----------------------------------------------------------------------------------

    async def committed(self, group: str, queue: MessageQueue) -> int | None:  # noqa: ARG002
        """The saved offset of a queue; None if there is none."""
        return self._table.get(queue)

    async def commit(self, group: str, offsets: Mapping[MessageQueue, int]) -> None:  # noqa: ARG002
        """Save progress. Raises OffsetsNotSaved."""
        if not offsets:
            return
        async with self._is_writing:
            self._table |= offsets
            await anyio.to_thread.run_sync(self._write, dict(self._table))

    async def commit_oneway(self, group: str, offsets: Mapping[MessageQueue, int]) -> None:
        """Save progress; the same as ``commit``."""
        await self.commit(group, offsets)

    def _write(self, table: dict[MessageQueue, int]) -> None:
        text = fastjson.dumps(LocalOffsets(offset_table=table), pretty=True)
        try:
            self._check_mark()
            replace_file(self.path, text, self.path.with_suffix(".json.bak"))
        except OSError as error:
            raise OffsetsNotSaved(str(self.path), error) from error


def _lock(file: Any, path: Path) -> None:
    """Raise ConfigurationError if another client has the lock."""
    try:
        import fcntl
    except ImportError:  # no such locks on Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ConfigurationError(
            f"{path} is in use by another broadcasting consumer of this group; give each its own "
            "offsets_dir="
        ) from error
