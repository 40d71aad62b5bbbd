"""What the log of pops says, brought in line with the store that a start found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_broker.queue_directory import Use

if TYPE_CHECKING:
    from headrace_broker.core import Tables
    from headrace_broker.pop.pop_queue import PopQueue
    from headrace_broker.pop.pops import Pops
    from headrace_broker.queue_directory import QueueDirectory


def bring_in_line(pops: Pops, tables: Tables, directory: QueueDirectory) -> None:
    """Forget what is gone or newer than the store.

    A power cut may have taken messages that were out. Another broker may have written the store,
    which shows in offsets that are ahead, or have deleted a topic or made it anew. What the groups'
    offsets count is acked, whatever the log of pops says.
    """
    topics, _, _, offsets = tables
    for queue in list(pops):
        group, topic, queue_id = queue.name
        place = directory.find(topic, queue_id, Use.INSPECT) if topics.get(topic) else None
        if place is None:
            pops.forget(queue)
            continue
        made_at = topics.incarnations.created_at(topic)
        committed = offsets.query(group, topic, queue_id) or 0
        _settle(pops, queue, committed, place.source.max_offset(), made_at)


def _settle(pops: Pops, queue: PopQueue, low: int, end: int, made_at: int) -> None:
    """Settle what lies before ``low``, from ``end`` on, or in a topic that was there before."""
    for checkpoint in list(queue):
        is_old = checkpoint.physical_offset < made_at
        bits = sum(bit for offset, bit in checkpoint.out() if is_old or not low <= offset < end)
        if bits:
            pops.settle(checkpoint, bits)
    next_offset = min(max(queue.next_offset, low), end)
    if next_offset != queue.next_offset:
        pops.move(queue, next_offset)
