"""Reads a range of one queue over a plain socket: for tasks that know what they want.

No group, no event loop, no thread. The next pull is under way while a batch is handled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.consumer.pulls import READER_GROUP, SLICE_BYTES, Wanted
from headrace.consumer.subscription import ALL, Subscription
from headrace.errors import OffsetNotFound
from headrace_protocol.message import BODY_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.messages import MessageBatch
    from headrace_protocol.bodies import MessageQueue
    from headrace_protocol.drivers.blocking import BlockingConnection
    from headrace_protocol.drivers.response import Response

_TIMEOUT_MS = 30_000


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
) -> Iterator[MessageBatch]:
    """The messages from ``start_offset`` up to, and without, ``end_offset``, in batches.

    connection: to a broker of the queue; nobody else uses it meanwhile.
    tags: ``"*"`` or ``"a || b"``: what to let through. group: has to be allowed to read.
    slice_bytes: how much is asked for at once; two such slices are in memory.
    body_bytes_max: compressed bodies that are larger than this are an error when they are read.

    Raises OffsetNotFound where the range has no messages any more, or not yet, and what
    ``BlockingConnection.drain`` and a refusal raise.
    """
    subscription = Subscription(queue.topic, tags)

    def begin(offset: int) -> tuple[Wanted, list[Response]]:
        wanted = Wanted(
            group,
            queue,
            offset,
            subscription,
            messages_max=end_offset - offset,
            record_bytes_max=slice_bytes,
            suspend_timeout_ms=0,
            body_bytes_max=body_bytes_max,
        )
        answers: list[Response] = []
        code, header = wanted.request(peer_is_headrace=connection.peer_is_headrace)
        connection.submit(code, header, b"", answers.append)
        connection.drain(waiting_max=1, timeout_ms=_TIMEOUT_MS)
        return wanted, answers

    offset = start_offset
    under_way = begin(offset) if offset < end_offset else None
    while under_way:
        wanted, answers = under_way
        connection.drain(timeout_ms=_TIMEOUT_MS)
        result = wanted.result(answers[0])
        if result.is_offset_illegal or result.next_offset <= offset:
            raise OffsetNotFound(queue, offset, result.min_offset, result.max_offset)
        offset = result.next_offset
        under_way = begin(offset) if offset < end_offset else None
        if result.batch and (batch := result.batch.before(end_offset)):
            yield batch
