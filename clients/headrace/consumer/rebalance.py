"""The share of one member of a group, which each member computes by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.consumer.strategies import name_of
from headrace.errors import HeadraceError, StrategyFailed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace.consumer.strategies import Strategy
    from headrace_protocol.bodies import MessageQueue


def java_order(text: str) -> bytes:
    """Sort key of Java's String order: by UTF-16 units, not by code points."""
    return text.encode("utf-16-be", "surrogatepass")


def queue_order(queue: MessageQueue) -> tuple[bytes, bytes, int]:
    """Sort key of RocketMQ's MessageQueue order."""
    return java_order(queue.topic), java_order(queue.broker_name), queue.queue_id


def allocate(
    strategy: Strategy, queues: Iterable[MessageQueue], client_ids: Iterable[str], client_id: str
) -> set[MessageQueue]:
    """The share of ``client_id``, equal to the official clients', so a group can mix both kinds.

    All members must see the same queues and members, in any order. Empty if ``client_id`` is not a
    member (yet). Raises StrategyFailed.
    """
    ordered = sorted(queues, key=queue_order)
    members = sorted(set(client_ids), key=java_order)
    if client_id not in members:
        return set()
    try:
        return set(ordered).intersection(strategy(ordered, members, client_id))
    except HeadraceError:
        raise
    except Exception as error:
        raise StrategyFailed(f"strategy {name_of(strategy)} failed: {error!r}") from error
