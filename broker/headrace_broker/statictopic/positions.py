"""The positions of groups in logic queues, kept as physical offsets at the brokers of the items.

An offset is stored at the item that holds it. A query reads the newest item first, so when a group
goes back to an older item, the newer ones lose what they have, and expect the group, so that they
keep their messages for it; when it moves on, the older ones get their end, so that nothing is kept
for it there.
Source: docs/static-topics.md "Offsets"; tests/broker/statictopic/test_static_offsets.py.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from headrace_broker.consumer.offsets import take_reset
from headrace_broker.peers.callers import PROGRESS
from headrace_broker.statictopic.rows import item_ask
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.drivers.errors import HeadraceError
from headrace_protocol.errors import RequestError
from headrace_protocol.statictopic.offsets import decided, end_of, index_of, offset_delta

if TYPE_CHECKING:
    from headrace_broker.consumer.offsets import ConsumerOffsets
    from headrace_broker.host_budget import Host
    from headrace_broker.peers.peers import Outcome, Peers
    from headrace_broker.statictopic.leaders import Leaders
    from headrace_protocol.statictopic.mapping import Chain, MappingItem

_WITHDRAWN: Final = -1
# About 200 bytes each.
_NOTED_MAX: Final = 100_000

# Group, topic, logic queue.
Key = tuple[str, str, int]


class _Pulled(NamedTuple):
    """The item of a group's last pull. start, stop: its static offsets, with the gap behind it.

    queue_id: None if another broker has it.
    """

    start: int
    stop: int
    delta: int
    queue_id: int | None


_UNBOUNDED: Final = 2**63 - 1
_NOWHERE: Final = _Pulled(0, 0, 0, None)


class StaticPositions:
    """Positions of groups in the logic queues that this broker leads; see ``GroupPositions``."""

    def __init__(self, offsets: ConsumerOffsets, leaders: Leaders, peers: Peers) -> None:
        self._offsets = offsets
        self._leaders = leaders
        self._peers = peers
        self._pulled: dict[Key, _Pulled] = {}
        leaders.mappings.subscribe(self._pulled.clear)
        self._resets = offsets.logic_resets

    def known(self, key: Key, chain: Chain) -> int | None:
        """The last offset of a group that this leader knows. All commits come to the leader."""
        group, topic, queue_id = key
        gen, offset = self._offsets.logic_known.get((topic, group), {}).get(queue_id, (-1, 0))
        return offset if gen == chain[-1].gen else None

    def note(self, key: Key, chain: Chain, offset: int) -> None:
        """Remember the offset of a group."""
        group, topic, queue_id = key
        known = self._offsets.logic_known.setdefault((topic, group), {})
        known[queue_id] = chain[-1].gen, offset

    def learn(self, key: Key, chain: Chain, offset: int) -> None:
        """Remember an offset that an item's broker reported; on disk if it is in an item here."""
        self.note(key, chain, offset)
        item = chain[index_of(chain, offset)]
        group, topic, _ = key
        is_here = item.bname == self._leaders.mappings.broker_name
        if is_here and self._offsets.query(group, topic, item.queue_id) is None:
            self._put(key, item, max(offset - offset_delta(item), item.start_offset))

    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> bool:
        """See ``GroupPositions``."""
        key = group, topic, queue_id
        found = self.locate(topic, queue_id, offset)
        if found is None or self.is_reset(key):
            return False
        chain, index, physical = found
        self._put(key, chain[index], physical)
        self.note(key, chain, offset)
        self.moved(key, chain, index)
        return True

    def commit_pull(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """See ``GroupPositions``; an item's own broker counts what others pull there."""
        key = group, topic, queue_id
        if len(self._pulled) > _NOTED_MAX:
            self._pulled.clear()
        pulled = self._pulled.get(key)
        if pulled is None or not pulled.start <= offset < pulled.stop:
            pulled = self._pulled[key] = self._item_at(topic, queue_id, offset)
        if pulled.queue_id is not None:
            physical = max(offset - pulled.delta, 0)
            self._offsets.commit_pull(group, topic, pulled.queue_id, physical)

    def make_room(self, key: Key, chain: Chain, host: Host) -> None:
        """Count the memory of a group that is expected here. Raises RequestError."""
        group, topic, _ = key
        self._offsets.make_room(group, topic, chain[-1].queue_id, host)

    def reset(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Make a group resume at an offset; its next pull of the queue gets that offset."""
        self.take_reset(group, topic, queue_id)
        self.commit(group, topic, queue_id, offset)
        self._resets.setdefault((topic, group), {})[queue_id] = offset

    def take_reset(self, group: str, topic: str, queue_id: int) -> int | None:
        """See ``GroupPositions``."""
        return take_reset(self._resets, (topic, group), queue_id)

    def is_reset(self, key: Key) -> bool:
        """True while a reset waits for the group's next pull, so that commits don't count."""
        group, topic, queue_id = key
        return bool(self._resets) and queue_id in self._resets.get((topic, group), ())

    def locate(self, topic: str, queue_id: int, offset: int) -> tuple[Chain, int, int] | None:
        """The chain, the index of the item that holds a static offset, and the offset there.

        None if this broker does not lead the queue, or its offsets are undecided.
        """
        try:
            chain = self._leaders.chain(topic, queue_id)
        except RequestError:
            return None
        if not decided(chain):
            return None
        index = index_of(chain, offset)
        item = chain[index]
        return chain, index, max(offset - offset_delta(item), item.start_offset)

    def _item_at(self, topic: str, queue_id: int, offset: int) -> _Pulled:
        found = self.locate(topic, queue_id, offset)
        if found is None:
            return _NOWHERE
        chain, index, _ = found
        item, stop = chain[index], _UNBOUNDED
        if index + 1 < len(chain) and (next_start := chain[index + 1].logic_offset) >= 0:
            stop = next_start
        is_here = item.bname == self._leaders.mappings.broker_name
        queue_id_here = item.queue_id if is_here else None
        return _Pulled(item.logic_offset, stop, offset_delta(item), queue_id_here)

    def moved(self, key: Key, chain: Chain, index: int) -> None:
        """Adapt the other items after a commit at another item than the last time."""
        group, topic, queue_id = key
        # The item of the last commit; its neighbours need no change.
        gens = self._offsets.logic_gens.setdefault((topic, group), {})
        gen, last = chain[index].gen, gens.get(queue_id)
        if gen == last:
            return
        gens[queue_id] = gen
        for newer in range(index + 1, len(chain)):
            self._put(key, chain[newer], _WITHDRAWN)
        for older in range(index):
            end = end_of(chain, older)
            if end is not None and (last is None or chain[older].gen >= last):
                self._put(key, chain[older], end)

    def _put(self, key: Key, item: MappingItem, offset: int) -> None:
        """Store or withdraw an offset at an item's broker, without waiting for another broker."""
        group, topic, _ = key
        if item.bname != self._leaders.mappings.broker_name:
            self._send(key, item, offset)
        elif offset == _WITHDRAWN:
            self._offsets.withdraw(group, topic, item.queue_id)
        else:
            self._offsets.commit(group, topic, item.queue_id, offset)

    def _send(self, key: Key, item: MappingItem, offset: int) -> None:
        code = RequestCode.UPDATE_CONSUMER_OFFSET
        named = {"consumerGroup": key[0], "topic": key[1]}
        self._peers.begin(PROGRESS, item_ask(code, named, item, offset), partial(self._sent, key))

    def _sent(self, key: Key, outcome: Outcome) -> None:
        """Make the next commit look at all items again if one was not reached."""
        if isinstance(outcome, HeadraceError) or outcome.command.code not in _DONE:
            group, topic, queue_id = key
            self._offsets.logic_gens.get((topic, group), {}).pop(queue_id, None)


_DONE: Final = frozenset({ResponseCode.SUCCESS, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST})
