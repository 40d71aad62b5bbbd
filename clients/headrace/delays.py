"""Delay levels: the fixed delays that brokers offer for messages sent back."""

from __future__ import annotations

from bisect import bisect_left

# Delays of the levels 1, 2, ... in seconds: RocketMQ's default, which brokers can change
# (``messageDelayLevel``).
LEVELS_S = (1, 5, 10, 30, *range(60, 601, 60), 1200, 1800, 3600, 7200)
LEVEL_MAX = len(LEVELS_S)
LONGEST_S = LEVELS_S[-1]


def level_of(delay_s: float) -> int:
    """The level of the shortest delay that is not below ``delay_s``, at most LONGEST_S."""
    return bisect_left(LEVELS_S, delay_s) + 1
