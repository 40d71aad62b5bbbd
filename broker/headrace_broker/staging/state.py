"""State of a query at this broker: one small file, replaced as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from headrace_broker.store.errors import StoreFormatError
from headrace_broker.store.files.positions import PositionFile
from headrace_protocol.staging import Decision  # noqa: TC001 - msgspec reads it

if TYPE_CHECKING:
    from pathlib import Path

    from headrace_broker.store.files.filesystem import Files

NAME = "state.json"


class QueryState(msgspec.Struct, frozen=True, rename="camel"):
    """The part of a query that must survive a crash.

    applied_batch_id: the last batch whose records are in the log, -1 before the first.
    decision: for that batch or the next. tag: carried by its records in the log.
    from_offset: physical offset before which no record has the tag. owner: the user whose query it
    is; None where nobody is checked.
    """

    applied_batch_id: int = -1
    decision: Decision | None = None
    tag: int = 0
    from_offset: int = 0
    owner: str | None = None

    @property
    def pending(self) -> Decision | None:
        """The decision whose records are not all in the log yet."""
        decision = self.decision
        return decision if decision and decision.batch_id > self.applied_batch_id else None


def load(folder: Path, files: Files, *, is_known: bool = False) -> QueryState:
    """The state in a query's folder.

    Raises OSError; StoreFormatError for a damaged one, or without one if the query ``is_known``.
    """
    try:
        state = state_file(folder, files).load()
    except StoreFormatError as error:
        raise _damaged(error.path, str(error)) from error
    if state is None and is_known:
        raise _missing(folder / NAME)
    return state or QueryState()


def state_file(folder: Path, files: Files) -> PositionFile[QueryState]:
    """The file of the state. An older state would have batches stored twice."""
    return PositionFile(folder / NAME, QueryState, files, has_backup=False)


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
