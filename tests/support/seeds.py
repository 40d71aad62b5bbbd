"""Seeds of parametrized tests: ten for the gate, the others for the long tests."""

from __future__ import annotations

from typing import Any

import pytest

QUICK_COUNT = 10


def seeds(count: int) -> list[Any]:
    """The seeds below ``count``; those from the eleventh on are marked ``long``."""
    marked = (pytest.param(seed, marks=pytest.mark.long) for seed in range(QUICK_COUNT, count))
    return [*range(min(count, QUICK_COUNT)), *marked]
