"""Checks files against the checksums of ``headrace.seal``, and seals a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_broker.compaction.segments import LOG_FOLDER
from headrace_broker.store.files.file_seal import FileSeal, StoreDamaged
from headrace_broker.store.files.mapped_file import MappedFile
from headrace_broker.store.index.index_file import ENTRY_BYTES, IndexFiles
from headrace_broker.store.integrity.checkpoint import Checkpoint
from headrace_broker.store.integrity.seal import SEAL_NAME, Seals
from headrace_broker.store_tools.findings import Finding, MoveAside, RebuildIndex
from headrace_broker.store_tools.queue_check import open_queue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace_broker.store_tools.directory import StoreDirectory


def seal_findings(directory: StoreDirectory) -> Iterator[Finding]:
    """Blocks that have changed since the last clean stop.

    This covers what no other check does: properties, and most fields of a record's head.
    """
    seals = Seals(directory.root, directory.fs)
    seals.load()
    path = directory.root / SEAL_NAME
    if path.exists() and not seals.is_loaded:
        yield Finding(path, "its checksum does not match", fix=MoveAside(path))
    # A peer's writes through maps may not change a file's time, but they move the checkpoint.
    is_whole = seals.is_of(Checkpoint.load(directory.root / "checkpoint"))
    for path in seals.paths:
        seal = seals.find(path)
        if seal is not None and (is_whole or path.parent.name == "commitlog"):
            file = MappedFile(path, path.stat().st_size, directory.fs)
            yield from _file_findings(file, seal)
            file.unmap()


def _file_findings(file: MappedFile, seal: FileSeal) -> Iterator[Finding]:
    try:
        seal.check(file.path, file.pread, 0, seal.used_bytes)
    except StoreDamaged as error:
        # Not damage in a queue: units are compared with the log one by one, which finds all damage
        # that matters.
        is_log = file.path.parent.name == "commitlog" or LOG_FOLDER in file.path.parts
        is_index = file.path.parent.name == "index"
        problem = (
            f"the {error.byte_count} bytes from here on differ from those at the last clean stop"
        )
        fix = RebuildIndex(file.path) if is_index else None
        yield Finding(file.path, problem, error.position, fix, is_damage=is_log or is_index)


def seal(directory: StoreDirectory, log_end: int) -> None:
    """Seal a store that is intact and on disk. Raises OSError."""
    checkpoint = Checkpoint.load(directory.root / "checkpoint")
    seals = Seals(directory.root, directory.fs)
    seals.save(checkpoint, _used(directory, log_end))


def _used(directory: StoreDirectory, log_end: int) -> Iterator[tuple[MappedFile, int]]:
    log_bytes = directory.settings.commit_log_file_bytes
    for path in directory.log_paths:
        file = MappedFile(path, log_bytes, directory.fs)
        yield file, min(log_end - file.start_offset, log_bytes)
        file.unmap()
    for folder in directory.queue_paths:
        queue = open_queue(folder, directory)
        for file in queue.files.files:
            end = queue.end_number * queue.unit_bytes - file.start_offset
            yield file, min(end, file.file_bytes)
        queue.unmap()
    index = IndexFiles(directory.settings, directory.fs)
    index.load()
    for index_file in index.files:
        end = index_file.entries_at + index_file.header.index_count * ENTRY_BYTES
        yield index_file.file, end
