"""A search that expects its target near the beginning."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def gallop(low: int, high: int, is_before: Callable[[int], bool]) -> int:
    """The first number in ``range(low, high)`` that is not before the target; ``high`` if all are.

    Steps double from ``low`` on, then a binary search follows.
    """
    begin = at = 0
    while low + at < high and is_before(low + at):
        begin, at = at + 1, 2 * at + 1
    rest = range(low + begin, min(low + at, high))
    return rest.start + bisect_left(rest, True, key=lambda number: not is_before(number))
