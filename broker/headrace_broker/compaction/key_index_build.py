"""Enters what a key index lacks, in blocks; in a thread or in another process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headrace_broker.compaction.record_blocks import Marks, RecordSequence

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace_broker.compaction.key_index import KeyIndex
    from headrace_broker.compaction.segments import Segment

# Between two syncs of the index; after a kill so much is read again.
_SYNC_BYTES: Final = 256 << 20


def enter_all(
    index: KeyIndex, segments: Sequence[Segment], end: int, pace: Callable[[int], None]
) -> None:
    """Load an index and enter the messages up to ``end``; damage has it begin anew.

    pace: see ``RecordSequence``. Raises OSError, SegmentDamaged.
    """
    is_whole = False
    while not is_whole:
        if not index.is_loaded:
            index.load(end)
        is_whole = _enter(index, segments, pace)


def _enter(index: KeyIndex, segments: Sequence[Segment], pace: Callable[[int], None]) -> bool:
    sequence, synced_bytes = RecordSequence(segments, pace), 0
    first = sequence.number_of(index.position)
    for block in sequence.blocks(first, sequence.count, Marks(sequence.count)):
        index.put(block.records, int(block.records.queue_offset[-1]) + 1)
        if index.is_damaged:
            return False
        if sequence.bytes_read - synced_bytes > _SYNC_BYTES:
            synced_bytes = sequence.bytes_read
            index.sync()
    return True


def lacking_count(index: KeyIndex, segments: Sequence[Segment]) -> int:
    """The messages of segments that an index lacks, at most."""
    return sum(
        min(segment.count, segment.last_queue_offset + 1 - index.position)
        for segment in segments
        if segment.last_queue_offset >= index.position
    )
