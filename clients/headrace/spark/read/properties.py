"""Parse the properties of many records at once.

The text of properties repeats ``name 0x01 value 0x02``; the last 0x02 may be missing. The result
agrees with ``message.decode_properties``: entries without a name or a value are left out, and of
two entries with the same name the later one counts.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from headrace.spark.read.gather import gather, text

if TYPE_CHECKING:
    from headrace_protocol.columns import Array

_NAME_END, _VALUE_END = 1, 2
# With more properties per record, comparing them one by one is no faster.
_PLACES_MAX = 32


class PropertyEntries:
    """All property entries of n records, in order.

    row: index of each entry's record. Columns have shape (entries,).
    """

    def __init__(self, raw: Any) -> None:
        """raw: pyarrow.BinaryArray of length n, not sliced and without nulls."""
        _, offsets, data = raw.buffers()
        self.row_count = len(raw)
        self._offsets = np.frombuffer(offsets, np.int32, len(raw) + 1)
        self._data = np.frombuffer(data or b"", np.uint8)[: self._offsets[-1]]
        self._buffer = self._data.data
        starts, ends = self._cut()
        self._name_start, self._name_end, self._end, self.row = self._split(starts, ends)

    def _cut(self) -> tuple[Array, Array]:
        """Start and end of each entry."""
        ends = np.flatnonzero(self._data == _VALUE_END)
        row_starts, row_ends = self._offsets[:-1], self._offsets[1:]
        is_open = row_ends > row_starts
        is_open[is_open] = self._data[row_ends[is_open] - 1] != _VALUE_END
        nexts = ends + 1
        if is_open.any():
            # An open end equals the next record's start, and sorts before an 0x02 at that position.
            open_ends = row_ends[is_open].astype(np.int64)
            order = np.argsort(np.concatenate((2 * open_ends, 2 * ends + 1)), kind="stable")
            ends = np.concatenate((open_ends, ends))[order]
            nexts = np.concatenate((open_ends, nexts))[order]
        starts = np.zeros_like(ends)
        starts[1:] = nexts[:-1]
        return starts, ends

    def _split(self, starts: Array, ends: Array) -> tuple[Array, Array, Array, Array]:
        """Start, name end, value end and record of each valid entry."""
        rows = self._rows(starts)
        name_ends = np.flatnonzero(self._data == _NAME_END)
        if len(name_ends) != len(ends) or not ((name_ends > starts) & (name_ends < ends)).all():
            name_ends = np.append(name_ends, len(self._data))
            name_ends = name_ends[np.searchsorted(name_ends[:-1], starts)]
        is_whole = (name_ends > starts) & (name_ends + 1 < ends)
        if is_whole.all():
            return starts, name_ends, ends, rows
        return starts[is_whole], name_ends[is_whole], ends[is_whole], rows[is_whole]

    def _rows(self, starts: Array) -> Array:
        per_row = len(starts) // self.row_count if self.row_count else 0
        if per_row and per_row * self.row_count == len(starts):
            rows = np.repeat(np.arange(self.row_count), per_row)
            # With equally many entries in each record, each record's first entry starts with it.
            if (starts[::per_row] == self._offsets[:-1]).all():
                return rows
        return np.searchsorted(self._offsets, starts, "right") - 1

    @cached_property
    def _names(self) -> tuple[list[bytes], Array]:
        """The distinct names, and each entry's index into them."""
        by_place = self._names_by_place()
        if by_place is not None and len(set(by_place)) == len(by_place):
            return by_place, np.tile(np.arange(len(by_place)), self.row_count)
        names = gather(self._buffer, self._name_start, self._name_end - self._name_start)
        encoded = names.dictionary_encode()
        return encoded.dictionary.to_pylist(), encoded.indices.to_numpy()

    def _names_by_place(self) -> list[bytes] | None:
        """The names of a record's entries, in order; None if they differ between records."""
        per_row = len(self.row) // self.row_count if self.row_count else 0
        if not 0 < per_row <= _PLACES_MAX or per_row * self.row_count != len(self.row):
            return None
        if (self.row.reshape(-1, per_row) != np.arange(self.row_count)[:, None]).any():
            return None
        starts = self._name_start.reshape(-1, per_row)
        sizes = self._name_end.reshape(-1, per_row) - starts
        if (sizes != sizes[0]).any():
            return None
        names = [self._shared(starts[:, index], int(sizes[0, index])) for index in range(per_row)]
        return None if None in names else names  # type: ignore[return-value]

    def _shared(self, start: Array, size: int) -> bytes | None:
        """The ``size`` bytes at each start; None if they differ."""
        windows = np.ndarray((len(self._data) - size + 1,), f"V{size}", self._data, strides=(1,))
        name = windows[start[0]].tobytes()
        return name if windows[start].tobytes() == name * len(start) else None

    def value_of(self, name: bytes) -> Any:
        """One property of each record, as a BinaryArray of length n; null where missing."""
        names, codes = self._names
        entry = np.full(self.row_count, -1)
        if name in names:
            its_entries = np.flatnonzero(codes == names.index(name))
            entry[self.row[its_entries]] = its_entries
        return self._values(entry, entry >= 0)

    def _values(self, entry: Array, is_there: Array | None = None) -> Any:
        if not len(self._end):
            return pa.nulls(len(entry), pa.binary())
        start = self._name_end[entry] + 1
        return gather(self._buffer, start, self._end[entry] - start, is_there)

    def maps(self, kind: Any) -> Any:
        """All properties of each record, as a MapArray of length n and this type."""
        names, codes = self._names
        entry = self._last_of_each()
        counts = np.bincount(self.row[entry], minlength=self.row_count)
        offsets = np.zeros(self.row_count + 1, np.int32)
        np.cumsum(counts, out=offsets[1:])
        keys = text(pa.array(names, pa.binary())).take(pa.array(codes[entry]))
        return pa.MapArray.from_arrays(
            pa.array(offsets), keys, text(self._values(entry)), type=kind
        )

    def _last_of_each(self) -> Array:
        """The entries that no later entry of the same record and name replaces."""
        names, codes = self._names
        which = self.row * len(names) + codes
        entry = np.arange(len(which))
        if (which[1:] > which[:-1]).all():
            return entry
        order = np.argsort(which, kind="stable")
        is_last = np.append(which[order][1:] != which[order][:-1], True)
        return np.sort(order[is_last]) if len(order) else entry
