"""Reads of a batch queue, whose records hold one or more messages each.

A read from the middle of a batch begins with the whole record; the reader skips what comes before
the offset that it asked for. The next offset is that behind the last record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from headrace_broker.store.queues.batch_queue import BatchConsumeQueue
from headrace_broker.store.store_source import (
    BULK_SCAN_UNITS,
    SCAN_BYTES,
    GetResult,
    GetStatus,
    StoreSource,
    bulk_records,
    empty,
    nothing_found,
    outside,
)
from headrace_protocol.choose import adjoining, choose
from headrace_protocol.columns import QUEUE_OFFSET_DTYPE, UNIT_DTYPE

if TYPE_CHECKING:
    from headrace_broker.store.log.commit_log import CommitLog
    from headrace_broker.store.store_queue import StoreQueue
    from headrace_protocol.columns import Array
    from headrace_protocol.message import Buffer

_SCAN_UNITS = SCAN_BYTES // BatchConsumeQueue.unit_bytes
# A batch has the tags of none of its messages: readers look at these themselves.
_ANY_TAGS = frozenset((0,))


class _Chosen(NamedTuple):
    """Units of records to return, and the outcome of the read."""

    units: Array
    outcome: GetResult


def source_of(queue: StoreQueue, commit_log: CommitLog) -> StoreSource:
    """The source that reads a queue."""
    kind = BatchSource if queue.consume_queue.is_batch else StoreSource
    return kind(queue, commit_log)


class BatchSource(StoreSource):
    """Reads a batch queue. Limits of messages hold for those of whole records."""

    __slots__ = ()

    def get(
        self, queue_offset: int, count_max: int, bytes_max: int, tags: frozenset[int] | None
    ) -> GetResult:
        """See ``StoreSource.get``."""
        units, outcome = self._choose(queue_offset, _SCAN_UNITS, count_max, bytes_max, tags)
        if not len(units):
            return outcome
        starts, sizes = units["physical_offset"].astype(np.int64), units["size"].astype(np.int64)
        runs = adjoining(starts, sizes, self._commit_log.file_bytes)
        return outcome._replace(buffers=self._commit_log.slices(runs))

    def get_bulk(
        self, queue_offset: int, count_max: int, bytes_max: int, tags: frozenset[int] | None
    ) -> GetResult:
        """See ``StoreSource.get_bulk``; the units are those of a ConsumeQueue."""
        units, outcome = self._choose(queue_offset, BULK_SCAN_UNITS, count_max, bytes_max, tags)
        if not len(units):
            return outcome
        log = self._commit_log
        layout, records = bulk_records(units, log.slices, log.file_bytes)
        plain = np.empty(len(units), UNIT_DTYPE)
        for name in UNIT_DTYPE.names or ():
            plain[name] = units[name]
        offsets = units["queue_offset"].astype(QUEUE_OFFSET_DTYPE)
        buffers: list[Buffer] = [plain.view(np.uint8).data, offsets.tobytes()]
        return outcome._replace(
            buffers=buffers + records,
            count=len(units),
            layout=layout,
            first_physical_offset=int(units["physical_offset"][0]),
            has_queue_offsets=True,
        )

    def _choose(
        self,
        queue_offset: int,
        scan_count: int,
        count_max: int,
        bytes_max: int,
        tags: frozenset[int] | None,
    ) -> _Chosen:
        queue = self._queue
        log_min_offset = self._commit_log.files.min_offset
        min_offset, max_offset = queue.min_offset(log_min_offset, self._units), queue.max_offset
        if not min_offset <= queue_offset < max_offset:
            return _Chosen(np.empty(0), outside(queue_offset, min_offset, max_offset))
        view = self._units(queue, queue.number_of(queue_offset, self._units), scan_count)
        units = np.frombuffer(view, queue.unit_dtype)
        units = units[: int(np.searchsorted(np.cumsum(units["count"]), count_max)) + 1]
        where, _, seen = choose(
            units,
            None if tags is None else tags | _ANY_TAGS,
            len(units),
            bytes_max,
            is_there=units["physical_offset"] >= log_min_offset,
        )
        last = units[seen - 1]
        next_offset = int(last["queue_offset"]) + int(last["count"])
        units = units[where]
        outcome = empty(nothing_found(tags), next_offset, min_offset, max_offset)
        if len(units):
            outcome = outcome._replace(
                status=GetStatus.FOUND,
                count=int(units["count"].sum(dtype=np.int64)),
                body_bytes=int(units["size"].sum(dtype=np.int64)),
            )
        return _Chosen(units, outcome)
