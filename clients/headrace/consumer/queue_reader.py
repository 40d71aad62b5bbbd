"""Reads a range of one queue over a plain socket, without a group, an event loop or a thread.

The next pull is in flight while the caller handles a batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.consumer.pulls import READER_GROUP, SLICE_BYTES
from headrace.consumer.queue_slices import SliceReader
from headrace.consumer.subscription import ALL, Subscription
from headrace.messages import BodyLimits, MessageBatch
from headrace_protocol.compression import BATCH_BYTES_MAX, BODY_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace_protocol.bodies import MessageQueue
    from headrace_protocol.drivers.blocking import BlockingConnection


def read_queue(
    connection: BlockingConnection,
    queue: MessageQueue,
    start_offset: int,
    end_offset: int,
    *,
    tags: str = ALL,
    group: str = READER_GROUP,
    slice_bytes: int = SLICE_BYTES,
    body_bytes_max: int = BODY_BYTES_MAX,
    batch_bytes_max: int = BATCH_BYTES_MAX,
) -> Iterator[MessageBatch]:
    """The messages from ``start_offset`` up to, but not including, ``end_offset``, in batches.

    connection: connection to a broker of the queue, for exclusive use until the end.
    tags: tag filter, ``"*"`` or ``"a || b"``. group: a group that is allowed to read.
    slice_bytes: bytes to request at once; up to two such slices are in memory.
    body_bytes_max: reading a compressed body that is larger when decompressed raises an error.
    batch_bytes_max: the same limit for all bodies of a batch, when they are read together.

    Raises OffsetNotFound where messages of the range are deleted or not yet there, BrokerError for
    a refusal, and the errors of ``BlockingConnection.drain``.
    """
    subscription = Subscription(queue.topic, tags)
    limits = BodyLimits(body_bytes_max, batch_bytes_max)
    slices = SliceReader(
        connection,
        queue,
        start_offset,
        end_offset,
        subscription=subscription,
        group=group,
        slice_bytes=slice_bytes,
    )
    for start, next_offset, columns in slices:
        if columns is not None and len(columns := subscription.filter(columns)):
            yield MessageBatch(queue, start, next_offset, columns, limits)
