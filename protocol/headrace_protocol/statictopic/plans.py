"""Plans of changes to a static topic: create, grow, remap and rebalance.

A plan is made from what all masters have of the topic, and carried out in four steps: ``claims``
keeps other tools out, ``closing`` writes the brokers that stop leading a queue, the tool reads the
ends of the closed queues, and ``final`` writes every broker. Each step has an epoch of its own, the
last one that of the plan.
Source: docs/static-topics.md "How a change is made"; tests/protocol/test_statictopic_plans.py.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from headrace_protocol.bounds import QUEUE_NUMS_MAX
from headrace_protocol.errors import PortableError
from headrace_protocol.statictopic.checks import check_cluster
from headrace_protocol.statictopic.mapping import UNDECIDED, MappingItem, TopicMapping
from headrace_protocol.statictopic.offsets import round_up, static_offset

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from headrace_protocol.statictopic.mapping import Chain

# How much a change raises the epoch at least, which is in ms.
_EPOCH_STEP = 1000


class Mode(Enum):
    """A way to move a queue. STRICT: without a gap in its offsets. AVAILABLE: as Apache's tools."""

    STRICT = "strict"
    AVAILABLE = "available"


class BrokerTopic(msgspec.Struct, frozen=True, kw_only=True):
    """The topic at one master; by default nothing.

    is_lost: its mapping is lost or unreadable, though it has the topic.
    """

    mapping: TopicMapping | None = None
    read_queues: int = 0
    write_queues: int = 0
    is_lost: bool = False


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One request: a broker's new mapping and numbers of physical queues.

    emptied: logic queue -> empty item that leaves the chain when this broker opens the queue, and
    whose broker has the offsets of groups. force: the broker takes it even though items are given
    up.
    """

    broker: str
    mapping: TopicMapping
    read_queues: int
    write_queues: int
    emptied: dict[int, MappingItem] = {}
    force: bool = False


class Closed(NamedTuple):
    """An item that is no longer written, as its broker has it now, and its physical end."""

    item: MappingItem
    end: int


class Gone(msgspec.Struct, frozen=True, kw_only=True):
    """Static offsets of a logic queue whose messages are given up.

    broker: None if nobody knows which one led the queue. end: exclusive; None if unknown.
    """

    queue: int
    broker: str | None
    start: int
    end: int | None


Brokers = dict[str, BrokerTopic]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A change of a topic.

    before: broker -> what it has now. known: logic queue -> its newest chain now.
    chains: logic queue -> its chain after the change; a moved queue's leader is undecided.
    queues: broker -> its new number of physical queues. epoch: of the mappings after the change.
    jumping: queues whose offsets must jump in any mode. gone: offsets that it gives up.
    """

    topic: str
    mode: Mode
    epoch: int
    total_queues: int
    before: Brokers
    known: dict[int, Chain]
    chains: dict[int, Chain]
    queues: dict[str, int]
    jumping: frozenset[int] = frozenset()
    gone: tuple[Gone, ...] = ()

    def moved(self) -> dict[int, Chain]:
        """Chains of the queues whose new leader is undecided."""
        return {queue: chain for queue, chain in self.chains.items() if _is_open(chain)}

    def claims(self) -> list[list[Step]]:
        """The first requests: a new epoch for all brokers, the first broker alone.

        No other request is sent before all are accepted. So of two tools that have read the same
        epoch one fails, most often at the first broker, with nothing changed. A broker whose
        mapping is lost is left out: the loss would be forgotten.
        """
        claims = [
            self._claim(name) for name in sorted(self.before) if not self.before[name].is_lost
        ]
        return [claims[:1], claims[1:]]

    def _claim(self, broker: str) -> Step:
        """A broker keeps what it has, but stops leading what another one is known to lead."""
        own = self.before[broker]
        known = own.mapping or self._largest()
        step = self._step(broker, _outgoing(own, self.known), self.epoch - 3)
        mapping = msgspec.structs.replace(
            step.mapping,
            total_queues=known.total_queues if known else self.total_queues,
            dirty=known.dirty if known else True,
        )
        return msgspec.structs.replace(step, mapping=mapping)

    def _largest(self) -> TopicMapping | None:
        """The mapping that knows most queues; None for a topic that is created."""
        known = [each.mapping for each in self.before.values() if each.mapping]
        return max(known, key=lambda each: (each.total_queues, not each.dirty), default=None)

    def closing(self) -> list[list[Step]]:
        """The requests after the claims: brokers stop leading the queues that others are to lead.

        In available mode their new leaders come first, and take messages from then on.
        Each inner list has requests to different brokers, which may be sent side by side.
        """
        closed = {name: _outgoing(topic, self.chains) for name, topic in self.before.items()}
        opened = _by_leader(self.moved()) if self.mode is Mode.AVAILABLE else {}
        return [
            [self._step(name, queues, self.epoch - 2) for name, queues in stage.items() if queues]
            for stage in (opened, closed)
        ]

    def closed_items(self) -> dict[int, MappingItem]:
        """Logic queue -> item whose physical end decides where the new leader starts."""
        return {queue: chain[-2] for queue, chain in self.moved().items()}

    def final(self, closed: Mapping[int, Closed], exact: Collection[str]) -> list[list[Step]]:
        """The last requests: all brokers, those that start to lead a queue first; see ``closing``.

        closed: what became of the ``closed_items``, by logic queue.
        exact: brokers whose ends can't grow any more: all but Apache's. Behind another broker's
        end the offsets jump even in strict mode.
        """
        chains = self._decided(closed, exact)
        leading = _by_leader({queue: chains[queue] for queue in closed})
        emptied = {
            name: {
                queue: closed[queue].item
                for queue, chain in queues.items()
                if all(item.gen != closed[queue].item.gen for item in chain)
            }
            for name, queues in leading.items()
        }
        full = {
            name: self._step(name, self._hosted(name, chains), self.epoch, emptied.get(name))
            for name in self.before
        }
        # A leader is written before every broker that has its chain decided.
        opening = [
            self._step(name, queues, self.epoch - 1, emptied[name])
            for name, queues in leading.items()
            if full[name].mapping.hosted.keys() & closed.keys() - queues.keys()
        ]
        first = leading.keys() - {step.broker for step in opening}
        return [
            opening,
            [step for name, step in full.items() if name in first],
            [step for name, step in full.items() if name not in first],
        ]

    def _decided(self, closed: Mapping[int, Closed], exact: Collection[str]) -> dict[int, Chain]:
        """All chains, with the offsets of their new leaders; see ``final``."""
        chains = dict(self.chains)
        for queue, (item, end) in closed.items():
            is_exact = item.bname in exact
            if self.mode is Mode.AVAILABLE or queue in self.jumping or not is_exact:
                chains[queue] = _jumped(chains[queue], item, end, is_exact=is_exact)
            else:
                chains[queue] = _continued(chains[queue], item, end)
        return chains

    def _hosted(self, broker: str, chains: Mapping[int, Chain]) -> dict[int, Chain]:
        """The queues of which a broker keeps the chain: leader, second leader, and kept copies."""
        mapping = self.before[broker].mapping
        known = mapping.hosted if mapping else {}
        return {
            queue: chain
            for queue, chain in chains.items()
            if queue in known
            or any(item.bname == broker for item in (*chain[-2:], *self.chains[queue][-2:]))
        }

    def _step(
        self,
        broker: str,
        hosted: dict[int, Chain],
        epoch: int,
        emptied: dict[int, MappingItem] | None = None,
    ) -> Step:
        """A broker's chains, and the physical queues that its items need so far.

        It rejects a new item in a physical queue that it has already.
        """
        mapping = TopicMapping(
            topic=self.topic,
            bname=broker,
            epoch=epoch,
            total_queues=self.total_queues,
            hosted=hosted,
        )
        own = (item.queue_id for chain in hosted.values() for item in chain if item.bname == broker)
        needed = self.queues[broker] if epoch == self.epoch else max(own, default=-1) + 1
        return Step(
            broker=broker,
            mapping=mapping,
            read_queues=max(self.before[broker].read_queues, needed),
            write_queues=max(self.before[broker].write_queues, needed),
            emptied=emptied or {},
            force=bool(self.gone),
        )


def _outgoing(topic: BrokerTopic, chains: Mapping[int, Chain]) -> dict[int, Chain]:
    """Queues that a broker leads by its own mapping, and not by ``chains``."""
    if topic.mapping is None:
        return {}
    return {
        queue: chains[queue]
        for queue, physical in topic.mapping.led().items()
        if (chains[queue][-1].bname, chains[queue][-1].queue_id) != (topic.mapping.bname, physical)
    }


def _by_leader(chains: Mapping[int, Chain]) -> dict[str, dict[int, Chain]]:
    found: dict[str, dict[int, Chain]] = {}
    for queue, chain in chains.items():
        found.setdefault(chain[-1].bname, {})[queue] = chain
    return found


def _is_open(chain: Chain) -> bool:
    return chain[-1].logic_offset == UNDECIDED


def _continued(chain: Chain, closed: MappingItem, end: int) -> Chain:
    """A chain whose leader starts where the item before it ends."""
    leader = msgspec.structs.replace(chain[-1], logic_offset=static_offset(closed, end))
    # Two items with one logicOffset are forbidden.
    kept = () if end == closed.start_offset else (closed,)
    return (*chain[:-2], *kept, leader)


def _jumped(chain: Chain, closed: MappingItem, end: int, *, is_exact: bool) -> Chain:
    """A chain whose leader leaves room for messages that the item before it still gets."""
    start = round_up(static_offset(closed, end))
    leader = msgspec.structs.replace(chain[-1], logic_offset=start)
    if is_exact and end > closed.start_offset and closed.end_offset == UNDECIDED:
        closed = msgspec.structs.replace(closed, end_offset=end)
    return (*chain[:-2], closed, leader)


# -- plans -----------------------------------------------------------------------------------------


class InvalidChange(ValueError):
    """A change that can't be made as asked."""


class NoChange(ValueError):
    """A change of a topic that is as wanted already."""


class LostMapping(PortableError, ValueError):
    """A broker has the topic, but not its mapping."""

    def __init__(self, broker: str) -> None:
        super().__init__(
            f"broker {broker} has the topic without its mapping: a plain topic of this name, or a "
            "lost config/topicQueueMapping.json, which `headrace topic repair` restores from other "
            "brokers"
        )
        self.broker = broker


def new_epoch(brokers: Brokers, now_ms: int) -> int:
    """The epoch of the next change."""
    epochs = [each.mapping.epoch for each in brokers.values() if each.mapping]
    return max(now_ms, *(epoch + _EPOCH_STEP for epoch in epochs)) if epochs else now_ms


def plan_create(
    topic: str, total_queues: int, targets: Collection[str], brokers: Brokers, now_ms: int
) -> Plan:
    """Create a topic of ``total_queues`` logic queues on ``targets``, or add queues to it.

    brokers: all masters.
    Raises BadMapping if the topic is not whole, InvalidChange if it would shrink, NoChange if it
    has so many queues.
    """
    check_targets(targets, brokers)
    if not 1 <= total_queues <= QUEUE_NUMS_MAX:
        raise InvalidChange(f"{total_queues} queues: a static topic has 1 to {QUEUE_NUMS_MAX}")
    chains = _whole(brokers)
    if total_queues <= len(chains):
        error = NoChange if total_queues == len(chains) else InvalidChange
        raise error(
            f"static topic {topic} has {len(chains)} queues and can't have {total_queues}: "
            "queues are only added"
        )
    builder = Builder(chains, brokers, chains)
    for queue in range(len(chains), total_queues):
        builder.add(queue, builder.least(targets), logic_offset=0)
    return builder.plan(topic, Mode.STRICT, total_queues, now_ms)


def plan_remap(
    topic: str,
    targets: Collection[str],
    brokers: Brokers,
    now_ms: int,
    *,
    queues: Iterable[int] | None = None,
    mode: Mode = Mode.STRICT,
) -> Plan:
    """Move queues to ``targets``, as few as spread them evenly.

    queues: only these; otherwise all, so that no other broker leads one.
    Raises BadMapping if the topic is not whole, NoChange if every queue stays, InvalidChange.
    """
    check_targets(targets, brokers)
    chains = _whole(brokers)
    builder = Builder(chains, brokers, chains)
    if queues is None:
        moves = _even(chains, targets)
    else:
        moves = _chosen(topic, chains, targets, queues, builder)
    if not moves:
        raise NoChange(f"static topic {topic}: every queue already is where it should be")
    for queue, broker in moves.items():
        builder.move(queue, broker)
    return builder.plan(topic, mode, len(chains), now_ms)


def plan_rebalance(topic: str, brokers: Brokers, now_ms: int, mode: Mode = Mode.STRICT) -> Plan:
    """Move the fewest queues after which brokers lead equally many, give or take one."""
    return plan_remap(topic, brokers, brokers, now_ms, mode=mode)


def _whole(brokers: Brokers) -> dict[int, Chain]:
    for name, each in brokers.items():
        if each.is_lost:
            raise LostMapping(name)
    return check_cluster([each.mapping for each in brokers.values() if each.mapping])


def check_targets(targets: Collection[str], brokers: Brokers) -> None:
    """Raises InvalidChange for a target that is not a master of the cluster."""
    if not targets:
        raise InvalidChange("no broker to move queues to")
    if unknown := sorted(set(targets) - brokers.keys()):
        raise InvalidChange(
            f"no master named {unknown[0]} is registered; there are {', '.join(brokers)}"
        )


def _even(chains: Mapping[int, Chain], targets: Collection[str]) -> dict[int, str]:
    """Logic queue -> target, for the fewest moves that spread all queues over the targets.

    The brokers that lead most keep one more, where the number of queues doesn't divide.
    """
    led = dict.fromkeys(targets, 0)
    for chain in chains.values():
        if chain[-1].bname in led:
            led[chain[-1].bname] += 1
    each, rest = divmod(len(chains), len(led))
    by_size = sorted(led, key=lambda name: (-led[name], name))
    room = {name: each + (number < rest) for number, name in enumerate(by_size)}
    homeless = []
    for queue, chain in chains.items():
        if room.get(chain[-1].bname, 0):
            room[chain[-1].bname] -= 1
        else:
            homeless.append(queue)
    places = [name for name in sorted(room) for _ in range(room[name])]
    return dict(zip(homeless, places, strict=True))


def _chosen(
    topic: str,
    chains: Mapping[int, Chain],
    targets: Collection[str],
    queues: Iterable[int],
    builder: Builder,
) -> dict[int, str]:
    """Logic queue -> target, for the given queues that no target leads."""
    moves = {}
    for queue in sorted(set(queues)):
        if queue not in chains:
            raise InvalidChange(
                f"static topic {topic} has queues 0 to {len(chains) - 1}, not {queue}"
            )
        if (old := chains[queue][-1].bname) not in targets:
            moves[queue] = builder.least(targets)
            builder.led[old] -= 1
            builder.led[moves[queue]] += 1
    return moves


class Builder:
    """Chains that grow by new items, and the brokers' numbers of physical queues.

    led: broker -> number of queues that it leads.
    """

    def __init__(
        self, chains: Mapping[int, Chain], brokers: Brokers, known: Mapping[int, Chain]
    ) -> None:
        """known: the chains as brokers have them now, which may have more items than ``chains``."""
        self.chains = dict(chains)
        self._known = dict(known)
        self.led = dict.fromkeys(brokers, 0)
        # A physical queue may be promised in a chain before its broker knows.
        self._queues = {
            name: max(each.write_queues, each.read_queues) for name, each in brokers.items()
        }
        self._brokers = brokers
        for chain in chains.values():
            for item in chain:
                queues = self._queues.get(item.bname, 0)
                self._queues[item.bname] = max(queues, item.queue_id + 1)
            if chain[-1].bname in self.led:
                self.led[chain[-1].bname] += 1

    def least(self, targets: Collection[str]) -> str:
        """The target that leads fewest queues."""
        return min(targets, key=lambda name: (self.led[name], name))

    def add(self, queue: int, broker: str, logic_offset: int, gen: int = 0) -> None:
        """Append an item to the chain of a queue: a new physical queue of ``broker``."""
        item = MappingItem(
            gen=gen, bname=broker, queue_id=self._queues[broker], logic_offset=logic_offset
        )
        if item.queue_id >= QUEUE_NUMS_MAX:
            raise InvalidChange(
                f"broker {broker} has {QUEUE_NUMS_MAX} physical queues, the maximum"
            )
        self.chains[queue] = (*self.chains.get(queue, ()), item)
        self._queues[broker] += 1
        self.led[broker] += 1

    def move(self, queue: int, broker: str) -> None:
        """Give a queue a new leader, with an undecided offset."""
        old = self.chains[queue][-1]
        self.led[old.bname] -= 1
        self.add(queue, broker, UNDECIDED, old.gen + 1)

    def plan(
        self,
        topic: str,
        mode: Mode,
        total_queues: int,
        now_ms: int,
        *,
        jumping: Iterable[int] = (),
        gone: Iterable[Gone] = (),
    ) -> Plan:
        """The plan that ends with these chains."""
        return Plan(
            topic=topic,
            mode=mode,
            epoch=new_epoch(self._brokers, now_ms),
            total_queues=total_queues,
            before=self._brokers,
            known=self._known,
            chains=dict(sorted(self.chains.items())),
            queues=self._queues,
            jumping=frozenset(jumping),
            gone=tuple(gone),
        )
