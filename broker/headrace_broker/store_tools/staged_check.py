"""Checks ``staged/``: messages kept aside until their micro-batch is decided."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_broker.staging import owner
from headrace_broker.staging import state as state_file
from headrace_broker.staging.blocks import CorruptStage, read_blocks
from headrace_broker.store.errors import StoreFormatError
from headrace_broker.store_tools.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from headrace_broker.staging.state import QueryState
    from headrace_broker.store.files.filesystem import Files


def staged_findings(root: Path, files: Files) -> Iterator[Finding]:
    """States and owners that can't be read, and torn blocks.

    Torn blocks of an undecided micro-batch are only a note: they are cut off when their attempt
    resumes.
    """
    for folder in sorted((root / "staged").glob("*")):
        try:
            decided = _decided(state_file.load(folder, files))
            owner.read(folder)
        except StoreFormatError as error:
            decided = frozenset()
            yield Finding(error.path, str(error))
        for path in sorted(folder.glob("*.blocks")):
            try:
                for _ in read_blocks(path):
                    pass
            except CorruptStage as error:
                is_decided = path.stem in decided
                yield Finding(path, str(error), error.position, is_damage=is_decided)


def _decided(state: QueryState) -> frozenset[str]:
    """The files, without suffix, whose records are still to be appended."""
    undone = state.pending
    if undone is None:
        return frozenset()
    attempts = (staged.attempt for part in undone.attempts.values() for staged in part)
    return frozenset(f"{undone.batch_id}.{attempt}" for attempt in attempts)
