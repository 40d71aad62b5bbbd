"""The messages that a read returns: those with a wanted tag that fit, by their units as columns.

A unit has the fields ``physical_offset``, ``size`` and ``tags_code``, whatever else it has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_protocol.columns import Array

# The size of the files of a log that is one file.
ONE_FILE: Final = 1 << 62


class Chosen(NamedTuple):
    """Chosen units. where: their indexes, as a slice if they adjoin. first: the lowest index.

    seen: number of units looked at; the next read begins after them.
    """

    where: slice | Array
    first: int
    seen: int


def record_bytes(units: Array) -> Array:
    """Bytes of the first, the first two ... records."""
    return np.cumsum(units["size"], dtype=np.int64)


def choose(
    units: Array,
    tags: frozenset[int] | None,
    count_max: int,
    bytes_max: int,
    *,
    is_there: Array | None = None,
    bytes_of: Callable[[Array], Array] = record_bytes,
) -> Chosen:
    """The units with a wanted tag that fit, at least one if any is wanted.

    tags: wanted tags codes; None for all. is_there: whether each unit has a record; None if all
    have. bytes_of: what it costs to read the first, the first two ... units.
    """
    is_wanted = is_there
    if tags is not None:
        is_tagged = np.isin(units["tags_code"], list(tags))
        is_wanted = is_tagged if is_wanted is None else is_wanted & is_tagged
    if is_wanted is None or is_wanted.all():
        count = _fitting(bytes_of(units), count_max, bytes_max)
        return Chosen(slice(count), 0, count)
    numbers = np.flatnonzero(is_wanted)
    count = _fitting(bytes_of(units[numbers]), count_max, bytes_max)
    seen = int(numbers[count]) if count < len(numbers) else len(units)
    if not count:
        return Chosen(slice(0), 0, seen)
    first, end = int(numbers[0]), int(numbers[count - 1]) + 1
    return Chosen(slice(first, end) if end - first == count else numbers[:count], first, seen)


def _fitting(ends: Array, count_max: int, bytes_max: int) -> int:
    return min(max(int(np.searchsorted(ends, bytes_max, "right")), 1), count_max, len(ends))


def likely_count(first_bytes: int, count_max: int, bytes_max: int) -> int:
    """Number of units to look at for a read of all, by the size of the first record."""
    return max(min(2 * bytes_max // max(first_bytes, 1), count_max), 1)


def adjoining(starts: Array, sizes: Array, file_bytes: int = ONE_FILE) -> list[tuple[int, int]]:
    """The ranges that records in ascending order fill without gaps, each within one file."""
    ends = starts + sizes
    is_cut = (starts[1:] != ends[:-1]) | (starts[1:] % file_bytes == 0)
    firsts, lasts = starts[np.append(True, is_cut)], ends[np.append(is_cut, True)]
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))
