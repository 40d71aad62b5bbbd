"""The history of a run as clients saw it, and its rules, in the manner of Jepsen's models.

A queue is a register per offset: written once, by one send, and read as it was written. Producers
note what they send and what was acknowledged, consumers what they get; at the end everything that
the brokers hold is read from each queue's first offset to its last. Then:

- nothing was invented or changed: every message that anybody got was sent as it is;
- offsets are dense: each from the first to the last has one message;
- reads agree: who read an offset read the message that is there at the end;
- acknowledged is there at the end, at the offset that the acknowledgement named, or has expired:
  it is older than ``reserved_s``, and each group was given it;
- every message that is there was consumed by each group, and by the ordered one in order; a group
  with a filter gets all that pass it and no others;
- acknowledged messages of one key stand in the order in which they were sent.

A broker with synchronous flush must keep all of that. One without may lose, when the power fails,
what was acknowledged less than ``window_s`` before the end of that life; what took the place of
the lost ones may stay unread by who was past them. Any broker may lose so what its producer did
not want to wait for (WAIT=false).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.received import ReceivedMessage
from headrace_protocol.bodies import MessageQueue

# Of what is sent in batches.
BATCH_KEY = "batch"
# Of the groups whose names begin so.
FILTERED = "filtered"
FILTER = "TAGS = 'red' OR KEYS IN ('key1', 'none')"


class PromiseBroken(Exception):
    """The cluster lost a message, made one up, or mixed an order up."""


class Sent(NamedTuple):
    """A message that a producer gave to a broker; ``number`` counts those of its key.

    waits: whether the acknowledgement is to come when a broker with synchronous flush has it on
    disk.
    """

    key: str
    number: int
    tag: str
    body: bytes
    waits: bool = True

    def is_for(self, group: str) -> bool:
        """True unless the group has a filter that rejects it."""
        return not group.startswith(FILTERED) or self.tag == "red" or self.key == "key1"


class Place(NamedTuple):
    """An offset of a queue."""

    queue: MessageQueue
    queue_offset: int


class Ack(NamedTuple):
    """A message that a broker has acknowledged. life: the broker's when the client got to know."""

    place: Place
    body: bytes
    life: int
    sent_s: float
    time_s: float


class Got(NamedTuple):
    """A message that a member of a group was handed."""

    group: str
    member: int
    place: Place
    body: bytes


@dataclass
class Life:
    """One broker process.

    has_started: its recovery was finished. failed_s: when its disk failed a sync, after which
    nothing is promised. ended_s, end: when and how it ended: "stop", "kill" or "power cut".
    """

    broker: str
    has_started: bool = False
    failed_s: float | None = None
    ended_s: float = 0.0
    end: str = ""


@dataclass
class History:
    """Everything that happened, in order.

    reserved_s: the age from which on messages may be removed that all groups have consumed.
    final: what the brokers hold at the end. firsts: the first offset of each queue then.
    """

    is_sync: bool
    window_s: float
    reserved_s: float = math.inf
    sent: dict[bytes, Sent] = field(default_factory=dict)
    acks: list[Ack] = field(default_factory=list)
    got: list[Got] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    final: dict[MessageQueue, list[tuple[int, bytes]]] = field(default_factory=dict)
    firsts: dict[MessageQueue, int] = field(default_factory=dict)
    ended_s: float = 0.0
    findings: Counter[str] = field(default_factory=Counter)
    loss_window_s: float = 0.0

    # -- what clients note -------------------------------------------------------------------------

    def received(self, group: str, member: int, message: ReceivedMessage) -> None:
        """A member got a message. Raises PromiseBroken for one that nobody sent."""
        self.check_sent(message)
        if not self.sent[message.body].is_for(group):
            raise PromiseBroken(f"{group} got {message}, which its filter rejects")
        place = Place(message.queue, message.queue_offset)
        self.got.append(Got(group, member, place, message.body))

    def check_sent(self, message: ReceivedMessage) -> None:
        sent = self.sent.get(message.body)
        if sent is None:
            raise PromiseBroken(f"{message} was never sent: {message.body[:80]!r}")
        if (message.key, message.tag) != (sent.key, sent.tag):
            raise PromiseBroken(f"{message} has key {message.key} and tag {message.tag}: {sent}")

    def read_finally(
        self, queue: MessageQueue, first: int, messages: Iterable[ReceivedMessage]
    ) -> None:
        """The messages of a queue at the end, from its first offset on. Raises PromiseBroken."""
        self.firsts[queue] = first
        kept = self.final[queue] = []
        for message in messages:
            self.check_sent(message)
            kept.append((message.queue_offset, message.body))

    # -- what must be true -------------------------------------------------------------------------

    def check(self) -> None:
        """Raises PromiseBroken; counts duplicates and what async flush lost."""
        self.check_dense()
        self.check_keys()
        lost = self.check_acks()
        self.check_reads(lost)
        self.check_order()
        self.check_consumed()
        self.count_duplicates()

    def check_dense(self) -> None:
        for queue, messages in self.final.items():
            offsets = [offset for offset, _ in messages]
            first = self.firsts.get(queue, 0)
            if offsets != list(range(first, first + len(offsets))):
                raise PromiseBroken(f"{queue}, from {first} on, holds the offsets {offsets}")

    def check_keys(self) -> None:
        """Check orders: the unacknowledged may come late, and repeated sends be there twice."""
        acked = {(ack.place, ack.body) for ack in self.acks}
        for queue, messages in self.final.items():
            last: dict[str, int] = {}
            for offset, body in messages:
                key, number = self.sent[body][:2]
                if (Place(queue, offset), body) in acked:
                    if number < last.get(key, -1):
                        raise PromiseBroken(f"{queue}: {key}/{number} stands after {last[key]}")
                    last[key] = number

    def check_acks(self) -> set[MessageQueue]:
        """Returns the queues that lost something, as async flush may."""
        there = self._final_places()
        lost_in = set()
        for ack in self.acks:
            if self._is_expired(ack.place):
                self._check_may_expire(ack)
                if not self._must_be_read(ack.place.queue):
                    continue  # who was past it has not read it, and nobody knows it any more
            if there.get(ack.place) != ack.body:
                self._check_may_be_lost(ack)
                how = "WAIT=false" if self.is_sync else "async"
                self.findings[f"acknowledged, then lost ({how})"] += 1
                lost_in.add(ack.place.queue)
        return lost_in

    def _is_expired(self, place: Place) -> bool:
        return place.queue_offset < self.firsts.get(place.queue, 0)

    def _check_may_expire(self, ack: Ack) -> None:
        self.findings["acknowledged, then expired"] += 1
        age_s = self.ended_s - ack.sent_s
        if age_s < self.reserved_s:
            raise PromiseBroken(f"{ack.place} expired {age_s:.3f} s after it was sent")

    def _final_places(self) -> dict[Place, bytes]:
        """The messages at the end, and the expired ones that somebody has read."""
        expired = {got.place: got.body for got in self.got if self._is_expired(got.place)}
        return expired | {
            Place(queue, offset): body
            for queue, messages in self.final.items()
            for offset, body in messages
        }

    def _check_may_be_lost(self, ack: Ack) -> None:
        what = f"{ack.body[:40]!r}, acknowledged at {ack.time_s:.3f} s as {ack.place}"
        if self.is_sync and self.sent[ack.body].waits:
            raise PromiseBroken(f"{what}, is not there")
        ages_s = [
            min(life.ended_s, life.failed_s or life.ended_s) - ack.time_s
            for number, life in self._lives_of(ack)
            if self._has_lost_power(number)
        ]
        if not ages_s:
            raise PromiseBroken(f"{what}, is not there, though its broker did not lose power")
        if min(ages_s) > self.window_s:
            raise PromiseBroken(f"{what}, is not there, {min(ages_s):.3f} s before a power cut")
        self.loss_window_s = max(self.loss_window_s, min(ages_s))

    def _lives_of(self, ack: Ack) -> Iterator[tuple[int, Life]]:
        """Those that may have stored it: an answer may come when the next life has begun."""
        for number, life in enumerate(self.lives[: ack.life + 1]):
            is_over = bool(life.end) and life.ended_s < ack.sent_s
            if life.broker == ack.place.queue.broker_name and not is_over:
                yield number, life

    def _has_lost_power(self, number: int) -> bool:
        """True if what a life wrote was exposed to a power cut before a start made it durable."""
        first = self.lives[number]
        for life in self.lives[number:]:
            if life.broker == first.broker:
                if life is not first and life.has_started:
                    return False
                if life.end == "power cut":
                    return True
        return False

    def check_reads(self, lost_in: set[MessageQueue]) -> None:
        there = self._final_places()
        for got in self.got:
            if there.get(got.place) != got.body:
                if self.is_sync or not self._any_power_cut(got.place.queue.broker_name):
                    raise PromiseBroken(f"{got} is not what is there: {there.get(got.place)!r}")
                self.findings["consumed, then lost (async)"] += 1
                lost_in.add(got.place.queue)

    def _any_power_cut(self, broker: str) -> bool:
        return any(life.broker == broker and life.end == "power cut" for life in self.lives)

    def check_order(self) -> None:
        """Whoever reads in order gets what he gets for the first time in the queue's order."""
        first_seen: dict[tuple[str, MessageQueue], dict[int, None]] = defaultdict(dict)
        for got in self.got:
            if got.group.startswith("ordered"):
                first_seen[got.group, got.place.queue].setdefault(got.place.queue_offset)
        for (group, queue), offsets in first_seen.items():
            if list(offsets) != sorted(offsets) and self._must_be_read(queue):
                raise PromiseBroken(f"{group} got {queue} in the order {list(offsets)}")

    def check_consumed(self) -> None:
        for group in {got.group for got in self.got}:
            read = {got.place for got in self.got if got.group == group}
            missing = self._places_for(group) - read
            unread = missing & self._wanted_by(group)
            if unread:
                raise PromiseBroken(f"{group} never got {sorted(unread)}")
            self.findings["skipped after a loss (async)"] += len(missing)

    def _must_be_read(self, queue: MessageQueue) -> bool:
        """A group's progress may be past what an async broker lost; then it skips or repeats."""
        return self.is_sync or not self._any_power_cut(queue.broker_name)

    def is_consumed(self, groups: Iterable[str]) -> bool:
        """True if every group got what must be read of what is there at the end."""
        read = defaultdict(set)
        for got in self.got:
            read[got.group].add(got.place)
        return all(self._wanted_by(group) <= read[group] for group in groups)

    def _wanted_by(self, group: str) -> set[Place]:
        """The messages that a group must have been given in the end."""
        return {place for place in self._places_for(group) if self._must_be_read(place.queue)}

    def _places_for(self, group: str) -> set[Place]:
        """The messages that are there at the end and pass the filter of a group."""
        places = self._final_places().items()
        return {place for place, body in places if self.sent[body].is_for(group)}

    def count_duplicates(self) -> None:
        stored = Counter(body for messages in self.final.values() for _, body in messages)
        self.findings["stored twice"] += sum(count - 1 for count in stored.values())
        read = Counter((got.group, got.place) for got in self.got)
        self.findings["consumed twice"] += sum(count - 1 for count in read.values())
