from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import pytest

import headrace
from tests.bench.growth import markdown
from tests.bench.growth_cases import CASES, Run
from tests.conformance.peer import Peer

SIZES = {
    "connections": [1, 40],
    "queues": [4, 40],
    "groups": [1, 3],
    "held-pulls": [0, 16],
}


@dataclass
class OwnProcess:
    """A peer whose broker is in the process of the test."""

    broker: str
    broker_pid: int = os.getpid()

    @property
    def pids(self) -> list[int]:
        return [self.broker_pid]


@pytest.fixture(scope="module")
def peer() -> Iterator[OwnProcess]:
    with headrace.embedded() as mq:
        yield OwnProcess(mq.broker)


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_a_case_measures_each_of_its_sizes(name: str, peer: OwnProcess) -> None:
    run = Run(cast("Peer", peer), SIZES[name], seconds=0.05, idle_s=0.02)
    points = list(CASES[name].run(run))
    assert [point["size"] for point in points] == SIZES[name]
    for point in points:
        assert point["rate"] > 0
        assert point["broker_cpu_us"] >= 0
        assert point["memory_mb"] > 10
    if name == "held-pulls":
        assert "wake_ms" not in points[0]
        assert points[1]["wake_ms"] > 0


def test_memory_for_each_thing_is_what_came_on_top_of_the_first_size() -> None:
    points = [
        {"size": size, "broker_cpu_us": 10.0, "memory_mb": memory, "idle_cpu_percent": 0.1}
        for size, memory in ((100, 60.0), (1100, 70.0))
    ]
    peers = {"headrace": {"queues": points}, "apache": {"queues": points[1:]}}
    table = markdown({"date": "2030-01-02", "machine": "2 cores", "seconds": 2, "peers": peers})
    assert "| 1,100 | headrace | 10.0 | 70.0 | 10.0 | 0.1 |" in table
    assert "| 1,100 | apache | 10.0 | 70.0 |  | 0.1 |" in table
    assert "answer a pull" not in table
