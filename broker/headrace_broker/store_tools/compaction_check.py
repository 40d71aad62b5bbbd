"""Checks ``compaction/``: pairs of files, units against records, positions of runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace_broker.compaction.checkpoint import POSITION_FILE, parse
from headrace_broker.compaction.opening import is_end, whole_count
from headrace_broker.compaction.run_state import own_folder
from headrace_broker.compaction.segments import COMPACTING, COMPACTION_FOLDER, REPLICATING
from headrace_broker.compaction.swap import JOURNAL_NAME
from headrace_broker.store.errors import StoreFormatError
from headrace_broker.store.files.config_file import ConfigFile
from headrace_broker.store_tools.compaction_files import compaction_queues, record_blocks
from headrace_broker.store_tools.directory import is_numbered
from headrace_broker.store_tools.findings import Finding
from headrace_protocol.errors import CorruptRecord
from headrace_protocol.java_hash import tags_code_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace_broker.compaction.segments import Segment
    from headrace_broker.store_tools.compaction_files import CompactionQueue
    from headrace_broker.store_tools.directory import StoreDirectory
    from headrace_protocol.columns import Array, RecordColumns


def compaction_findings(directory: StoreDirectory) -> Iterator[Finding]:
    """Misplaced files, units that point to no record of their queue, and unreadable positions."""
    for queue in compaction_queues(directory):
        journal = own_folder(directory.root, queue.topic, queue.queue_id) / JOURNAL_NAME
        if journal.exists():
            yield Finding(journal, "a swap is unfinished; the next start ends it", is_damage=False)
        yield from _file_findings(queue)
        end = -1
        for segment in queue.segments(directory):
            yield from _segment_findings(segment, queue, end)
            end = max(end, segment.last_queue_offset)
    file = ConfigFile(directory.root / COMPACTION_FOLDER / POSITION_FILE, directory.fs)
    try:
        file.read(parse)
    except StoreFormatError as error:
        problem = f"{error}; without it, the next runs read all segments again"
        yield Finding(file.path, problem, is_damage=False)


def _file_findings(queue: CompactionQueue) -> Iterator[Finding]:
    names = [{path.name for path in folder.glob("*") if path.is_file()} for folder in queue.folders]
    for folder, file_bytes, others in zip(queue.folders, queue.sizes, reversed(names), strict=True):
        for path in sorted(folder.glob("*")):
            if path.is_dir():
                if path.name in {COMPACTING, REPLICATING} and any(path.iterdir()):
                    problem = "holds unfinished work, which the next start finishes or discards"
                    yield Finding(path, problem, is_damage=False)
            elif path.name.endswith(".delete"):
                problem = "Apache's broker was killed in a swap, which the next start ends"
                yield Finding(path, problem, is_damage=False)
            elif not is_numbered(path):
                yield Finding(path, "does not belong to a compaction log: move it out of the store")
            elif path.stat().st_size != file_bytes:
                length = path.stat().st_size
                yield Finding(path, f"has {length} bytes instead of {file_bytes}")
            elif path.name not in others:
                yield Finding(path, "lacks the other file of its name: restore it from a backup")


def _segment_findings(segment: Segment, queue: CompactionQueue, end: int) -> Iterator[Finding]:
    """end: the newest queue offset of the segments before, -1 without any."""
    count = whole_count(segment)
    is_whole = count == segment.count > 0 and is_end(segment)
    if not is_whole or segment.first_queue_offset <= end:
        number = count if segment.first_queue_offset > end else 0
        yield Finding(
            segment.units_file.path, f"unit {number} is none that can follow those before it"
        )
        segment = segment.cut(number)
    try:
        for units, records in record_blocks(segment):
            start = int(units["physical_offset"][0]) - segment.base
            try:
                _check(records, units, queue)
            except CorruptRecord as error:
                raise CorruptRecord(start + error.position, error.reason) from error
    except CorruptRecord as error:
        problem = f"{error.reason}: restore both files of this name from a backup"
        yield Finding(segment.log.path, problem, error.position)


def _check(records: RecordColumns, units: Array, queue: CompactionQueue) -> None:
    """Raise CorruptRecord unless these are the records of the units."""
    is_placed = records.physical_offset == units["physical_offset"]
    records.require(is_placed, "the record states another position than its unit")
    is_own = (records.queue_offset == units["queue_offset"]) & (records.queue_id == queue.queue_id)
    records.require(is_own, "the record states another queue or queue offset than its unit")
    is_timed = records.store_timestamp == units["store_timestamp"]
    records.require(is_timed, "the record states another store time than its unit")
    tags_codes = np.array([tags_code_of(raw) for raw in records.properties()], np.int64)
    records.require(tags_codes == units["tags_code"], "the unit has another hash of the tags")
    if not records.has_topic(queue.topic):
        raise CorruptRecord(0, "a record states another topic")
