"""The bounded ring of rows between the CommitLog and its takers.

An append already has all that the takers need, so it leaves one row per record here and the log
is not read again. Each taker (``takers.py``) has its own cursor; a row is overwritten only after
every taker has taken it.
"""

from __future__ import annotations

import mmap
import struct
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace_broker.store.log.batch_units import make_units
from headrace_protocol.columns import UNIT_DTYPE
from headrace_protocol.message import INNER_BATCH, NEED_UNWRAP, TRANSACTION_PREPARED

if TYPE_CHECKING:
    from collections.abc import Callable

# Native byte order: the rows never leave the process.
ROW: Final = struct.Struct("=qqqqiiii")
ROW_BYTES: Final = ROW.size
ROW_DTYPE: Final = np.dtype(
    [
        ("physical_offset", "i8"),
        ("queue_offset", "i8"),
        ("tags_code", "i8"),
        ("store_timestamp", "i8"),
        ("size", "i4"),
        ("queue_key", "i4"),
        ("properties_size", "i4"),
        ("sys_flag", "i4"),
    ]
)
# Rows of batch queues have INNER_BATCH in their sys_flag. Those of whole batches have both of
# WHOLE_BATCH, and the count of messages in the upper half; with a count of 0 they get no unit.
FLAGS_MASK: Final = 0xFFFF
COUNT_SHIFT: Final = 16
WHOLE_BATCH: Final = INNER_BATCH | NEED_UNWRAP
WHOLE_ROW: Final = np.dtype(f"V{ROW_BYTES}")
Rows = npt.NDArray[Any]
RUN_ROWS_MIN: Final = 16
PRESSURE_PERCENT: Final = 80


def select(rows: Rows, is_wanted: npt.NDArray[np.bool_]) -> Rows:
    """The wanted rows; ten times as fast as indexing by the mask, which copies field by field."""
    return rows if is_wanted.all() else rows.take(np.flatnonzero(is_wanted))


def message_count(sys_flag: int) -> int:
    """As ``message_counts``, of one row."""
    if sys_flag & TRANSACTION_PREPARED:
        return 0
    return sys_flag >> COUNT_SHIFT if sys_flag & WHOLE_BATCH == WHOLE_BATCH else 1


def message_counts(sys_flags: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The number of messages of each row, by its sys_flag; 0 for a row without a unit."""
    is_batch = sys_flags & WHOLE_BATCH == WHOLE_BATCH
    counts = np.where(is_batch, sys_flags >> COUNT_SHIFT, 1)
    # PREPARED and ROLLBACK records, which share this bit, have no unit.
    return np.where(sys_flags & TRANSACTION_PREPARED != 0, 0, counts)


class Run(NamedTuple):
    """Rows of one queue with consecutive queue offsets, and their units.

    first: number of the first row, counted since the start. queue_offset: of the first row.
    last_physical_offset: of the last row.
    """

    first: int
    queue_key: int
    queue_offset: int
    last_physical_offset: int
    units: Rows


class Cursor:
    """The number of rows that a taker has taken since the start."""

    __slots__ = ("name", "taken")

    def __init__(self, name: str, taken: int = 0) -> None:
        self.name = name
        self.taken = taken


class Ring:
    """The ring. written: number of rows so far; row n is at ``n & mask``.

    limit: the value of ``written`` at which the next row would overwrite one still needed.
    """

    __slots__ = (
        "buffer",
        "cursors",
        "limit",
        "mask",
        "row_count",
        "rows",
        "run_rows_min",
        "runs",
        "written",
    )

    def __init__(self, row_count: int) -> None:
        """row_count: a power of two."""
        self.row_count = row_count
        self.mask = row_count - 1
        # Six megabytes by default, which take no memory until they are used.
        self.buffer = mmap.mmap(-1, row_count * ROW_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.rows: Rows = np.frombuffer(self.buffer, ROW_DTYPE)
        self.written = 0
        self.limit = row_count
        self.cursors: list[Cursor] = []
        # A shortcut for the dispatcher, which drops each run when past it; rows are the truth.
        self.runs: deque[Run] = deque()
        # From this many rows on, keeping a batch's units costs less than making them later.
        self.run_rows_min = RUN_ROWS_MIN

    def add_cursor(self, name: str) -> Cursor:
        """A cursor for a taker that takes all rows from now on."""
        cursor = Cursor(name, self.written)
        self.cursors.append(cursor)
        return cursor

    def put(self, rows: Rows) -> None:
        """Add a block of rows, which must fit."""
        count = len(rows)
        assert self.written + count <= self.limit
        start = self.written & self.mask
        first = min(count, self.row_count - start)
        # Copied as bytes, because numpy would copy a structured dtype field by field.
        data, split = rows.tobytes(), first * ROW_BYTES
        self.buffer[start * ROW_BYTES : (start + first) * ROW_BYTES] = data[:split]
        self.buffer[: len(data) - split] = data[split:]
        self.written += count

    def put_run(
        self, queue_key: int, queue_offset: int, count: int, fill: Callable[[Rows], None]
    ) -> None:
        """Add rows of one queue, which must fit.

        queue_offset: of the first row; the others are consecutive. fill: writes the rows into the
        array that it is given.
        """
        assert self.written + count <= self.limit
        first = self.written
        start = first & self.mask
        if start + count <= self.row_count:
            rows = self.rows[start : start + count]
            fill(rows)
            self.written += count
        else:
            rows = np.empty(count, ROW_DTYPE)
            fill(rows)
            self.put(rows)
        if count >= self.run_rows_min:
            last = int(rows["physical_offset"][-1])
            self.runs.append(Run(first, queue_key, queue_offset, last, units_of(rows)))

    def waiting(self, cursor: Cursor, confirmed_offset: int | None) -> slice:
        """The slice of ``rows`` that the cursor may take next, up to the end of the buffer.

        confirmed_offset: rows of records at or past it must wait; None if all are confirmed.
        """
        start = cursor.taken & self.mask
        stop = min(start + self.written - cursor.taken, self.row_count)
        if confirmed_offset is not None and stop > start:
            physical_offsets = self.rows["physical_offset"]
            if physical_offsets[stop - 1] >= confirmed_offset:
                waiting = physical_offsets[start:stop]
                stop = start + int(np.searchsorted(waiting, confirmed_offset))
        return slice(start, stop)

    def holds(self, cursor: Cursor, physical_offset: int) -> bool:
        """True if the record at an offset has a row that the cursor has not taken yet."""
        numbers = np.arange(cursor.taken, self.written) & self.mask
        return bool((self.rows["physical_offset"][numbers] == physical_offset).any())

    def next_offset_of(self, cursor: Cursor) -> int | None:
        """Physical offset of the first record not taken yet; None if all are taken."""
        if cursor.taken == self.written:
            return None
        return int(self.rows["physical_offset"][cursor.taken & self.mask])

    def copy(self, waiting: slice) -> Rows:
        """A copy of the rows."""
        # Copied as bytes, which is twenty times as fast.
        return np.frombuffer(
            self.buffer[waiting.start * ROW_BYTES : waiting.stop * ROW_BYTES], ROW_DTYPE
        )

    def take(self, cursor: Cursor, count: int) -> None:
        """Move a cursor past ``count`` rows and release them."""
        cursor.taken += count
        self.release()

    def release(self) -> None:
        """Let the rows be overwritten that every cursor has passed.

        Separate from moving a cursor, which a thread may do.
        """
        self.limit = self.taken + self.row_count

    @property
    def taken(self) -> int:
        """The number of rows that every cursor has passed."""
        return min([cursor.taken for cursor in self.cursors])

    def last_of(self, row_count: int) -> tuple[int, int] | None:
        """Physical offset and store timestamp of row number ``row_count - 1``.

        None if ``row_count`` is 0, or if the row was taken and overwritten.
        """
        if not row_count or self.written - row_count >= self.row_count:
            return None
        row = self.rows[row_count - 1 & self.mask]
        return int(row["physical_offset"]), int(row["store_timestamp"])

    @property
    def fill(self) -> float:
        """The share of the ring occupied by rows that some taker still needs."""
        return 1 - (self.limit - self.written) / self.row_count

    def slow_taker(self) -> str:
        """The name of the taker that is furthest behind."""
        return min(self.cursors, key=lambda cursor: cursor.taken).name

    def pressure(self) -> str | None:
        """The slow taker's name if the ring is 80 % full, when producers should be slowed."""
        free = self.limit - self.written
        if free * 100 > self.row_count * (100 - PRESSURE_PERCENT):
            return None
        return self.slow_taker()


def batch_units_of(rows: Rows) -> Rows:
    """The units of rows of batch queues."""
    return make_units(
        rows["physical_offset"],
        rows["size"],
        rows["tags_code"],
        rows["store_timestamp"],
        rows["queue_offset"],
        message_counts(rows["sys_flag"]),
    )


def units_of(rows: Rows) -> Rows:
    """The ConsumeQueue units of rows."""
    units = np.empty(len(rows), UNIT_DTYPE)
    for name in UNIT_DTYPE.names or ():
        units[name] = rows[name]
    return units
