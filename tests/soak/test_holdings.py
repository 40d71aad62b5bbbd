"""Proof that a soak notices what grows and what is left."""

from __future__ import annotations

import numpy as np
import pytest

from tests.soak.holdings import CLIENTS, Holding, Sample, trend, trends

SECONDS = np.arange(0, 1800, 5)


def noise(size: int) -> np.ndarray:
    return np.random.default_rng(1).normal(scale=0.5, size=size)


@pytest.mark.parametrize(
    ("mb_per_hour", "is_growth"), [(0, False), (-30, False), (5, False), (20, True)]
)
def test_growth_is_told_from_noise(mb_per_hour: float, is_growth: bool) -> None:
    line = trend(SECONDS, 70 + mb_per_hour * SECONDS / 3600 + noise(len(SECONDS)))
    assert line.per_hour == pytest.approx(mb_per_hour, abs=0.5)
    assert line.is_growth(10) is is_growth


def sample(seconds: float, memory_mb: float, connections: int = 1) -> Sample:
    broker = dict.fromkeys(CLIENTS, 0) | {"connectionCount": connections}
    return Sample(seconds, {"broker": Holding(memory_mb, 50, 100, 3)}, broker)


def test_the_first_part_may_grow() -> None:
    samples = [sample(seconds, min(70 + seconds, 100)) for seconds in range(100)]
    grown = trends(samples)
    assert not grown["broker memory_mb"].is_growth(1)
    assert grown["broker maps"].largest == 100


def test_what_is_left_is_named() -> None:
    before = sample(0, 70)
    assert sample(9, 90).left(before) == []
    assert sample(9, 90, connections=2).left(before) == ["connectionCount 2, 1 before"]
