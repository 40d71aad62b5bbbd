from __future__ import annotations

from typing import Any

from tests.bench.regression import moved


def results(ours: list[float], theirs: list[float], key: str = "rate") -> dict[str, Any]:
    return {
        "peers": {
            "headrace": {"sync-1 100 B": [{key: value} for value in ours]},
            "apache": {"sync-1 100 B": [{key: value} for value in theirs]},
        }
    }


BEFORE = results([100, 110, 120], [50, 55, 60])


def test_a_machine_half_as_fast_moves_nothing() -> None:
    assert moved(results([50, 60], [25, 30]), BEFORE) == []


def test_a_rate_that_fell_beyond_both_spreads_is_worse() -> None:
    (line,) = moved(results([50, 55], [50, 55]), BEFORE)
    assert line.startswith("WORSE   sync-1 100 B       rate")
    assert "2.00 (1.67 to 2.40)  ->  1.00 (0.91 to 1.10)" in line


def test_a_rate_that_rose_beyond_both_spreads_is_better() -> None:
    assert moved(results([250, 260], [50, 55]), BEFORE)[0].startswith("better")


def test_wide_rounds_say_nothing() -> None:
    assert moved(results([50, 120], [50, 55]), BEFORE) == []


def test_more_time_per_message_is_worse() -> None:
    before = results([10, 11], [20, 21], "broker_cpu_us")
    (line,) = moved(results([20, 21], [20, 21], "broker_cpu_us"), before)
    assert line.startswith("WORSE")


def test_a_case_of_one_peer_is_not_compared() -> None:
    lone = results([1, 1], [])
    assert moved(lone, BEFORE) == []
