"""The properties of many records, taken apart all at once.

Their text is ``name 0x01 value 0x02`` again and again; the last 0x02 may be missing. It is read as
``message.decode_properties`` reads it: what has no name or no value is left out, and of two entries
with one name the later counts.
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
# With more properties than that, to compare them place by place is no gain.
_PLACES_MAX = 32


class PropertyEntries:
    """All entries of the properties of n records, in order.

    row: the record that each belongs to. Columns have shape (entries,).
    """

    def __init__(self, raw: Any) -> None:
        """raw: pyarrow.BinaryArray of n, not sliced and without nulls."""
        _, offsets, data = raw.buffers()
        self.row_count = len(raw)
        self._offsets = np.frombuffer(offsets, np.int32, len(raw) + 1)
        self._data = np.frombuffer(data or b"", np.uint8)[: self._offsets[-1]]
        self._buffer = self._data.data
        starts, ends = self._cut()
        self._name_start, self._name_end, self._end, self.row = self._split(starts, ends)

    def _cut(self) -> tuple[Array, Array]:
        """Where each entry begins and ends."""
        ends = np.flatnonzero(self._data == _VALUE_END)
        row_starts, row_ends = self._offsets[:-1], self._offsets[1:]
        is_open = row_ends > row_starts
        is_open[is_open] = self._data[row_ends[is_open] - 1] != _VALUE_END
        nexts = ends + 1
        if is_open.any():
            # Such an end is the next record's start, and comes before an end that lies there.
            open_ends = row_ends[is_open].astype(np.int64)
            order = np.argsort(np.concatenate((2 * open_ends, 2 * ends + 1)), kind="stable")
            ends = np.concatenate((open_ends, ends))[order]
            nexts = np.concatenate((open_ends, nexts))[order]
        starts = np.zeros_like(ends)
        starts[1:] = nexts[:-1]
        return starts, ends

    def _split(self, starts: Array, ends: Array) -> tuple[Array, Array, Array, Array]:
        """Start, end of the name, end of the value, and record, of the entries that count."""
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
            # As many in each: then each record's first begins where the record does.
            if (starts[::per_row] == self._offsets[:-1]).all():
                return rows
        return np.searchsorted(self._offsets, starts, "right") - 1

    @cached_property
    def _names(self) -> tuple[list[bytes], Array]:
        """The names, and which of them each entry has."""
        by_place = self._names_by_place()
        if by_place is not None and len(set(by_place)) == len(by_place):
            return by_place, np.tile(np.arange(len(by_place)), self.row_count)
        names = gather(self._buffer, self._name_start, self._name_end - self._name_start)
        encoded = names.dictionary_encode()
        return encoded.dictionary.to_pylist(), encoded.indices.to_numpy()

    def _names_by_place(self) -> list[bytes] | None:
        """The names of each record's entries, in order, if they are the same for all records."""
        per_row = len(self.row) // self.row_count if self.row_count else 0
        if not 0 < per_row <= _PLACES_MAX or per_row * self.row_count != len(self.row):
            return None
        if (self.row.reshape(-1, per_row) != np.arange(self.row_count)[:, None]).any():
            return None
        starts = self._name_start.reshape(-1, per_row)
        sizes = self._name_end.reshape(-1, per_row) - starts
        if (sizes != sizes[0]).any():
            return None
        names = [self._shared(starts[:, place], int(sizes[0, place])) for place in range(per_row)]
        return None if None in names else names  # type: ignore[return-value]

    def _shared(self, start: Array, size: int) -> bytes | None:
        """The bytes that stand at each start, if they are the same."""
        windows = np.ndarray((len(self._data) - size + 1,), f"V{size}", self._data, strides=(1,))
        name = windows[start[0]].tobytes()
        return name if windows[start].tobytes() == name * len(start) else None

    def value_of(self, name: bytes) -> Any:
        """One property of each record, as a StringArray of n; null where there is none."""
        names, codes = self._names
        entry = np.full(self.row_count, -1)
        if name in names:
            its_entries = np.flatnonzero(codes == names.index(name))
            entry[self.row[its_entries]] = its_entries
        return text(self._values(entry, entry >= 0))

    def _values(self, entry: Array, is_there: Array | None = None) -> Any:
        if not len(self._end):
            return pa.nulls(len(entry), pa.binary())
        start = self._name_end[entry] + 1
        return gather(self._buffer, start, self._end[entry] - start, is_there)

    def maps(self, kind: Any) -> Any:
        """All properties of each record, as a MapArray of n and of this type."""
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
        """The entries, without those that a later one of the same name replaces."""
        names, codes = self._names
        which = self.row * len(names) + codes
        entry = np.arange(len(which))
        if (which[1:] > which[:-1]).all():
            return entry
        order = np.argsort(which, kind="stable")
        is_last = np.append(which[order][1:] != which[order][:-1], True)
        return np.sort(order[is_last]) if len(order) else entry
