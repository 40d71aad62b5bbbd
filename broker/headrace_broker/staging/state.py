"""State of a query at this broker: one small file, replaced as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from zlib_ng.zlib_ng import crc32

from headrace_broker.store.errors import StoreFormatError
from headrace_broker.store.files.filesystem import read_file
from headrace_protocol.staging import Decision  # noqa: TC001 - msgspec reads it

if TYPE_CHECKING:
    from pathlib import Path

    from headrace_broker.store.files.filesystem import Files

NAME = "state.json"


class QueryState(msgspec.Struct, frozen=True, rename="camel"):
    """The part of a query that must survive a crash.

    applied_batch_id: the last batch whose records are in the log, -1 before the first.
    decision: for that batch or the next. tag: carried by its records in the log.
    from_offset: physical offset before which no record has the tag.
    """

    applied_batch_id: int = -1
    decision: Decision | None = None
    tag: int = 0
    from_offset: int = 0

    @property
    def pending(self) -> Decision | None:
        """The decision whose records are not all in the log yet."""
        decision = self.decision
        return decision if decision and decision.batch_id > self.applied_batch_id else None


def load(folder: Path, *, is_known: bool = False) -> QueryState:
    """The state in a query's folder.

    Raises OSError; StoreFormatError for a damaged one, or without one if the query ``is_known``.
    """
    path = folder / NAME
    try:
        data = read_file(path)
    except FileNotFoundError:
        if is_known:
            raise _missing(path) from None
        return QueryState()
    text, _, crc = data.rstrip(b"\n").rpartition(b"\n")
    if crc != _crc(text):
        raise _damaged(path, "its CRC does not match")
    try:
        return _decode(text)
    except msgspec.MsgspecError as error:
        raise _damaged(path, str(error)) from error


def save(folder: Path, state: QueryState, files: Files) -> None:
    """Replace the state, on disk when this returns. Raises OSError."""
    files.reserve.save(lambda: _replace(folder, state, files))


def _replace(folder: Path, state: QueryState, files: Files) -> None:
    path = folder / NAME
    text = msgspec.json.encode(state)
    new_path = path.with_name(NAME + ".new")
    descriptor = files.create_temporary(new_path)
    try:
        files.write(descriptor, text + b"\n" + _crc(text) + b"\n", 0)
        files.fsync(descriptor)
    finally:
        files.close(descriptor)
    files.rename(new_path, path)
    files.fsync_directory(folder)


_decode = msgspec.json.Decoder(QueryState).decode


def _crc(text: bytes) -> bytes:
    return b"%08x" % crc32(text)


def _missing(path: Path) -> StoreFormatError:
    return StoreFormatError(
        path,
        "missing, so it is unknown which batches of the query were stored",
        "mount its disk or restore the folder, and restart; without it, start the query again with "
        "another checkpoint",
    )


def _damaged(path: Path, problem: str) -> StoreFormatError:
    return StoreFormatError(
        path,
        f"damaged, so it is unknown which batches of the query were stored: {problem}",
        "put a good copy in its place; without it, remove the query's folder and start the query "
        "again with another checkpoint",
    )
