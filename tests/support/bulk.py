"""Bulk sends, and answers of bulk pulls as clients read them."""

from __future__ import annotations

from headrace_broker.store.store_source import GetResult
from headrace_protocol.blocks import EncodedBlock
from headrace_protocol.codes import RequestCode
from headrace_protocol.columns import RecordColumns
from headrace_protocol.drivers.blocking import BlockingConnection
from headrace_protocol.headers import BulkPullResponseHeader
from tests.support.wire import bulk_send_header


def columns_of(result: GetResult) -> RecordColumns:
    """The records that a client finds in the answer."""
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


def store_block(address: str, topic: str, block: EncodedBlock) -> None:
    """Store records in queue 0 of a topic."""
    header = bulk_send_header(
        producer_group="tests", topic=topic, default_topic_queue_nums=1, count=block.record_count
    )
    with BlockingConnection.connect(address) as connection:
        connection.request(RequestCode.BULK_SEND, header, block.body, timeout_ms=9000).expect()
