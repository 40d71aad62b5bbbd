"""Pages at the start of a mapped file whose blocks are allocated as they are used."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from headrace_broker.store.files.mapped_file import MappedFile
    from headrace_protocol.columns import Array

# Pages allocated by a call each; more are allocated with all others by a single call.
PAGES_AT_ONCE_MAX: Final = 64


class SparsePages:
    """The header and hash slots of an index file, which are large and mostly empty."""

    def __init__(self, file: MappedFile, end: int) -> None:
        """end: of the slots. The file allocates what follows, from the page with ``end`` on."""
        self._file = file
        self._end = end
        self._are_holes = np.ones(-(-end // mmap.PAGESIZE), bool)
        file.allocated_bytes = end - end % mmap.PAGESIZE

    def allocate(self, positions: Array, page_count_max: int = PAGES_AT_ONCE_MAX) -> None:
        """Allocate the blocks of the header and of the pages with these bytes; all if many.

        Raises OSError.
        """
        pages = np.unique(np.append(positions // mmap.PAGESIZE, 0))
        missing = pages[self._are_holes[pages]]
        if len(missing) > page_count_max:
            self._file.allocate_range(0, self._end)
            self._are_holes[:] = False
        elif len(missing):
            self._file.allocate_pages(missing.tolist())
            self._are_holes[missing] = False

    def allocate_after(self, start: int, end: int, step_bytes: int) -> None:
        """Allocate blocks for what follows the slots, and is written next. Raises OSError."""
        self._file.allocate(start, end, step_bytes)
        # The page cache may keep these pages as one with slots that are holes.
        self._file.claim(start, end)

    def clear(self, start: int) -> None:
        """Zero the slots, which begin at ``start``, and free their blocks. Raises OSError."""
        self._file.clear(start, self._end)
        self._are_holes[:] = True
