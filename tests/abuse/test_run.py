"""A short run of the attackers: no end, no fault, nothing left over."""

from __future__ import annotations

import pytest

from tests.abuse.attackers import KINDS
from tests.abuse.run import abuse, wrongs

SECONDS = 6


@pytest.mark.long
def test_no_attack_ends_a_daemon_or_leaves_anything_behind() -> None:
    # Clients take seconds to give up on a hostile server: those are for the long run.
    seen = abuse(SECONDS, seed=1, kinds=tuple(KINDS))
    assert wrongs(seen) == []
    assert seen["answers"] > 0
    for kind in KINDS:
        assert seen["attackers"][kind]["volleys"] > 0, kind
