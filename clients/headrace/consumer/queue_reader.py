"""Reads a range of one queue over a plain socket: for tasks that know what they want.

No group, no event loop, no thread. The next pull is under way while a batch is handled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.consumer.pulls import READER_GROUP, SLICE_BYTES
from headrace.consumer.queue_slices import SliceReader
from headrace.consumer.subscription import ALL, Subscription
from headrace.messages import BodyLimits, MessageBatch
from headrace_protocol.message import BATCH_BYTES_MAX, BODY_BYTES_MAX

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
    """The messages from ``start_offset`` up to, and without, ``end_offset``, in batches.

    connection: to a broker of the queue; nobody else uses it meanwhile.
    tags: ``"*"`` or ``"a || b"``: what to let through. group: has to be allowed to read.
    slice_bytes: how much is asked for at once; two such slices are in memory.
    body_bytes_max: compressed bodies that are larger than this are an error when they are read.
    batch_bytes_max: the same for the bodies of a batch that are read at once.

    Raises OffsetNotFound where the range has no messages any more, or not yet, and what
    ``BlockingConnection.drain`` and a refusal raise.
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
