"""The work of a Spark read task: read queue ranges and yield them as Arrow.

One slice of a range is decoded in memory while the next one is in flight. All work per message is
done in C, except for compressed bodies.
"""

from __future__ import annotations

import logging
import re
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.consumer.pulls import Wanted
from headrace.consumer.queue_slices import SliceReader
from headrace.consumer.subscription import Subscription
from headrace.errors import HeadraceError, OffsetNotFound
from headrace.spark.connections import Connections
from headrace.spark.errors import DataLoss, SparkConnectorError
from headrace.spark.plan.filters import Predicates
from headrace.spark.read.columns import RecordBlock
from headrace.spark.read.key_index import records_by_keys
from headrace.spark.read.schema import CORRUPT, own_columns
from headrace.spark.retry import Waiting
from headrace.spark.tier.direct import read_direct
from headrace_protocol.bodies import MessageQueue
from headrace_protocol.compression import COMPRESSED, UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.spark.plan.tasks import QueueRange, ReadPlan
    from headrace_protocol.columns import Array, RecordColumns
    from headrace_protocol.drivers.blocking import BlockingConnection

# A tag without special characters of tag expressions.
_PLAIN_TAG = re.compile(r"[^\s|*]+")

_logger = logging.getLogger(__name__)


def read_range(plan: ReadPlan, part: QueueRange, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The messages of a range, as batches of exactly this schema (see ``columns.arrow_schema``).

    Reconnects after a lost connection and resumes the read.

    Raises DataLoss, or the error of a broker that stays unreachable or rejects the read.
    """
    part = _narrow(part, plan.predicates)
    batches = BatchMaker(plan, part, schema).batches
    for columns in read_slices(plan, part):
        yield from batches(columns)


def _narrow(part: QueueRange, predicates: Predicates | None) -> QueueRange:
    """The part of the range that can have matching messages."""
    if predicates is None:
        return part
    if predicates.matches_nothing or part.queue_id not in (predicates.queues or {part.queue_id}):
        return replace(part, end_offset=part.start_offset)
    start, end = predicates.queue_offsets.clip(part.start_offset, part.end_offset)
    return replace(part, start_offset=start, end_offset=end)


# --- bytes ------------------------------------------------------------------------------------


def read_slices(plan: ReadPlan, part: QueueRange) -> Iterator[RecordColumns]:
    """The records of a range, from the tier as far as planned. Raises as ``read_range``."""
    offset = part.start_offset
    if part.tier is not None:
        for offset, columns in read_direct(plan, part, part.tier):  # noqa: B007 - used below
            if columns is not None:
                yield columns
    if part.address:
        yield from _read_from_broker(plan, replace(part, start_offset=offset))


def _read_from_broker(plan: ReadPlan, part: QueueRange) -> Iterator[RecordColumns]:
    """The records of a range, reconnecting as needed. Raises as ``read_range``."""
    offset, reached_s = part.start_offset, time.monotonic()
    with Waiting() as waiting:
        while offset < part.end_offset:
            try:
                with Connections(plan.dial) as brokers:
                    connection = brokers.open(part.address)
                    for next_offset, columns in _read(connection, plan, part, offset):
                        offset = next_offset
                        if columns is not None:
                            yield columns
                        reached_s = time.monotonic()
                        waiting.worked()
            except OffsetNotFound as error:
                offset = _after_loss(plan, part, error)
            except HeadraceError as error:
                if not error.retryable or time.monotonic() > reached_s + plan.patience.retry_s:
                    raise
                waiting.failed(error)
                time.sleep(plan.patience.pause_s)


def _read(
    connection: BlockingConnection, plan: ReadPlan, part: QueueRange, offset: int
) -> Iterator[tuple[int, RecordColumns | None]]:
    """Records from ``offset`` on, each block with the next offset to read."""
    delta = part.offset_delta
    try:
        for next_offset, columns in _read_physical(connection, plan, part, offset - delta):
            if columns is not None and delta:
                columns.queue_offset = columns.queue_offset + delta
            yield next_offset + delta, columns
    except OffsetNotFound as error:
        raise error.moved(MessageQueue(part.topic, part.broker, part.queue_id), delta) from error


def _read_physical(
    connection: BlockingConnection, plan: ReadPlan, part: QueueRange, offset: int
) -> Iterator[tuple[int, RecordColumns | None]]:
    """As ``_read``, with the offsets of ``part.physical``."""
    queue, end = part.physical, part.end_offset - part.offset_delta
    found = records_by_keys(connection, plan.predicates, queue, offset, end)
    if found is not None:
        yield end, found
        return
    wanted = Wanted(
        plan.group,
        queue,
        offset,
        Subscription(part.topic, _tags(plan)),
        record_bytes_max=plan.slice_bytes,
        sql=plan.sql,
        is_physical=part.physical_queue is not None,
    )
    for start, next_offset, columns in SliceReader(connection, wanted, end):
        if columns is None and not (wanted.is_filtered or plan.table):
            raise OffsetNotFound(queue, start, next_offset, end)
        yield next_offset, columns


def _tags(plan: ReadPlan) -> str:
    """The tag expression for the broker: the narrower of the two tag filters."""
    wanted = plan.predicates.tags if plan.predicates else None
    if wanted is None or not all(_PLAIN_TAG.fullmatch(tag) for tag in wanted):
        return plan.tags
    return " || ".join(sorted(wanted))


def _after_loss(plan: ReadPlan, part: QueueRange, error: OffsetNotFound) -> int:
    """The offset to resume from after lost messages. Raises DataLoss."""
    is_expired = error.queue_offset < error.min_offset
    next_offset = min(error.min_offset, part.end_offset) if is_expired else part.end_offset
    if is_expired and plan.table:
        return next_offset
    loss = DataLoss(part.topic, part.broker, part.queue_id, error.queue_offset, str(error))
    if plan.fail_on_data_loss:
        raise loss from error
    lost_count = next_offset - error.queue_offset
    _logger.warning("skipped %s lost messages: %s", lost_count, error)
    return next_offset


# --- rows -------------------------------------------------------------------------------------


class BatchMaker:
    """Converts the records of a range to Arrow batches of one schema."""

    def __init__(self, plan: ReadPlan, part: QueueRange, schema: pa.Schema) -> None:
        self._plan = plan
        self._part = part
        self._schema = schema
        self._own_columns = own_columns(plan.body, table=plan.table)
        self._is_decoded = not self._own_columns.keys() >= set(schema.names)
        self._predicates = _all_predicates(plan, part)

    def batches(self, columns: RecordColumns) -> Iterator[pa.RecordBatch]:
        """The matching records, in batches of at most ``rows_max``."""
        for block in self._blocks(columns):
            if len(block):
                yield self._batch(block)

    def _blocks(self, columns: RecordColumns) -> Iterator[RecordBlock]:
        part, rows_max = self._part, self._plan.rows_max
        for start in range(0, len(columns), rows_max):
            some = columns.select(slice(start, start + rows_max))
            block = RecordBlock(part.topic, part.broker, part.queue_id, some)
            block = _with_keys(block) if self._plan.table else _matching(block, self._predicates)
            if (block.columns.sys_flag & COMPRESSED).any():
                yield from _decompressed(block, self._plan.slice_bytes)
            else:
                yield block

    def _batch(self, block: RecordBlock) -> pa.RecordBatch:
        decoded = self._decoded(block) if self._is_decoded else {}
        arrays = [
            block.column(self._own_columns[field.name], field.type)
            if field.name in self._own_columns
            else _cast(decoded[field.name], field.type)
            for field in self._schema
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _decoded(self, block: RecordBlock) -> dict[str, Any]:
        body = self._plan.body
        assert body is not None
        if not (self._plan.table and block.is_deleted.any()):
            columns, corrupt = body.decode(block.values)
            return {CORRUPT: corrupt, **dict(zip(body.names, columns, strict=True))}
        kept = ~block.is_deleted
        columns, corrupt = body.decode(block.values.filter(pa.array(kept)))
        # Null where the key is deleted.
        slot = pa.array(np.cumsum(kept) - 1, mask=~kept)
        columns = [column.take(slot) for column in (corrupt, *columns)]
        return dict(zip((CORRUPT, *body.names), columns, strict=True))


def _all_predicates(plan: ReadPlan, part: QueueRange) -> Predicates:
    """The predicates from the read's tag filter and from the filters that Spark pushed down."""
    tags = Subscription(part.topic, plan.tags).tags
    return Predicates(tags=tags or None) & (plan.predicates or Predicates())


def _matching(block: RecordBlock, predicates: Predicates) -> RecordBlock:
    """The records that match the predicates."""
    span = predicates.store_ms
    masks = []
    if span.start is not None:
        masks.append(block.columns.store_timestamp >= span.start)
    if span.end is not None:
        masks.append(block.columns.store_timestamp < span.end)
    if predicates.tags is not None:
        masks.append(_is_in(block.tags, predicates.tags))
    if predicates.keys is not None:
        masks.append(_is_in(block.keys, predicates.keys))
    if not masks:
        return block
    is_wanted = np.logical_and.reduce(masks)
    return block if is_wanted.all() else block.select(is_wanted)


def _with_keys(block: RecordBlock) -> RecordBlock:
    """The records that have a key."""
    keys = block.raw_keys
    has_key = pc.greater(pc.fill_null(pc.binary_length(keys), 0), 0)
    return block.select(has_key.to_numpy(zero_copy_only=False)) if keys.null_count else block


def _is_in(texts: Any, wanted: frozenset[str]) -> Array:
    return pc.is_in(texts, pa.array(sorted(wanted), pa.string())).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _decompressed(block: RecordBlock, bytes_max: int) -> Iterator[RecordBlock]:
    """The records in blocks of about ``bytes_max`` decompressed bytes, counted as they come."""
    bodies: list[bytes] = []
    first = body_bytes = 0
    for index in range(len(block)):
        bodies.append(_body(block, index))
        body_bytes += len(bodies[-1])
        if body_bytes >= bytes_max or index + 1 == len(block):
            yield block.select(slice(first, index + 1), pa.array(bodies, pa.binary()))
            bodies, body_bytes, first = [], 0, index + 1


def _body(block: RecordBlock, index: int) -> bytes:
    try:
        return block.columns.body(index)
    except UNREADABLE as error:
        offset = int(block.columns.queue_offset[index])
        raise SparkConnectorError(
            f"the body at {block.topic}/{block.broker}/{block.queue_id}@{offset} cannot be "
            f"decompressed: {error}"
        ) from error


def _cast(column: Any, kind: pa.DataType) -> Any:
    """A column with Spark's names of fields within lists and maps, which differ by release.

    Arrow casts no null struct that has a field which is never null, so equal types are left alone.
    """
    return column if column.type == kind else column.cast(kind)
