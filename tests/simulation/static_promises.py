"""Promises of a static topic: its history, and its mappings after each change of one.

As for a plain cluster (``history``), and besides:

- a key has one queue, unless queues were added;
- offsets ascend and are those of the acknowledgements; -1 is acknowledged only while a queue moves
  in available mode, and where all moves are strict, offsets have no gap;
- what an item of a chain has decided never changes, on any broker;
- where all moves are strict, one broker at most takes a queue's messages;
- the end of a queue never falls;
- a group's offset is one that the group committed, or the border of an item. It never passes the
  end of the queue, and goes back only by a commit, or because a broker died before it saved them;
- what has expired had been consumed by the groups whose offset was on disk before.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import trio

from headrace_broker.statictopic.table import MappingTable
from headrace_protocol.bodies import MessageQueue
from headrace_protocol.statictopic.mapping import MappingItem, TopicMapping
from tests.simulation.cluster import BrokerMachine
from tests.simulation.history import History, Place, PromiseBroken
from tests.support.faulty_files import FaultyFiles

# Each broker notes these for itself.
_OWN_FIELDS = {"end_offset", "time_of_start", "time_of_end"}
_UNDECIDED = -1
# How long a commit may be under way, and how long a broker keeps commits in memory alone.
LATE_S_MAX = 10.0
UNSAVED_S = 6.0


class Seen(NamedTuple):
    """A group's offset as a broker answered it."""

    offset: int
    asked_s: float
    answered_s: float


@dataclass
class StaticHistory(History):
    """Everything that happened to a static topic; it loses nothing, whatever is on its way.

    is_strict: whether all moves of its queues are. queue_count: with which it was created.
    commits: by group and queue, each offset that the group was about to commit, and when it last
    was; the commit may not have arrived. answers: what brokers said the group's offset is.
    """

    is_strict: bool = True
    queue_count: int = 0
    commits: dict[tuple[str, MessageQueue], dict[int, float]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    answers: dict[tuple[str, MessageQueue], list[Seen]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def check_dense(self) -> None:
        for queue, messages in self.final.items():
            offsets = [offset for offset, _ in messages]
            if offsets != sorted(set(offsets)):
                raise PromiseBroken(f"{queue} holds the offsets {offsets}")
        if self.is_strict:
            ends = Counter(place.queue for place in self._final_places())
            for place in self._final_places():
                if place.queue_offset >= ends[place.queue]:
                    raise PromiseBroken(f"{place.queue} has {ends[place.queue]} messages: {place}")

    def _final_places(self) -> dict[Place, bytes]:
        """The messages at the end, and the expired: somewhere in a chain, but not unread."""
        expired = {got.place: got.body for got in self.got} if self.expires else {}
        return expired | {
            Place(queue, offset): body
            for queue, messages in self.final.items()
            for offset, body in messages
        }

    def check_keys(self) -> None:
        """In available mode, sends at both brokers of a queue may overtake each other."""
        queues: dict[str, set[MessageQueue]] = defaultdict(set)
        for queue, messages in self.final.items():
            for _, body in messages:
                queues[self.sent[body].key].add(queue)
        for key, of_key in queues.items():
            if len(of_key) > 1 and len(self.final) == self.queue_count:
                raise PromiseBroken(f"{key} is in {sorted(of_key)}")
        if self.is_strict:
            super().check_keys()

    @property
    def expires(self) -> bool:
        """True if messages are removed in the end; the clocks jump, so at no certain age."""
        return self.reserved_s < math.inf

    def check_acks(self) -> set[MessageQueue]:
        there = self._final_places()
        self.findings["expired"] += len(there) - sum(map(len, self.final.values()))
        bodies = {(place.queue, body) for place, body in there.items()}
        for ack in self.acks:
            queue, offset = ack.place
            is_undecided = offset == _UNDECIDED
            if is_undecided:
                self.findings["acknowledged without an offset"] += 1
            if is_undecided and self.is_strict:
                raise PromiseBroken(f"{ack} has no offset in strict mode")
            if (queue, ack.body) not in bodies:
                raise PromiseBroken(f"{ack} is not there")
            if not is_undecided and there.get(ack.place) != ack.body:
                raise PromiseBroken(f"{ack} is not there, but {there.get(ack.place)!r}")
        return set()

    def _wanted_by(self, group: str) -> set[Place]:
        """All that is there. What has expired was kept for a group from its first offset on."""
        there = {
            Place(queue, at)
            for queue, messages in self.final.items()
            for at, _ in messages
            if at >= self.firsts.get(queue, 0)
        }
        return there | {
            place
            for place in self._final_places()
            if place.queue_offset >= self._kept_from(group, place.queue)
        }

    def _kept_from(self, group: str, queue: MessageQueue) -> float:
        """The first offset of a group that no broker may have forgotten."""
        kept = (each.offset for each in self.answers[group, queue] if self._is_saved(each))
        return next(kept, math.inf)

    def _is_saved(self, seen: Seen) -> bool:
        """True if all brokers lived on until an offset that one of them had was on disk."""
        return not any(
            life.end and seen.asked_s <= life.ended_s <= seen.answered_s + UNSAVED_S
            for life in self.lives
        )

    def check_consumed(self) -> None:
        """Nothing is lost, so all that a group skipped had expired before its first commit."""
        super().check_consumed()
        skipped = self.findings.pop("skipped after a loss (async)", 0)
        self.findings["expired before a group's first commit"] += skipped

    def _must_be_read(self, _queue: MessageQueue) -> bool:
        return True


class OffsetWatch:
    """Looks at the ends of all queues, and at the offsets of groups."""

    def __init__(self, history: StaticHistory, mappings: MappingWatch) -> None:
        self._history = history
        self._mappings = mappings
        self._ends: dict[MessageQueue, int] = {}
        self._seen: dict[tuple[str, MessageQueue], Seen] = {}
        self._commits = history.commits

    def committing(self, group: str, queue: MessageQueue, offset: int) -> None:
        """A client is about to commit an offset."""
        self._commits[group, queue][offset] = trio.current_time()

    def check_end(self, queue: MessageQueue, end: int) -> None:
        before = self._ends.get(queue, 0)
        if end < before:
            raise PromiseBroken(f"the end of {queue} falls from {before} to {end}")
        self._ends[queue] = end

    def check(self, group: str, queue: MessageQueue, offset: int | None, asked_s: float) -> None:
        """Compare a group's offset with the end of the queue, and with what it was before."""
        what = f"{group}'s offset in {queue}"
        seen = Seen(offset or 0, asked_s, trio.current_time())
        if offset is not None:
            self._check_known(what, group, queue, offset)
            self._history.answers[group, queue].append(seen)
        before = self._seen.get((group, queue))
        if (
            before
            and seen.offset < before.offset
            and not self._may_fall(group, queue, seen, before)
        ):
            raise PromiseBroken(f"{what} falls from {before.offset} to {seen.offset}")
        self._seen[group, queue] = seen

    def _check_known(self, what: str, group: str, queue: MessageQueue, offset: int) -> None:
        if offset > self._ends[queue]:
            raise PromiseBroken(f"{what} is {offset}, behind the end {self._ends[queue]}")
        borders = self._mappings.borders[queue.queue_id]
        if offset not in self._commits[group, queue] and offset not in borders:
            raise PromiseBroken(f"{what} is {offset}, which the group never committed")

    def _may_fall(self, group: str, queue: MessageQueue, seen: Seen, before: Seen) -> bool:
        """True if a commit may have arrived since, or a broker may have forgotten commits."""
        sent_s = self._commits[group, queue].get(seen.offset, -math.inf)
        saved_s = self._commits[group, queue].get(before.offset, before.asked_s) - UNSAVED_S
        return sent_s > before.asked_s - LATE_S_MAX or any(
            life.end and life.ended_s > saved_s for life in self._history.lives
        )


class _Life(NamedTuple):
    """The table of one life of a broker; files: its disk, which is over when the life is."""

    table: MappingTable
    files: FaultyFiles


class MappingWatch:
    """Compares the brokers' mappings of a topic after each change.

    counts: how many changes it has seen.
    """

    def __init__(self, topic: str, brokers: Iterable[BrokerMachine], *, is_strict: bool) -> None:
        self.counts: Counter[str] = Counter()
        # By queue, where items start and end.
        self.borders: dict[int, set[int]] = defaultdict(set)
        self._topic = topic
        self._brokers = {broker.name: broker for broker in brokers}
        self._is_strict = is_strict
        self._lives: dict[str, _Life] = {}
        # By queue and gen, the fields that have been decided; own ones by broker besides.
        self._decided: dict[tuple[Any, ...], int | str] = {}
        self._before: dict[str, TopicMapping] = {}
        self._broken: PromiseBroken | None = None

    def check(self) -> None:
        """Raises the first PromiseBroken; the brokers go on until then."""
        if self._broken:
            raise self._broken

    def leads_changed(self, table: MappingTable) -> None:
        """A broker leads other queues than before."""
        self._lives[table.broker_name] = _Life(table, self._brokers[table.broker_name].files)
        if self._is_strict:
            self._note(self._check_leaders)

    def mapping_changed(self, table: MappingTable) -> None:
        """A broker has another mapping, which counts once it is on disk."""
        mapping = table.get(self._topic)
        if mapping is None:
            return
        hosted = mapping.hosted
        before = self._before.get(table.broker_name)
        self._before[table.broker_name] = mapping
        if before is not None and before.epoch == mapping.epoch:
            self.counts["items cleaned up"] += before.item_count - mapping.item_count

        def on_saved(problem: Exception | None) -> None:
            if problem is None:
                self.counts["changes of mappings"] += 1
                for queue, chain in hosted.items():
                    for item in chain:
                        self._note(self._check_item, table.broker_name, queue, item)

        table.saved.when_saved(on_saved)

    def _note(self, check: Callable[..., None], *arguments: Any) -> None:
        try:
            check(*arguments)
        except PromiseBroken as broken:
            self._broken = self._broken or broken

    def _check_item(self, broker: str, queue: int, item: MappingItem) -> None:
        self.borders[queue] |= {item.logic_offset, item.logic_offset + item.end_offset}
        for name, value in msgspec.structs.asdict(item).items():
            if value == _UNDECIDED:
                continue
            if self._is_strict and name == "end_offset":
                raise PromiseBroken(f"queue {queue} has a gap behind {item} on {broker}")
            owner = broker if name in _OWN_FIELDS else None
            before = self._decided.setdefault((queue, item.gen, name, owner), value)
            if before != value:
                raise PromiseBroken(
                    f"{name} of queue {queue}, gen {item.gen}, on {broker} was {before}: {item}"
                )

    def _check_leaders(self) -> None:
        leaders: dict[int, list[str]] = defaultdict(list)
        for name, life in self._lives.items():
            if self._brokers[name].files is life.files and not life.files.is_over:
                for queue in life.table.led(self._topic):
                    leaders[queue].append(name)
        for queue, names in leaders.items():
            if len(names) > 1:
                raise PromiseBroken(f"{names} take messages for queue {queue}")
