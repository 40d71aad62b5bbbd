"""A little of each fault; ``make kills`` does more, and docs/reliability.md has the totals."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tests.faults.faults import ORDERS, run

MORE_ROUNDS = {"kills": 4, "pauses": 6, "restarts": 6}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "rounds"),
    [
        *(("kills", 1), ("pauses", 1), ("restarts", 1)),
        *(pytest.param(fault, n, marks=pytest.mark.long) for fault, n in MORE_ROUNDS.items()),
    ],
)
def test_nothing_is_lost(fault: str, rounds: int, tmp_path: Path) -> None:
    seed = Random().randrange(1 << 32)
    said = [f"seed {seed}"]
    totals, waiting = run(fault, rounds, Random(seed), tmp_path, said.append)
    assert totals.acknowledged > 200 * rounds, said
    assert min(waiting.delivered, waiting.sent_back, waiting.dead) > 0, said
    assert min(waiting.committed, waiting.rolled_back, waiting.recalled) > 0, said


def test_both_daemons_stop_before_they_start_in_six_orders() -> None:
    assert len(set(ORDERS)) == 6
