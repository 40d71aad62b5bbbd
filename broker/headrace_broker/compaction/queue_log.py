"""The compaction log of one queue: its segments, in the order of their queue offsets.

A run drops records, so there are gaps between queue offsets, which never change.
``segments`` is one reference to an immutable tuple. Only the thread that appends replaces it, and a
reader takes it once per request.
"""

from __future__ import annotations

from bisect import bisect_left
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from headrace_broker.compaction.opening import open_segments
from headrace_broker.compaction.segments import Segment
from headrace_broker.compaction.units import END_MAGIC, END_RECORD, END_UNIT
from headrace_broker.store.errors import RecordTooLarge, StoreFormatError
from headrace_broker.store.log.batch_units import BATCH_UNIT_BYTES, make_units
from headrace_protocol.choose import adjoining

if TYPE_CHECKING:
    from headrace_broker.compaction.opening import FindSeal, Opened
    from headrace_broker.compaction.segments import Folders, SegmentFile
    from headrace_broker.compaction.units import FileSizes
    from headrace_broker.store.files.filesystem import Files
    from headrace_broker.store.queues.queue_blocks import QueueBlock
    from headrace_protocol.columns import Array

_PHYSICAL_OFFSET_AT: Final = 28


class QueueLog:
    """All that changes it runs in one thread at a time, the follower's once it follows."""

    def __init__(self, folders: Folders, sizes: FileSizes, fs: Files, base: int = 0) -> None:
        """Describe a log; ``load`` finds the existing files. base: least name of new ones."""
        self.folders = folders
        self.sizes = sizes
        self.fs = fs
        self.segments: tuple[Segment, ...] = ()
        # How often records were removed, so that units may have got other records.
        self.cut_count = 0
        # What the log lacks between its end and this queue offset has been dropped by runs.
        self.dropped_end = 0
        self._base = base
        self._dirty: dict[SegmentFile, None] = {}
        self._replaced: list[Segment] = []
        self._opened: Opened | None = None
        # Whether units of an interrupted write may follow the last one.
        self._has_rest = False

    def load(self, find_seal: FindSeal, *, is_clean: bool) -> None:
        """Find the segments; ``resume`` must follow before they are read.

        Raises OSError; StoreFormatError for files that are no compaction log with these sizes.
        """
        self._opened = open_segments(
            self.folders, self.sizes, self.fs, find_seal, is_clean=is_clean
        )
        self.segments = self._opened.segments
        self._has_rest = not is_clean

    def resume(self, queue_offset: int, oldest: int) -> int:
        """Remove what may not be on disk, and what a power cut has taken from the CommitLog.

        queue_offset: the log was synced up to there: after a crash the saved position, after a
        clean stop the end of the ConsumeQueue. oldest: the first queue offset that the CommitLog
        still has; what is older stays, since another broker may have entered it after the save.

        Returns the queue offset from which to append. Raises OSError; StoreFormatError if the log
        is damaged and the CommitLog can't replace what is lost.
        """
        opened, self._opened = self._opened, None
        start = min(max(queue_offset, oldest), self.end_offset)
        if opened and opened.lost_from < queue_offset and start < oldest:
            self._opened = opened
            raise StoreFormatError(
                opened.path,
                f"{opened.problem}; messages from queue offset {start} on are only there",
                "restore both files of that name from a backup, or, to give up these "
                "messages, move both and the files after them out of the store's directory",
            )
        for path in opened.rest if opened else ():
            self.fs.unlink(path)
        if self._has_rest:
            self._sync_later(queue_offset)
        self.cut(start)
        return start

    def _sync_later(self, queue_offset: int) -> None:
        """Have ``sync`` cover what a killed broker wrote from ``queue_offset`` on."""
        for segment in self.segments:
            if segment.last_queue_offset >= queue_offset:
                self._mark_dirty(segment)
        for folder in self.folders:
            # QUEUE_ID, TOPIC, the tree, compaction and the store's own folder.
            for made in (folder, *folder.parents[:4]):
                self.fs.mark_names_unsynced(made)

    @property
    def end_offset(self) -> int:
        """One past the last queue offset; 0 without records."""
        segments = self.segments
        return segments[-1].last_queue_offset + 1 if segments else 0

    @property
    def whole_end(self) -> int:
        """``end_offset`` of a log that was loaded and not resumed yet; 0 if it is damaged."""
        return 0 if self._opened and self._opened.problem else self.end_offset

    @property
    def next_offset(self) -> int:
        """The queue offset from which messages are to be appended."""
        return max(self.end_offset, self.dropped_end)

    # --- appending -------------------------------------------------------------------------

    def append(self, block: QueueBlock) -> None:
        """Append the records of a block, verbatim but for their physical offsets.

        Raises OSError, after which some of them may have been appended; RecordTooLarge.
        """
        records = block.records
        sizes, offsets = records.size, records.queue_offset
        assert not len(sizes) or offsets[0] >= self.end_offset, "queue offsets must ascend"
        view = memoryview(records.data)
        pieces = adjoining(records.start, sizes)
        data = bytearray().join([view[start:end] for start, end in pieces])
        ends = np.cumsum(sizes, dtype=np.int64)
        tags, times = block.units["tags_code"], records.store_timestamp
        done = 0
        while done < len(sizes):
            before = int(ends[done - 1]) if done else 0
            live = self._live()
            end = done + self._fitting(live, ends[done:] - before)
            if end > done:
                piece = memoryview(data)[before : int(ends[end - 1])]
                positions = ends[done:end] - sizes[done:end] - before + live.base + live.log_end
                units = make_units(
                    positions, sizes[done:end], tags[done:end], times[done:end], offsets[done:end]
                )
                self._write(live, piece, units)
                done = end
            elif live.count:
                self.roll()
            else:
                self._discard(live)
                raise RecordTooLarge("record", int(sizes[done]), self.sizes.log_bytes - 8)

    def _live(self) -> Segment:
        """The segment to append to; a new one is published with its first records."""
        segments = self.segments
        if segments and not segments[-1].is_sealed:
            return segments[-1]
        after = segments[-1].base + self.sizes.log_bytes if segments else 0
        base = max(self._base, after)
        return Segment.create(self.folders, base, self.sizes, self.fs)

    def leave_names(self, file_count: int) -> None:
        """Have the next new segment leave so many names free, counted from 0; until a restart."""
        self._base = max(self._base, file_count * self.sizes.log_bytes)

    def _fitting(self, live: Segment, ends: Array) -> int:
        """The number of records with these ends that fit into a segment, end marks included."""
        room = self.sizes.log_bytes - END_RECORD.size - live.log_end
        return min(int(np.searchsorted(ends, room, "right")), self.sizes.units_max - live.count)

    def _write(self, live: Segment, data: memoryview, units: Array) -> None:
        at = (units["physical_offset"] - units["physical_offset"][0]).astype(np.int64)
        stated_offsets = np.ndarray((len(data) - 7,), ">i8", data, strides=(1,))
        stated_offsets[at + _PHYSICAL_OFFSET_AT] = units["physical_offset"]
        try:
            live.log.write(data, live.log_end)
            live.units_file.write(units.tobytes(), live.count * BATCH_UNIT_BYTES)
        except OSError:
            self._has_rest = True
            if not live.count:
                self._discard(live)
            raise
        self._mark_dirty(live)
        first = live.first_queue_offset if live.count else int(units["queue_offset"][0])
        grown = replace(
            live,
            count=live.count + len(units),
            log_end=live.log_end + len(data),
            first_queue_offset=first,
            last_queue_offset=int(units["queue_offset"][-1]),
        )
        kept = self.segments[:-1] if live.count else self.segments
        self.segments = (*kept, grown)

    def _discard(self, live: Segment) -> None:
        """Remove new files: Apache's broker does not bear an empty segment at the end."""
        for file in (live.units_file, live.log):
            with suppress(OSError):
                self.fs.unlink(file.path)

    def roll(self) -> None:
        """End the last segment early, so that a run may read it. Raises OSError."""
        segments = self.segments
        if not segments or segments[-1].is_sealed:
            return
        live = segments[-1]
        rest = self.sizes.log_bytes - live.log_end
        live.log.write(END_RECORD.pack(rest, END_MAGIC), live.log_end)
        live.units_file.write(END_UNIT, live.count * BATCH_UNIT_BYTES)
        self._mark_dirty(live)
        self.segments = (*segments[:-1], live.add_seals())

    @property
    def used(self) -> list[tuple[SegmentFile, int]]:
        """The files to seal at a clean stop: all whose checksums are known, and the last two.

        Others are those of another broker, which would have to be read as a whole.
        """
        segments = self.segments
        return [
            (file, used_bytes)
            for segment in segments
            for file, used_bytes in segment.used
            if file.seal or segment is segments[-1]
        ]

    # --- the disk --------------------------------------------------------------------------

    def _mark_dirty(self, segment: Segment) -> None:
        self._dirty[segment.log] = self._dirty[segment.units_file] = None

    def sync(self) -> None:
        """Bring everything that was appended to disk, names included. Raises OSError."""
        for file in list(self._dirty):
            file.sync()
            del self._dirty[file]
        self.fs.sync_names()

    def cut(self, queue_offset: int) -> None:
        """Remove all records from ``queue_offset`` on. Raises OSError.

        The bytes of the log stay: a reply may still be sending them, and the follower writes the
        same bytes at the same positions again.
        """
        before = self.segments
        self.cut_count += 1
        count = bisect_left(before, queue_offset, key=lambda segment: segment.first_queue_offset)
        kept, gone = before[:count], before[count:]
        if kept and kept[-1].last_queue_offset >= queue_offset:
            last = kept[-1]
            number = int(np.searchsorted(last.read_units()["queue_offset"], queue_offset))
            kept = (*kept[:-1], replace(last.cut(number), is_sealed=False))
            self._has_rest = True
        self.segments = kept
        self._remove(gone)
        if kept and self._has_rest and not kept[-1].is_sealed:
            kept[-1].units_file.clear_from(kept[-1].count * BATCH_UNIT_BYTES)
            kept[-1].log.seal = None
            self._mark_dirty(kept[-1])
        self._has_rest = False

    def replace(self, old: tuple[Segment, ...], new: tuple[Segment, ...]) -> None:
        """Put new segments, whose files are in place, where the oldest ones ``old`` were.

        Segments in both stay as they are. The caller has put the files of ``new`` in place and
        removed those of ``old`` that are left.
        """
        assert self.segments[: len(old)] == old, "a run replaces the oldest segments"
        self.segments = (*new, *self.segments[len(old) :])
        gone = [segment for segment in old if segment not in new]
        self._replaced += gone
        for segment in gone:
            self._dirty.pop(segment.log, None)
            self._dirty.pop(segment.units_file, None)

    def release_replaced(self) -> None:
        """Drop the maps of replaced files; on the loop. The last view frees a file's blocks."""
        while self._replaced:
            self._replaced.pop().unmap()

    def _remove(self, segments: tuple[Segment, ...]) -> None:
        """Remove files, the last first, so that an interrupted removal leaves no gap."""
        for segment in reversed(segments):
            for file in (segment.log, segment.units_file):
                self._dirty.pop(file, None)
                with suppress(FileNotFoundError):  # gone with a folder that was removed
                    self.fs.unlink(file.path)
        self._replaced += segments
