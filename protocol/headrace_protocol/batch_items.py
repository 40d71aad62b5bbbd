"""The items of a batch body, as columns. Source: docs/protocol.md "Send"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace_protocol.errors import CorruptRecord
from headrace_protocol.message import BATCH_ITEM_HEAD, BATCH_ITEMS_MAX, encode_batch

if TYPE_CHECKING:
    from headrace_protocol.columns import Array

_HEAD_BYTES: Final = BATCH_ITEM_HEAD.size
_FLAG_AT, _BODY_BYTES_AT = 12, 16
_INT = np.dtype(">i4")
_SHORT = np.dtype(">i2")
_LEAST_BYTES: Final = _HEAD_BYTES + _SHORT.itemsize
_SEPARATOR: Final = b"\x02"


class TooManyItems(CorruptRecord):
    """A batch has more messages than it may."""


class BatchItems:
    """The parts of each item of a batch, as columns. head_bytes: those before each body."""

    head_bytes: Final = _HEAD_BYTES

    def __init__(self, data: bytes, count_max: int = BATCH_ITEMS_MAX) -> None:
        """Raises CorruptRecord for a malformed or empty batch, TooManyItems."""
        self.total_bytes = len(data)
        self.starts = _starts(data, count_max)
        self.count = len(self.starts)
        self.sizes = np.append(self.starts[1:], len(data)) - self.starts
        self._data = data
        self.flags = self._values(_INT, self.starts + _FLAG_AT)
        self.body_bytes = self._values(_INT, self.starts + _BODY_BYTES_AT)
        self._properties_at = self.starts + (self.body_bytes + _HEAD_BYTES)
        properties_bytes = self.sizes - (self.body_bytes + _LEAST_BYTES)
        self._require((self.body_bytes >= 0) & (properties_bytes >= 0), "body length")
        self.properties_bytes = self._values(_SHORT, self._properties_at)
        self._require(self.properties_bytes == properties_bytes, "properties length")

    @property
    def properties_starts(self) -> Array:
        """Positions of the properties of each item, after their length."""
        starts: Array = self._properties_at + _SHORT.itemsize
        return starts

    def properties(self) -> list[bytes]:
        """The properties of each item after their length, as in the record."""
        return self._slices(self._properties_at, self.starts + self.sizes)

    def first_properties(self) -> bytes:
        """The properties of the first item."""
        return self._data[int(self._properties_at[0]) : int(self.sizes[0])]

    def all_properties(self) -> bytes:
        """The properties of all items, back to back."""
        return b"".join(self.properties())

    def last_bytes(self) -> bytes:
        """The last byte of each item."""
        last: Array = np.frombuffer(self._data, np.uint8)[self.starts + self.sizes - 1]
        return last.tobytes()

    def end_with(self, end: bytes) -> bool:
        """True if every item ends with these bytes."""
        return all(item.endswith(end) for item in self.properties())

    def bodies(self) -> list[bytes]:
        """The body of each item."""
        return self._slices(self.starts + _HEAD_BYTES, self._properties_at)

    def ends(self, checksum_bytes: int) -> list[bytes]:
        """The end of each record: the properties as ``properties``, and room for a checksum."""
        if not checksum_bytes:
            return self.properties()
        lengths = (self.properties_bytes + checksum_bytes).astype(_SHORT).view("V2").tolist()
        room = bytes(checksum_bytes)
        return [a + b + room for a, b in zip(lengths, self.texts(), strict=True)]

    def texts(self) -> list[bytes]:
        """The properties of each without their length."""
        return self._slices(self._properties_at + _SHORT.itemsize, self.starts + self.sizes)

    def terminated(self) -> BatchItems:
        """The same items with a separator after their properties, which old clients omit."""
        texts = [
            text + _SEPARATOR if text and not text.endswith(_SEPARATOR) else text
            for text in self.texts()
        ]
        return BatchItems(encode_batch(zip(self.flags.tolist(), self.bodies(), texts, strict=True)))

    def _slices(self, starts: Array, ends: Array) -> list[bytes]:
        data = self._data
        return [data[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]

    def _values(self, dtype: np.dtype[Any], positions: Array) -> Array:
        """The integers at ``positions``, which need not be aligned."""
        count = len(self._data) - dtype.itemsize + 1
        return np.ndarray(count, dtype, self._data, strides=(1,))[positions].astype(np.int64)

    def _require(self, is_good: Array, what: str) -> None:
        if not is_good.all():
            position = int(self.starts[is_good.argmin()])
            raise CorruptRecord(position, f"the item's {what} does not fit its size")


def _starts(data: bytes, count_max: int) -> Array:
    """The start of each item.

    Raises TooManyItems, CorruptRecord if their sizes do not add up to the batch.
    """
    if (starts := _uniform_starts(data)) is not None and len(starts) <= count_max:
        return starts
    return _walked_starts(data, count_max)


def _uniform_starts(data: bytes) -> Array | None:
    """The start of each item if all have the size of the first; most batches are like this."""
    size = int.from_bytes(data[:4], "big")
    if size < _LEAST_BYTES or len(data) % size:
        return None
    starts = np.arange(0, len(data), size)
    sizes = np.ndarray(len(starts), _INT, data, strides=(size,))
    return starts if (sizes == size).all() else None


def _walked_starts(data: bytes, count_max: int) -> Array:
    starts: list[int] = []
    position, end = 0, len(data)
    unpack = BATCH_ITEM_HEAD.unpack_from
    for _ in range(count_max):
        if position == end:
            break
        if end - position < _LEAST_BYTES:
            raise CorruptRecord(position, f"{end - position} bytes are no batch item")
        size = unpack(data, position)[0]
        if not _LEAST_BYTES <= size <= end - position:
            raise CorruptRecord(position, f"an item of {size} bytes in {end - position}")
        starts.append(position)
        position += size
    if position < end:
        raise TooManyItems(position, f"the batch has more than {count_max} messages")
    if not starts:
        raise CorruptRecord(0, "the batch has no items")
    return np.array(starts)
