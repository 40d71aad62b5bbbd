"""A minute and a half of chaos; ``make chaos`` does an hour, with Spark."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random

import pytest

from tests.chaos.faults import ACTIVE_MAX, Chaos, Episode, Fault
from tests.chaos.ledger import AFTER_S, Ledger, LogBook
from tests.chaos.run import Run, cluster
from tests.chaos.work import TOPICS
from tests.support.own_disk import may_mount

SECONDS, EVERY_S = 90, 5


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(not may_mount(), reason="may not mount a tmpfs of its own")
def test_every_reader_gets_everything(tmp_path: Path) -> None:
    seed = Random().randrange(1 << 32)
    said = [f"seed {seed}"]
    with cluster(tmp_path) as place:
        run = Run(tmp_path, place, seed, said.append)
        run.go(SECONDS, EVERY_S, spark=False)
    assert not run.ledger.violations, (run.ledger.violations, said, run.summary())
    assert all(len(run.ledger.acknowledged(topic)) > SECONDS for topic in TOPICS), run.summary()


def faults(did: list[str]) -> list[Fault]:
    return [
        Fault(name, name[0], partial(did.append, name), partial(did.remove, name))
        for name in ("a1", "a2", "b1", "c1")
    ]


def test_a_thing_has_one_fault_at_a_time_and_the_oldest_ends_first() -> None:
    did: list[str] = []
    chaos = Chaos(faults(did), Random(1))
    seconds = iter(range(1000))
    for _ in range(100):
        chaos.tick(lambda: next(seconds))
        assert len(did) == len({name[0] for name in did}) == len(chaos.active) <= ACTIVE_MAX
        assert [each.fault.name for each in chaos.active] == did
    assert {each.fault.name for each in chaos.episodes} == {"a1", "a2", "b1", "c1"}


def test_a_missing_message_and_an_older_version_break_a_promise() -> None:
    ledger = Ledger()
    ledger.check_names("the group", {"m1", "m2"}, {"m1", "m2", "m3"})
    ledger.check_value("kv get", "k", 5, "5")
    ledger.check_value("kv get", "never put", 0, None)
    assert ledger.violations == []
    ledger.check_names("the group", {"m1", "m2"}, {"m2"})
    ledger.check_value("kv get", "k", 5, "4")
    ledger.check_value("kv get", "k", 5, None)
    assert ledger.violations == [
        "the group lacks 1 messages, such as ['m1']",
        "kv get: version 4 of k, but 5 was acknowledged",
        "kv get: no such key k, but version 5 was acknowledged",
    ]


def test_lines_count_for_the_faults_of_their_time_in_equal_parts(tmp_path: Path) -> None:
    book = LogBook(tmp_path)
    for at_s in (1.0, 2.0, 3.0, 4.0 + AFTER_S, 4.1 + AFTER_S):
        book.add_at(at_s, "broker-a", "line")
    (fault, *_) = faults([])
    long, short = Episode(fault, 2.0, 4.0), Episode(fault, 2.5, 3.0)
    assert [line.at_s for line in book.during(long)] == [2.0, 3.0, 4.0 + AFTER_S]
    assert book.share(long, [long, short]) == 2.5
    assert book.share(short, [long, short]) == 0.5
