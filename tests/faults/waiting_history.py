"""The plan of each message that waits, and its rules at the end.

The log is the judge, as in ``tests.simulation.waiting_promises``: read from its files, without the
broker. Each message is sent in one attempt, so it is in its topic at most once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headrace_broker.store.log.log_blocks import checked, walk
from headrace_protocol.message import StoredMessage
from headrace_protocol.system_topics import DLQ_PREFIX, OP_HALF_TOPIC, RETRY_PREFIX
from tests.faults import party
from tests.faults.history import HistoryBroken, Identity, identify
from tests.simulation.waiting_promises import WaitingLog, key_of

TOPIC, GROUP = "Waits", "waiters"
ATTEMPTS_MAX = 3


class Kind(IntEnum):
    """The lane of a message."""

    DELAY = 0
    DELAY_BY_TIMER = 1
    DELIVER_AT = 2
    RECALL = 3
    COMMIT = 4
    ROLL_BACK = 5
    COMMIT_IF_ASKED = 6
    ROLL_BACK_IF_ASKED = 7


ROLLED_BACK = frozenset({Kind.ROLL_BACK, Kind.ROLL_BACK_IF_ASKED})
TIMERS = frozenset({Kind.DELAY_BY_TIMER, Kind.DELIVER_AT, Kind.RECALL})


class Plan(NamedTuple):
    """The fate of a message.

    level: its delay level. timer_s: its delay. returns: how often a consumer sends it back.
    is_rejected: the consumer sends it to the dead letters at once.
    """

    level: int
    timer_s: float
    returns: int
    is_rejected: bool

    @property
    def is_dead(self) -> bool:
        return self.is_rejected or self.returns >= ATTEMPTS_MAX

    @property
    def attempts(self) -> range:
        """Those that the group is given."""
        return range(1 if self.is_rejected else min(self.returns + 1, ATTEMPTS_MAX))

    def rejects(self, attempt: int) -> bool | None:
        """True if an attempt ends by a rejection, or by a retry; None if it succeeds."""
        return self.is_rejected if self.is_rejected or attempt < self.returns else None


def plan_of(message: Identity) -> Plan:
    """The plan of a message; it follows from its number."""
    kind, number = Kind(message.lane), message.number
    level = 0
    if kind is Kind.DELAY:
        level = (0, 1, 1, 2)[number // 8 % 4]
    elif kind in {Kind.COMMIT, Kind.COMMIT_IF_ASKED}:
        level = (0, 0, 1)[number % 3]
    timer_s = (0.2, 0.9, 1.5, 4.0)[number // 8 % 4] if kind in TIMERS else 0
    returns = (0, 0, 0, 0, 1, 2, ATTEMPTS_MAX, 0)[number % 8]
    return Plan(level, timer_s, returns, is_rejected=number % 8 == 7)


def is_committed(message: Identity) -> bool:
    """The end of a message's transaction."""
    return Kind(message.lane) not in ROLLED_BACK


# -- the log ---------------------------------------------------------------------------------------


def messages_of(commit_log: Path) -> Iterator[StoredMessage]:
    """All messages of a log but those of the other producers. Raises HistoryBroken."""
    paths = sorted(commit_log.iterdir())
    for path in paths:
        data = path.read_bytes()
        block, _, problem = checked(data, *walk(data), int(path.name))
        # The broker may be writing at the end of the last file.
        if problem and path is not paths[-1]:
            raise HistoryBroken(f"{path}: {problem}")
        if block:
            messages = map(block.columns.message, range(len(block.columns)))
            yield from (each for each in messages if each.topic != party.TOPIC)


def _is_of_producer(message: StoredMessage) -> bool:
    """True if it has the body of a message that was sent."""
    return message.topic != OP_HALF_TOPIC and "TIMER_DEL_UNIQKEY" not in message.properties


# -- promises --------------------------------------------------------------------------------------


class WaitingTotals(NamedTuple):
    """The totals of a history that is as it should be.

    unacknowledged: stored although the producer heard nothing of it. delivered: to the topic.
    sent_back: deliveries of what consumers sent back. read_again: deliveries of one record to the
    group after the first.
    """

    acknowledged: int
    unacknowledged: int
    delivered: int
    recalled: int
    committed: int
    rolled_back: int
    sent_back: int
    dead: int
    read_again: int

    def __str__(self) -> str:
        return (
            f"{self.acknowledged} messages that wait acknowledged, 0 of them lost, early or twice "
            f"in the log; {self.unacknowledged} stored without an acknowledgement; "
            f"{self.delivered} delivered, {self.recalled} recalled, {self.committed} committed, "
            f"{self.rolled_back} rolled back, {self.sent_back} delivered after a retry, "
            f"{self.dead} dead letters; {self.read_again} read again"
        )


class Attempt(NamedTuple):
    """A message in the topic, or in the retry topic from attempt 1 on."""

    attempt: int
    queue: int
    offset: int
    message: Identity


def check(
    log: WaitingLog,
    acknowledged: np.ndarray,
    recalled: np.ndarray,
    read: np.ndarray,
    sent: list[int],
) -> WaitingTotals:
    """Hold a history to all promises. Raises HistoryBroken, PromiseBroken.

    log: as it is at the end. acknowledged, recalled: rows of the producer. read: rows of the group,
    whose reader is the attempt. sent: how many messages of each kind the producer began to send.
    """
    log.check(jumps=[])
    log.check_ended()
    messages = [(each, identify(each.body)) for each in log.messages if _is_of_producer(each)]
    stored = {identity for _, identity in messages}
    taken = {identity for each, identity in messages if key_of(each) in log.recalled}
    delivered = [identity for each, identity in messages if each.topic == TOPIC]
    _check_delivered(delivered, stored, taken)
    _none("stored, and never sent", {each for each in stored if each.number >= sent[each.lane]})
    _none("acknowledged, and lost", set(_identities(acknowledged)) - stored)
    _none("recalled, and the recall is lost", set(_identities(recalled)) - taken)
    attempts = _attempts(messages)
    tried = {(each.message, each.attempt) for each in attempts}
    planned = {(each, attempt) for each in delivered for attempt in plan_of(each).attempts}
    _none("sent back, and not delivered again", planned - tried)
    _none("delivered again, and never sent back", tried - planned)
    dead = {identity for each, identity in messages if each.topic == DLQ_PREFIX + GROUP}
    _none(
        "rejected, and no dead letter", {each for each in delivered if plan_of(each).is_dead} - dead
    )
    _none("a dead letter, and never rejected", {each for each in dead if not plan_of(each).is_dead})
    given = list(map(Attempt, *_columns(read, "reader", "queue", "offset"), _identities(read)))
    _none("delivered, and never read", attempts.difference(given))
    _none("read, and never delivered", set(given) - attempts)
    kinds = Counter(Kind(each.lane) for each in stored)
    return WaitingTotals(
        acknowledged=len(acknowledged),
        unacknowledged=len(stored) - len(acknowledged),
        delivered=len(delivered),
        recalled=len(taken.difference(delivered)),
        committed=kinds[Kind.COMMIT] + kinds[Kind.COMMIT_IF_ASKED],
        rolled_back=kinds[Kind.ROLL_BACK] + kinds[Kind.ROLL_BACK_IF_ASKED],
        sent_back=sum(each.attempt > 0 for each in attempts),
        dead=len(dead),
        read_again=len(given) - len(attempts),
    )


def _check_delivered(
    delivered: list[Identity], stored: set[Identity], recalled: set[Identity]
) -> None:
    """Each message that was not rolled back or recalled is in its topic once."""
    rolled_back = {each for each in stored if not is_committed(each)}
    _none("delivered twice", {each for each, count in Counter(delivered).items() if count > 1})
    _none("rolled back, and delivered", rolled_back.intersection(delivered))
    _none("lost", stored.difference(rolled_back, recalled, delivered))


def _attempts(messages: Iterable[tuple[StoredMessage, Identity]]) -> set[Attempt]:
    return {
        Attempt(each.reconsume_times, each.queue_id, each.queue_offset, identity)
        for each, identity in messages
        if each.topic in {TOPIC, RETRY_PREFIX + GROUP}
    }


def _identities(rows: np.ndarray) -> list[Identity]:
    return list(map(Identity, *_columns(rows, "producer", "lane", "number")))


def _columns(rows: np.ndarray, *names: str) -> list[list[int]]:
    return [rows[name].tolist() for name in names]


def _none(problem: str, found: set[Any]) -> None:
    """Raises HistoryBroken if there are messages that show the problem."""
    if found:
        raise HistoryBroken(f"{len(found)} messages {problem}: {sorted(found)[:3]}")
