"""Shares of a topic's queues: RocketMQ's strategies, and what members that pop get."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Final

from headrace_protocol.bodies import MessageQueue
from headrace_protocol.pop.headers import ANY_QUEUE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Share = Callable[[Sequence[MessageQueue], Sequence[str], str], Sequence[MessageQueue]]


def averagely(
    queues: Sequence[MessageQueue], client_ids: Sequence[str], client_id: str
) -> Sequence[MessageQueue]:
    """Consecutive queues; the first members get one more if needed. RocketMQ's default, AVG."""
    index = client_ids.index(client_id)
    share, more = divmod(len(queues), len(client_ids))
    start = index * share + min(index, more)
    return queues[start : start + share + (index < more)]


def averagely_by_circle(
    queues: Sequence[MessageQueue], client_ids: Sequence[str], client_id: str
) -> Sequence[MessageQueue]:
    """Every n-th queue, with n members (AVG_BY_CIRCLE)."""
    return queues[client_ids.index(client_id) :: len(client_ids)]


# The strategies that brokers know, by RocketMQ's names.
SHARES: Final[Mapping[str, Share]] = {"AVG": averagely, "AVG_BY_CIRCLE": averagely_by_circle}


def popped_queues(
    share: Share,
    queues: Sequence[MessageQueue],
    client_ids: Sequence[str],
    client_id: str,
    share_queue_num: int,
) -> list[MessageQueue]:
    """The queues that a member pops.

    share_queue_num: number of next members whose queues it pops as well. If that is nobody or
    everybody, each member pops all queues of each broker.
    """
    if not 0 < share_queue_num < len(client_ids) - 1:
        names = dict.fromkeys((queue.topic, queue.broker_name) for queue in queues)
        return [MessageQueue(topic, name, ANY_QUEUE) for topic, name in names]
    index = client_ids.index(client_id)
    if len(client_ids) > len(queues):
        # A share for each member.
        return [queues[index % len(queues)]] if queues else []
    members = [client_ids[(index + n) % len(client_ids)] for n in range(share_queue_num + 1)]
    shares = (share(queues, client_ids, member) for member in members)
    return sorted(set(chain.from_iterable(shares)))
