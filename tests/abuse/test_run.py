"""Short runs of the attackers: no end, no fault, nothing left over."""

from __future__ import annotations

import pytest

from tests.abuse.attackers import KINDS
from tests.abuse.labs import LABS
from tests.abuse.run import abuse, wrongs

SECONDS = 6


@pytest.mark.long
@pytest.mark.parametrize("lab", LABS)
def test_no_attack_ends_a_daemon_or_leaves_anything_behind(lab: str) -> None:
    # Clients take seconds to give up on a hostile server: those are for the long run.
    seen = abuse(SECONDS, seed=1, kinds=tuple(KINDS), lab=lab)
    assert wrongs(seen) == []
    assert seen["answers"] > 0
    for kind in KINDS:
        assert seen["attackers"][kind]["volleys"] > 0, kind
