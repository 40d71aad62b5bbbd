"""Proof that a history that is not as it should be is noticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from tests.faults.history import (
    ROW,
    HistoryBroken,
    Identity,
    Recorder,
    Totals,
    check,
    identify,
    row_count,
    rows,
)

Place = tuple[int, int, Identity]
KEYS, PER_KEY = 2, 20


def places() -> list[Place]:
    """Two keys, each in a queue of its own."""
    return [
        (lane, number, Identity(0, lane, number))
        for lane in range(KEYS)
        for number in range(PER_KEY)
    ]


@dataclass
class History:
    acknowledged: list[Place] = field(default_factory=places)
    stored: list[Place] = field(default_factory=places)
    read: list[Place] = field(default_factory=places)
    sent: dict[tuple[int, int], int] = field(
        default_factory=lambda: {(0, lane): PER_KEY for lane in range(KEYS)}
    )

    def check(self) -> Totals:
        acknowledged, stored, read = map(as_rows, (self.acknowledged, self.stored, self.read))
        return check(acknowledged, stored, read, self.sent)

    def store_again(self, index: int) -> None:
        """One message more at the end of its queue, as a second attempt leaves it."""
        queue, _, message = self.stored[index]
        again = (queue, PER_KEY, message)
        self.stored.insert((queue + 1) * PER_KEY, again)
        self.read.append(again)


def as_rows(places: list[Place]) -> np.ndarray:
    timed = [(time, 0, queue, offset, *who) for time, (queue, offset, who) in enumerate(places)]
    return np.array(timed, ROW)


def test_all_is_well() -> None:
    count = KEYS * PER_KEY
    assert History().check() == Totals(count, count, 0, 0, 0)


def test_lost_answers_and_doubles_are_counted() -> None:
    history = History()
    del history.acknowledged[3]
    history.store_again(7)
    history.read.append(history.read[0])
    count = KEYS * PER_KEY
    assert history.check() == Totals(count - 1, count + 1, 1, 1, 1)


def lose(history: History) -> None:
    del history.stored[-1], history.read[-1]


def put_another_in_its_place(history: History) -> None:
    queue, offset, _ = history.stored[5]
    history.stored[5] = history.read[5] = (queue, offset, Identity(0, 0, 6))


def forget_to_read(history: History) -> None:
    del history.read[4]


def read_what_is_not_there(history: History) -> None:
    history.read.append((1, PER_KEY, Identity(0, 1, 0)))


def read_out_of_order(history: History) -> None:
    history.read[2], history.read[3] = history.read[3], history.read[2]


def skip_an_offset(history: History) -> None:
    queue, offset, message = history.stored[-1]
    history.stored[-1] = (queue, offset + 1, message)


def repeat_an_offset(history: History) -> None:
    history.stored.append(history.stored[-1])


def mix_up_a_key(history: History) -> None:
    for each in (history.acknowledged, history.stored, history.read):
        (queue, first, one), (_, second, other) = each[8:10]
        each[8:10] = [(queue, first, other), (queue, second, one)]


def store_what_was_not_begun(history: History) -> None:
    history.sent[0, 1] -= 1


def store_for_a_stranger(history: History) -> None:
    del history.sent[0, 1]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lose, "1 messages acknowledged, and lost"),
        (put_another_in_its_place, "1 messages acknowledged, and lost"),
        (forget_to_read, "1 messages stored, and never read"),
        (read_what_is_not_there, "1 messages read by the group, and not in the queue"),
        (read_out_of_order, "1 messages read out of order"),
        (skip_an_offset, "queue 1 was read at offsets"),
        (repeat_an_offset, "queue 1 was read at offsets"),
        (mix_up_a_key, "1 messages out of order"),
        (store_what_was_not_begun, "1 messages stored, and never sent"),
        (store_for_a_stranger, r"never sent: \[\(0, 1\)\]"),
    ],
)
def test_damage_is_noticed(damage: Callable[[History], None], problem: str) -> None:
    history = History()
    damage(history)
    with pytest.raises(HistoryBroken, match=problem):
        history.check()


def test_a_body_says_whose_it_is() -> None:
    for number in range(50):
        identity = Identity(1, 2, number)
        body = identity.body()
        assert identify(body) == identity
        for damaged in (body[:-1], body + b"x", body[:-1] + bytes([body[-1] ^ 1]), body[1:]):
            with pytest.raises(HistoryBroken, match=r"damaged|nobody"):
                identify(damaged)


def test_rows_come_back_without_the_half_one_of_who_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    recorder = Recorder(path, reader=1)
    recorder.add(places())
    recorder.add([])
    with path.open("ab") as file:
        file.write(b"half")
    assert row_count(path) == KEYS * PER_KEY
    back = rows(path, path)
    assert len(back) == 2 * KEYS * PER_KEY
    assert back[["queue", "offset", "number"]][:PER_KEY].tolist() == [
        (0, number, number) for number in range(PER_KEY)
    ]
    assert set(back["reader"].tolist()) == {1}
