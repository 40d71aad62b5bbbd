"""Answers of bulk pulls as clients read them."""

from __future__ import annotations

from headrace_broker.store.store_source import GetResult
from headrace_protocol.columns import RecordColumns
from headrace_protocol.headers import BulkPullResponseHeader


def columns_of(result: GetResult) -> RecordColumns:
    """What a client makes of the answer."""
    header = BulkPullResponseHeader(
        next_begin_offset=result.next_offset,
        min_offset=result.min_offset,
        max_offset=result.max_offset,
        count=result.count,
        layout=result.layout,
        first_physical_offset=result.first_physical_offset,
        has_queue_offsets=result.has_queue_offsets,
    )
    columns = RecordColumns.from_bulk(header, b"".join(result.buffers))
    columns.check_bodies()
    return columns
