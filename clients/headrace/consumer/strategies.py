"""Strategies that share queues among the members of a group, each equal to one of RocketMQ's.

A strategy gets the queues of one topic and the client ids of all members, both in RocketMQ's order,
and one of these client ids, and returns the queues of that member. All members of a group must use
the same strategy; a function of your own must also depend on nothing else.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from hashlib import md5
from typing import TYPE_CHECKING, TypeVar

from headrace.errors import ConfigurationError
from headrace_protocol.pop import shares

if TYPE_CHECKING:
    from headrace_protocol.bodies import MessageQueue

Item = TypeVar("Item")
Strategy = Callable[[Sequence["MessageQueue"], Sequence[str], str], Iterable["MessageQueue"]]

# Brokers know these two as well.
averagely = shares.averagely
averagely_by_circle = shares.averagely_by_circle


def config(mine: Collection[MessageQueue]) -> Strategy:
    """Always the queues ``mine``, without regard to other members (CONFIG).

    Retries arrive in the queues of ``%RETRY%group``: some member must have them, too.
    """

    def allocate(
        queues: Sequence[MessageQueue], _client_ids: Sequence[str], _client_id: str
    ) -> Iterable[MessageQueue]:
        return [queue for queue in queues if queue in mine]

    return allocate


def machine_room(rooms: Collection[str]) -> Strategy:
    """Queues of brokers named ``room@name`` in one of ``rooms``, and no others (MACHINE_ROOM)."""

    def allocate(
        queues: Sequence[MessageQueue], client_ids: Sequence[str], client_id: str
    ) -> Iterable[MessageQueue]:
        near = [queue for queue in queues if _room(queue.broker_name) in rooms]
        index, count = client_ids.index(client_id), len(client_ids)
        share = len(near) // count
        rest = near[count * share :]
        return [*near[index * share : (index + 1) * share], *rest[index : index + 1]]

    return allocate


def machine_room_nearby(
    inner: Strategy,
    broker_room: Callable[[MessageQueue], str],
    client_room: Callable[[str], str],
) -> Strategy:
    """Share each room's queues among its members; all share a room without members.

    inner: the strategy within a room (MACHINE_ROOM_NEARBY). broker_room: the room of a queue.
    client_room: the room of a client id.
    """

    def allocate(
        queues: Sequence[MessageQueue], client_ids: Sequence[str], client_id: str
    ) -> Iterable[MessageQueue]:
        members_of = _by_room(client_ids, client_room)
        mine: list[MessageQueue] = []
        for room, near in _by_room(queues, broker_room).items():
            members = members_of.get(room, client_ids)
            if client_id in members:
                mine += inner(near, members, client_id)
        return mine

    return allocate


def consistent_hash(virtual_nodes: int = 10) -> Strategy:
    """Each queue to the next of the members' points on a ring of MD5 hashes (CONSISTENT_HASH).

    A member that comes or goes moves few queues of the others.
    virtual_nodes: points of each member.
    """

    def allocate(
        queues: Sequence[MessageQueue], client_ids: Sequence[str], client_id: str
    ) -> Iterable[MessageQueue]:
        ring = {
            _hash(f"{member}-{number}"): member
            for member in client_ids
            for number in range(virtual_nodes)
        }
        points = sorted(ring)
        return [
            queue
            for queue in queues
            if ring[points[bisect_left(points, _hash(_text(queue))) % len(points)]] == client_id
        ]

    if virtual_nodes < 1:
        raise ConfigurationError(f"virtual_nodes={virtual_nodes}: must be at least 1")
    return allocate


_NAMED: dict[str, Strategy] = {
    "averagely": averagely,
    "averagely_by_circle": averagely_by_circle,
    "consistent_hash": consistent_hash(),
}
_WITH_ARGUMENTS = (config, machine_room, machine_room_nearby)


def named(strategy: Strategy | str) -> Strategy:
    """The strategy with a name; a function as it is. Raises ConfigurationError."""
    if callable(strategy):
        return strategy
    if strategy in _NAMED:
        return _NAMED[strategy]
    for function in _WITH_ARGUMENTS:
        if strategy == function.__name__:
            raise ConfigurationError(
                f"strategy={strategy!r} needs arguments: give "
                f"headrace.consumer.strategies.{strategy}(...) instead of the name"
            )
    raise ConfigurationError(
        f"strategy={strategy!r}: must be one of {', '.join(_NAMED)}, or a function"
    )


def name_of(strategy: Strategy) -> str:
    """A strategy's name for administrators: that of the function that is or made it."""
    name: str = getattr(strategy, "__qualname__", type(strategy).__name__)
    return name.partition(".")[0]


def _room(broker_name: str) -> str | None:
    room, *name = broker_name.rstrip("@").split("@")
    return room if len(name) == 1 else None


def _by_room(items: Iterable[Item], room_of: Callable[[Item], str]) -> dict[str, list[Item]]:
    rooms: defaultdict[str, list[Item]] = defaultdict(list)
    for item in items:
        room = room_of(item)
        if not room:
            raise ConfigurationError(f"machine_room_nearby: {item} has no room")
        rooms[room].append(item)
    return rooms


def _text(queue: MessageQueue) -> str:
    """The text that Java's toString makes of a queue."""
    return (
        f"MessageQueue [topic={queue.topic}, brokerName={queue.broker_name}, "
        f"queueId={queue.queue_id}]"
    )


def _hash(text: str) -> int:
    digest = md5(text.encode(errors="replace"), usedforsecurity=False).digest()
    return int.from_bytes(digest[:4], "big")
