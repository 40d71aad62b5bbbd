from __future__ import annotations

import itertools
import os
from typing import Any

import pytest

from tests.bench.clients.job import Job, Lost, Window
from tests.bench.python_clients import BARS, BODY_BYTES, FILLS, READS, WORKS, markdown, sessions


def results(**rates: list[float]) -> dict[str, Any]:
    """Figures of the works with these names, at 1 KiB, with 1 µs of the broker's CPU."""
    peers: dict[str, Any] = {"kafka": {}, "headrace": {}}
    for name, series in rates.items():
        work = name.replace("_", "-")
        peer = peers["kafka" if work in WORKS["kafka"] else "headrace"]
        peer[f"{work} 1024 B"] = [
            {"rate": rate, "broker_cpu_us": 1.0, "client_cpu_us": 2.0} for rate in series
        ]
    return {"date": "2030-01-02", "machine": "2 cores", "rounds": 3, "peers": peers}


def test_rows_have_medians_and_spreads() -> None:
    table = markdown(results(pipeline=[3000, 1000, 2000]))
    assert "| pipeline 1024 B | 2,000 (1,000 to 3,000) | 1.00 (1.00 to 1.00) |" in table


@pytest.mark.parametrize(("rate", "word"), [(1200, "met"), (1199, "**missed**")])
def test_a_bar_is_a_ratio_of_medians(rate: int, word: str) -> None:
    table = markdown(results(pipeline=[1, rate, 9000], aiokafka_send=[1, 1000, 9000]))
    assert f"| pipeline 1024 B | aiokafka-send | 1.20 × | ≥ 1.2 × | {word} |" in table


def test_the_brokers_cpu_has_a_bar_of_its_own() -> None:
    table = markdown(results(send_many_bytes=[1000]))
    assert "| send-many-bytes 1024 B | broker CPU | 1.00 µs | ≤ 1.5 µs | met |" in table


def test_without_the_other_side_there_is_no_ratio() -> None:
    assert "aiokafka" not in markdown(results(pipeline=[1000]))


def test_every_bar_names_works_that_there_are() -> None:
    ours, theirs = WORKS["headrace"], WORKS["kafka"]
    for bar in BARS:
        assert bar.work in ours
        assert bar.other in theirs
        assert (bar.work in READS) == (bar.other in READS)


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("name", WORKS)
def test_each_case_has_one_session_and_readers_have_what_is_filled(name: str, fresh: bool) -> None:
    found = list(sessions(name, WORKS[name], fresh=fresh))
    cases = [(work, body_bytes) for work in WORKS[name] for body_bytes in BODY_BYTES]
    assert sorted(itertools.chain(*found)) == sorted(cases)
    for session in found:
        for number, (work, body_bytes) in enumerate(session):
            assert work not in READS or any((f, body_bytes) in session[:number] for f in FILLS)


def test_whoever_sends_has_a_broker_of_its_own() -> None:
    assert list(sessions("headrace", ["pipeline"], fresh=True)) == [
        [("pipeline", 100)],
        [("pipeline", 1024)],
    ]


JOB = Job("pipeline", "", os.getpid(), "t", body_bytes=101, messages=10, warm_up=1)


def test_bodies_differ_and_have_their_size() -> None:
    bodies = JOB.bodies()
    assert {len(body) for body in bodies} == {101}
    assert len(set(bodies)) == len(bodies)


def test_a_window_counts_what_came_after_it_was_opened() -> None:
    window = Window(JOB)
    window.open(messages_before=4)
    sum(range(100_000))
    report = window.close(10)
    assert report.messages == 6
    assert report.rate == pytest.approx(6 / report.seconds)
    assert report.client_cpu_us > 0


def test_a_window_raises_for_bodies_of_another_size() -> None:
    window = Window(JOB)
    window.check_bodies(2, 202)
    with pytest.raises(Lost, match="201 bytes"):
        window.check_bodies(2, 201)
