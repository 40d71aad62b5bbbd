"""Who of a group reads which queue: pure functions that every member computes for itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_protocol.bodies import MessageQueue


def java_order(text: str) -> bytes:
    """Sort key of Java's String order: by UTF-16 units, not by code points."""
    return text.encode("utf-16-be", "surrogatepass")


def queue_order(queue: MessageQueue) -> tuple[bytes, bytes, int]:
    """Sort key of the peer's MessageQueue order."""
    return java_order(queue.topic), java_order(queue.broker_name), queue.queue_id


def allocate_averagely(
    queues: Sequence[MessageQueue], client_ids: Sequence[str], client_id: str
) -> list[MessageQueue]:
    """The share of ``client_id``: neighbouring queues, and one more for the first members.

    The official clients' default ("AVG"), so that members of either kind share a group. All must
    see the same queues and members, in any order. Not a member (yet): nothing.
    """
    members = sorted(set(client_ids), key=java_order)
    if client_id not in members:
        return []
    index = members.index(client_id)
    share, more = divmod(len(queues), len(members))
    start = index * share + min(index, more)
    end = start + share + (index < more)
    return sorted(queues, key=queue_order)[start:end]
