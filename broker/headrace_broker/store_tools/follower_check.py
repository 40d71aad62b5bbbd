"""Checks ``followers/``, the saved positions of followers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_broker.store.errors import StoreFormatError
from headrace_broker.store.files.config_file import BACKUP_SUFFIX, DAMAGED_SUFFIX
from headrace_broker.store.files.positions import QueuePositions
from headrace_broker.store.followers.follower_work import POSITIONS_FOLDER
from headrace_broker.store_tools.config_check import config_findings, text_problem
from headrace_broker.store_tools.findings import Finding, MoveAside
from headrace_broker.store_tools.queue_check import queue_end

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from headrace_broker.store.files.positions import Name
    from headrace_broker.store_tools.directory import StoreDirectory

_SUFFIXES = (".json", ".json" + BACKUP_SUFFIX, ".json" + DAMAGED_SUFFIX, ".json.tmp")


def follower_findings(directory: StoreDirectory) -> Iterator[Finding]:
    """Stray or unreadable files, and positions that do not exist in their queue."""
    folder = directory.root / POSITIONS_FOLDER
    ends: dict[Name, int | None] = {}
    for path in sorted(folder.glob("*")):
        if path.is_dir() or not path.name.endswith(_SUFFIXES):
            yield Finding(path, "does not belong to a follower", fix=MoveAside(path))
        elif path.name.endswith(".json"):
            yield from _position_findings(path, directory, ends)
    for finding in config_findings(folder):
        if finding.path.name.endswith(_SUFFIXES):
            yield finding


def _position_findings(
    path: Path, directory: StoreDirectory, ends: dict[Name, int | None]
) -> Iterator[Finding]:
    try:
        positions = QueuePositions(path, directory.fs).load()
    except StoreFormatError as error:
        if text_problem(path.name, path.read_bytes()) is None:  # else config_findings reports it
            yield Finding(path, str(error))
        return
    for name, position in positions.items():
        if name not in ends:
            ends[name] = queue_end(directory, *name)
        end, queue = ends[name], f"{name[0]}/{name[1]}"
        if end is None:
            problem = f"names queue {queue}, which is gone; the next start informs the follower"
            yield Finding(path, problem, is_damage=False)
        elif position.queue_offset > end:
            yield Finding(
                path,
                f"is at {position.queue_offset} of queue {queue}, which ends at {end}: messages "
                "are missing; the next start resets the follower to that end (if the follower is "
                "no longer used, remove the file and its .bak)",
            )
