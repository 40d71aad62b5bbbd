"""A pipeline through Spark copies each message once, whoever is killed at whatever step.

``make spark-kills`` does 200 rounds; here each victim has one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spark import kills
from tests.spark.kills import VICTIMS, Kill, plan
from tests.spark.stepped import STEPS

# The nameserver knows nobody for a moment after it is back; the driver starts meanwhile.
FEW = [
    Kill("worker", "written"),
    Kill("broker-a", "commit"),
    Kill("nameserver", "latest"),
    Kill("driver", "committed"),
]


def test_every_victim_has_its_turn_at_every_step() -> None:
    kinds = len(VICTIMS) * len(STEPS)
    assert len(set(plan(kinds, seed=5))) == kinds
    assert plan(200, seed=5) == plan(200, seed=5)
    assert plan(200, seed=5) != plan(200, seed=6)


@pytest.mark.slow
@pytest.mark.long
def test_each_message_is_copied_once(tmp_path: Path) -> None:
    assert kills.run(FEW, tmp_path, print) >= len(FEW) * kills.ROUND_MESSAGES
