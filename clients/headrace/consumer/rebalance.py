"""Allocation of queues to the members of a group: pure functions that each member evaluates."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_protocol.bodies import MessageQueue


def java_order(text: str) -> bytes:
    """Sort key of Java's String order: by UTF-16 units, not by code points."""
    return text.encode("utf-16-be", "surrogatepass")


def queue_order(queue: MessageQueue) -> tuple[bytes, bytes, int]:
    """Sort key of RocketMQ's MessageQueue order."""
    return java_order(queue.topic), java_order(queue.broker_name), queue.queue_id


def allocate_averagely(
    queues: Sequence[MessageQueue], client_ids: Sequence[str], client_id: str
) -> list[MessageQueue]:
    """The share of ``client_id``: consecutive queues; the first members get one more if needed.

    This is the official clients' default ("AVG"), so a group can mix members of both kinds. All
    members must see the same queues and members, in any order. Empty if ``client_id`` is not a
    member (yet).
    """
    members = sorted(set(client_ids), key=java_order)
    if client_id not in members:
        return []
    index = members.index(client_id)
    share, more = divmod(len(queues), len(members))
    start = index * share + min(index, more)
    end = start + share + (index < more)
    return sorted(queues, key=queue_order)[start:end]
