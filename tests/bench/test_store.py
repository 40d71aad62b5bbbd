"""The starts that are measured, a little of them on headrace."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.bars import STORE
from tests.bench.store import CASES, COLUMNS, crashes, restarts
from tests.conformance.peer import running


@pytest.mark.slow
def test_a_broker_is_killed_and_stopped_and_has_what_it_had(tmp_path: Path) -> None:
    with running("headrace", tmp_path, settings={}) as peer:
        report = next(crashes(peer, gigabytes=0.01))
        assert 0 < report["first_send_s"] <= report["readable_s"]
        report = next(restarts(peer, queues=20))
        assert report["first_send_s"] > 0
        assert report["stop_s"] > 0


def test_every_bar_is_of_a_case_that_is_measured() -> None:
    assert {bar.case for bar in STORE} == set(CASES)
    assert {bar.key for bar in STORE} <= {key for key, *_ in COLUMNS}
