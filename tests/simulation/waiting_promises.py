"""Promises about messages that wait: read from a log's records alone, without the broker.

A record that was made of another names its place, so each waiting message has one tale: the records
in which it waited, and the one in which it was delivered. A transaction has its halves, and a
commit, a discarded message or an op record that ends it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from headrace_protocol.message import StoredMessage
from headrace_protocol.system_topics import (
    CHECK_MAX_TIME_TOPIC,
    HALF_TOPIC,
    OP_HALF_TOPIC,
    SCHEDULE_TOPIC,
    TIMER_TOPIC,
    UNDELIVERED_TOPIC,
)
from tests.simulation.history import PromiseBroken

LEVELS_MS: Final = (1000, 5000, 60_000)
_QUEUES: Final = frozenset({SCHEDULE_TOPIC, TIMER_TOPIC})


class Jump(NamedTuple):
    """The clock went back. log_end: what lies before it in the log waited already."""

    log_end: int
    before_ms: int
    now_ms: int


@dataclass(repr=False)
class Tale:
    """One message: where it waited, how often it was stored to wait on, and where it went."""

    waited: list[StoredMessage] = field(default_factory=list)
    copies: int = 0
    delivered: list[StoredMessage] = field(default_factory=list)

    def __repr__(self) -> str:
        """All that a message says of itself, for a failure."""
        return "; ".join(
            f"{each.store_timestamp} ms: {each} {each.properties}"
            for each in (*self.waited, *self.delivered)
        )


@dataclass
class Transaction:
    """The halves of a transaction, the first one first, and the records that end it.

    named: place of the op record that calls a half decided, by half.
    """

    halves: list[StoredMessage] = field(default_factory=list)
    commit: StoredMessage | None = None
    discards: list[StoredMessage] = field(default_factory=list)
    named: dict[int, int] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return key_of(self.halves[0])

    @property
    def decisions(self) -> list[StoredMessage]:
        return [*self.discards, *([self.commit] if self.commit else [])]

    @property
    def is_open(self) -> bool:
        return not (self.decisions or self.named)


def key_of(message: StoredMessage) -> str:
    """The name that its producer gave a message."""
    return message.properties.get("UNIQ_KEY", "")


class WaitingLog:
    """The records of a log. recalled: where in it timers were recalled first, by key."""

    def __init__(self, messages: Sequence[StoredMessage]) -> None:
        """Raises PromiseBroken for a record that is made of nothing."""
        self.messages = messages
        self.keys = set(map(key_of, messages))
        self.recalled: dict[str, int] = {}
        self.tales: defaultdict[int, Tale] = defaultdict(Tale)
        self.transactions: defaultdict[int, Transaction] = defaultdict(Transaction)
        self._at = {message.physical_offset: message for message in messages}
        self._halves: dict[int, int] = {}  # first half of each, by place
        self._read_halves()
        self._read_ops()
        for message in messages:
            self._read(message)

    def _read_halves(self) -> None:
        places: dict[int, int] = {}
        for half in self.messages:
            if half.topic == HALF_TOPIC:
                places[half.queue_offset] = half.physical_offset
                first = int(half.properties.get("TRAN_PREPARED_QUEUE_OFFSET", half.queue_offset))
                self._halves[half.physical_offset] = places[first]
                self.transactions[places[first]].halves.append(half)

    def _read_ops(self) -> None:
        halves = {
            half.queue_offset: one for one in self.transactions.values() for half in one.halves
        }
        for op in self.messages:
            if op.topic == OP_HALF_TOPIC and "COPIED" not in op.properties:
                for name in map(int, op.body.rstrip(b",").split(b",")):
                    halves[name].named.setdefault(name, op.physical_offset)

    def _read(self, message: StoredMessage) -> None:
        source = message.prepared_transaction_offset
        if message.topic in {HALF_TOPIC, OP_HALF_TOPIC}:
            return
        if message.topic == CHECK_MAX_TIME_TOPIC:
            self._transaction(source).discards.append(message)
        elif recalled := message.properties.get("TIMER_DEL_UNIQKEY"):
            self.recalled.setdefault(recalled, message.physical_offset)
        elif source or message.topic in _QUEUES:
            root = self._root(message)
            tale = self.tales[root]
            if message.topic not in _QUEUES:
                tale.delivered.append(message)
            elif "TIMER_ROLL_TIMES" in message.properties:
                tale.copies += 1
            else:
                tale.waited.append(message)
            if root in self.transactions:
                self.transactions[root].commit = self.transactions[root].commit or message

    def _root(self, message: StoredMessage) -> int:
        """Place of the record with which a tale begins."""
        source = message.prepared_transaction_offset
        if not source:
            return message.physical_offset
        if source in self._halves:
            return self._halves[source]
        return self._root(self._source(message))

    def _source(self, message: StoredMessage) -> StoredMessage:
        source = self._at.get(message.prepared_transaction_offset)
        if source is None or source.topic not in _QUEUES:
            raise PromiseBroken(f"{message} was delivered and never waited")
        return source

    def _transaction(self, place: int) -> Transaction:
        if place not in self._halves:
            raise PromiseBroken(f"a discarded message names {place}, where no half is")
        return self.transactions[self._halves[place]]

    # -- what must hold ----------------------------------------------------------------------------

    def check(self, jumps: Sequence[Jump]) -> None:
        """Raises PromiseBroken."""
        for tale in self.tales.values():
            self._check_tale(tale, jumps)
        for one in self.transactions.values():
            _check_transaction(one)

    def _check_tale(self, tale: Tale, jumps: Sequence[Jump]) -> None:
        if len(tale.delivered) > 1 or len(tale.waited) > 1:
            raise PromiseBroken(f"delivered twice: {tale}")
        if not tale.waited or not tale.delivered:
            return
        (waited,), (delivered,) = tale.waited, tale.delivered
        if delivered.physical_offset < waited.physical_offset:
            raise PromiseBroken(f"delivered before it waited: {tale}")
        if self._recalled_at(waited) < delivered.physical_offset:
            raise PromiseBroken(f"recalled, then delivered: {tale}")
        if delivered.stored_body != waited.stored_body:
            raise PromiseBroken(f"delivered with another body: {tale}")
        # The clock may go back while a delivery waits for room.
        taken_ms = int(delivered.properties.get("TIMER_DEQUEUE_MS", 0))
        if max(delivered.store_timestamp, taken_ms) < due_ms(waited, delivered, jumps):
            raise PromiseBroken(f"delivered early: {tale}")

    def waiting(self) -> list[StoredMessage]:
        """The messages that are still to be delivered."""
        return [
            tale.waited[0]
            for tale in self.tales.values()
            if tale.waited and not tale.delivered and self._recalled_at(tale.waited[0]) is math.inf
        ]

    def _recalled_at(self, waited: StoredMessage) -> float:
        """The offset in the log of a timer's recall; infinite without one."""
        is_timer = waited.topic == TIMER_TOPIC
        return self.recalled.get(key_of(waited), math.inf) if is_timer else math.inf

    def of_key(self, key: str) -> list[Transaction]:
        """The transactions of a message; one that was resumed has a second one."""
        return [one for one in self.transactions.values() if one.key == key]

    def check_ended(self) -> None:
        """All is delivered, all transactions are decided and say so. Raises PromiseBroken."""
        if waiting := self.waiting():
            raise PromiseBroken(f"{len(waiting)} messages were not delivered: {waiting[:3]}")
        for one in self.transactions.values():
            if one.halves[-1].queue_offset not in one.named:
                raise PromiseBroken(f"no op record says that it is decided: {one}")

    def counts(self) -> dict[str, int]:
        """The counts for the totals."""
        ended = list(self.transactions.values())
        return {
            "messages in the last log": len(self.messages),
            "messages that waited": sum(bool(tale.waited) for tale in self.tales.values()),
            "timers stored again": sum(tale.copies for tale in self.tales.values()),
            "transactions committed": sum(one.commit is not None for one in ended),
            "transactions discarded": sum(len(one.discards) for one in ended),
            "transactions rolled back": sum(not one.decisions for one in ended),
            "messages undelivered": sum(m.topic == UNDELIVERED_TOPIC for m in self.messages),
        }


def _check_transaction(one: Transaction) -> None:
    if len(one.decisions) > 1:
        raise PromiseBroken(f"decided twice: {one}")
    if any(
        place < decision.physical_offset
        for place in one.named.values()
        for decision in one.decisions
    ):
        raise PromiseBroken(f"decided after an op record said so: {one}")


def due_ms(waited: StoredMessage, delivered: StoredMessage, jumps: Iterable[Jump]) -> int:
    """The earliest time at which a message may have been delivered."""
    properties, stored_ms = waited.properties, waited.store_timestamp
    if waited.topic == TIMER_TOPIC:
        return timer_due_ms(properties, stored_ms)
    delay_ms = LEVELS_MS[min(int(properties["DELAY"]), len(LEVELS_MS)) - 1]
    dues_ms = [stored_ms + delay_ms]
    for jump in jumps:
        if waited.physical_offset < jump.log_end <= delivered.physical_offset:
            # What was due then may have waited for room.
            is_due = min(dues_ms) <= jump.before_ms
            dues_ms.append(jump.now_ms + (0 if is_due else delay_ms))
    return min(dues_ms)


def timer_due_ms(properties: dict[str, str], stored_ms: int) -> int:
    """The time that a producer asked for."""
    if "TIMER_DELAY_SEC" in properties:
        return stored_ms + int(properties["TIMER_DELAY_SEC"]) * 1000
    if "TIMER_DELAY_MS" in properties:
        return stored_ms + int(properties["TIMER_DELAY_MS"])
    return int(properties["TIMER_DELIVER_MS"])
