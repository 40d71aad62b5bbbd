"""What the benchmark of waiting messages stores, a little of it on headrace."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from headrace.blocking import Admin
from tests.bench.bars import WAITING
from tests.bench.waiting import CASES, COLUMNS, STORED, STORED_COLUMNS, fill, measure_at_once
from tests.conformance.peer import running
from tests.conformance.probe import wait_for_send

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
def test_timers_and_halves_wait(tmp_path: Path) -> None:
    with running("headrace", tmp_path, settings={}) as peer:
        wait_for_send(peer.broker, 60)
        fill(peer.broker, "TIMERS", 321, "TIMER_DELAY_SEC\x013600\x02")
        fill(peer.broker, "HALVES", 33, "TRAN_MSG\x01true\x02PGROUP\x01nobody\x02", sys_flag=4)
        with Admin(nameserver=peer.nameserver) as admin:
            topics = ("rmq_sys_wheel_timer", "RMQ_SYS_TRANS_HALF_TOPIC")
            counts = [
                sum(each.max_offset for each in admin.topic_stats(topic).values())
                for topic in topics
            ]
    assert counts == [321, 33]


@pytest.mark.slow
def test_timers_that_are_due_at_once_are_counted(tmp_path: Path) -> None:
    with running("headrace", tmp_path, settings={}) as peer:
        wait_for_send(peer.broker, 60)
        report = measure_at_once(peer, 100, ahead_s=3)
    assert 0 < report["max_us"] < 5e6


def test_every_bar_is_of_a_case_that_is_measured() -> None:
    assert {bar.case for bar in WAITING} <= {*CASES, STORED}
    assert {bar.key for bar in WAITING} <= {key for key, *_ in (*COLUMNS, *STORED_COLUMNS)}
