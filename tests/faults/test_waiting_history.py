"""Proof that a history of messages that wait is noticed if it is not as it should be."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from headrace_protocol.message import StoredMessage, decode_record, encode_properties, encode_record
from headrace_protocol.system_topics import (
    DLQ_PREFIX,
    HALF_TOPIC,
    OP_HALF_TOPIC,
    RETRY_PREFIX,
    SCHEDULE_TOPIC,
    TIMER_TOPIC,
)
from tests.faults.history import LANES, ROW, HistoryBroken, Identity
from tests.faults.waiting_history import GROUP, TOPIC, Kind, WaitingTotals, check
from tests.simulation.history import PromiseBroken
from tests.simulation.waiting_promises import WaitingLog

PRODUCER = 2
TIMER = Identity(PRODUCER, Kind.DELAY_BY_TIMER, 0)
RECALLED = Identity(PRODUCER, Kind.RECALL, 0)
COMMITTED = Identity(PRODUCER, Kind.COMMIT, 0)
ROLLED_BACK = Identity(PRODUCER, Kind.ROLL_BACK, 0)
RETRIED = Identity(PRODUCER, Kind.DELAY, 4)
DEAD = Identity(PRODUCER, Kind.DELAY, 7)
SENT = (TIMER, RECALLED, COMMITTED, ROLLED_BACK, RETRIED, DEAD)


@dataclass
class Record:
    """A record of the log. source: place of the one that it was made of."""

    topic: str
    offset: int
    message: Identity
    ms: int = 0
    source: int = 0
    attempt: int = 0
    body: bytes = b""
    properties: dict[str, str] = field(default_factory=dict)

    def stored(self, place: int) -> StoredMessage:
        properties = {"UNIQ_KEY": str(self.message), **self.properties}
        return decode_record(
            encode_record(
                topic=self.topic,
                queue_id=0,
                queue_offset=self.offset,
                body=self.body or self.message.body(),
                properties=encode_properties(properties),
                physical_offset=place,
                store_timestamp=self.ms,
                reconsume_times=self.attempt,
                prepared_transaction_offset=self.source,
            )
        )


def records() -> dict[int, Record]:
    """A log by place, in which all of SENT have come to their end."""
    recall = {"TIMER_DEL_UNIQKEY": str(RECALLED)}
    return {
        1: Record(TIMER_TOPIC, 0, TIMER, properties={"TIMER_DELAY_MS": "200"}),
        2: Record(TIMER_TOPIC, 1, RECALLED, properties={"TIMER_DELAY_MS": "200"}),
        3: Record(TIMER_TOPIC, 2, RECALLED, body=b"0", properties=recall),
        4: Record(TOPIC, 0, TIMER, ms=200, source=1),
        5: Record(HALF_TOPIC, 0, COMMITTED),
        6: Record(HALF_TOPIC, 1, ROLLED_BACK),
        7: Record(TOPIC, 1, COMMITTED, source=5),
        8: Record(OP_HALF_TOPIC, 0, COMMITTED, body=b"0,1,"),
        9: Record(TOPIC, 2, RETRIED),
        10: Record(TOPIC, 3, DEAD),
        11: Record(SCHEDULE_TOPIC, 0, RETRIED, attempt=1, properties={"DELAY": "1"}),
        12: Record(DLQ_PREFIX + GROUP, 0, DEAD, attempt=1),
        13: Record(RETRY_PREFIX + GROUP, 0, RETRIED, ms=1000, source=11, attempt=1),
    }


@dataclass
class History:
    log: dict[int, Record] = field(default_factory=records)
    acknowledged: list[Identity] = field(default_factory=lambda: list(SENT))
    recalled: list[Identity] = field(default_factory=lambda: [RECALLED])
    unread: set[Identity] = field(default_factory=set)
    sent: list[int] = field(default_factory=lambda: [8] * LANES)

    def check(self) -> WaitingTotals:
        read = [
            (each.attempt, 0, each.offset, *each.message)
            for each in self.log.values()
            if each.topic in {TOPIC, RETRY_PREFIX + GROUP} and each.message not in self.unread
        ]
        log = WaitingLog([record.stored(place) for place, record in self.log.items()])
        acknowledged, recalled = (
            as_rows((0, 0, 0, *each) for each in told)
            for told in (self.acknowledged, self.recalled)
        )
        return check(log, acknowledged, recalled, as_rows(read), self.sent)

    def store_again(self, place: int) -> None:
        offset = max(each.offset for each in self.log.values()) + 1
        self.log[max(self.log) + 1] = replace(self.log[place], offset=offset)


def as_rows(places: Iterable[tuple[int, ...]]) -> np.ndarray:
    return np.array([(0, *place) for place in places], ROW)


def test_all_is_well() -> None:
    assert History().check() == WaitingTotals(
        acknowledged=6,
        unacknowledged=0,
        delivered=4,
        recalled=1,
        committed=1,
        rolled_back=1,
        sent_back=1,
        dead=1,
        read_again=0,
    )


def deliver_early(history: History) -> None:
    history.log[4].ms = 199


def deliver_twice(history: History) -> None:
    history.store_again(4)


def store_twice(history: History) -> None:
    history.store_again(9)


def leave_waiting(history: History) -> None:
    del history.log[13]


def store_what_was_not_begun(history: History) -> None:
    history.sent[Kind.DELAY] = 7


def lose(history: History) -> None:
    del history.log[1], history.log[4]


def lose_what_was_committed(history: History) -> None:
    del history.log[7]


def commit_what_was_rolled_back(history: History) -> None:
    history.log[7] = Record(TOPIC, 1, ROLLED_BACK, source=6)


def decide_without_a_word(history: History) -> None:
    history.log[8].body = b"0,"


def lose_a_recall(history: History) -> None:
    history.log[3] = Record(TOPIC, 9, RECALLED, ms=200, source=2)


def lose_a_retry(history: History) -> None:
    del history.log[11], history.log[13]


def retry_without_being_asked(history: History) -> None:
    history.log[13].message = history.log[11].message = TIMER


def lose_a_dead_letter(history: History) -> None:
    del history.log[12]


def bury_a_live_one(history: History) -> None:
    history.log[14] = Record(DLQ_PREFIX + GROUP, 1, TIMER)


def forget_to_read(history: History) -> None:
    history.unread.add(RETRIED)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (deliver_early, "delivered early"),
        (deliver_twice, "delivered twice"),
        (store_twice, "1 messages delivered twice"),
        (leave_waiting, "1 messages were not delivered"),
        (store_what_was_not_begun, "1 messages stored, and never sent"),
        (lose, "1 messages acknowledged, and lost"),
        (lose_what_was_committed, "1 messages lost"),
        (commit_what_was_rolled_back, "1 messages rolled back, and delivered"),
        (decide_without_a_word, "no op record says that it is decided"),
        (lose_a_recall, "1 messages recalled, and the recall is lost"),
        (lose_a_retry, "1 messages sent back, and not delivered again"),
        (retry_without_being_asked, "messages sent back, and not delivered again"),
        (lose_a_dead_letter, "1 messages rejected, and no dead letter"),
        (bury_a_live_one, "1 messages a dead letter, and never rejected"),
        (forget_to_read, "2 messages delivered, and never read"),
    ],
)
def test_damage_is_noticed(damage: Callable[[History], None], problem: str) -> None:
    history = History()
    damage(history)
    with pytest.raises((HistoryBroken, PromiseBroken), match=re.escape(problem)):
        history.check()
