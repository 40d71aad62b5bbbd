"""Gather slices of a buffer into Arrow arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from headrace_protocol.message import property_text

if TYPE_CHECKING:
    from headrace_protocol.columns import Array, Buffer

# An Arrow view holds up to this many bytes inline; longer slices stay in the buffer.
_INLINE_BYTES = 12
_WORDS = _INLINE_BYTES // 4


def gather(data: Buffer, start: Array, size: Array, is_there: Array | None = None) -> Any:
    """``data[start[i]:start[i] + size[i]]`` as a pyarrow.BinaryArray.

    start, size: shape (n,); the slices must lie within ``data``, which is smaller than 2 GiB.
    is_there: bool, shape (n,); where False the result is null, and start and size are ignored.

    Cost: one copy of each slice, in C.
    """
    if is_there is not None:
        start, size = np.where(is_there, start, 0), np.where(is_there, size, 0)
    buffers = [_bitmap(is_there), pa.py_buffer(_views(data, start, size)), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary_view(), len(start), buffers).cast(pa.binary())


def _views(data: Buffer, start: Array, size: Array) -> Array:
    """Arrow views: the size, then a short slice itself or the position of a long one.

    Arrow specifies a copy of a long slice's first bytes. It is left out, because only the cast in
    ``gather`` reads these views, and the cast does not need it.
    """
    views = np.zeros((len(start), 1 + _WORDS), np.int32)
    views[:, 0] = size
    is_long = size > _INLINE_BYTES
    if is_long.all():
        views[:, 3] = start
        return views
    views[:, 1:] = _first_bytes(data, start)
    if is_long.any():
        views[is_long, 2] = 0
        views[is_long, 3] = start[is_long]
    return views


def text(values: Any) -> Any:
    """A BinaryArray of properties as a StringArray, see ``property_text``."""
    try:
        return values.cast(pa.string())
    except pa.ArrowInvalid:
        texts = [None if raw is None else property_text(raw) for raw in values.to_pylist()]
        return pa.array(texts, pa.string())


def _first_bytes(data: Buffer, start: Array) -> Array:
    """The 12 bytes from each start on, int32 of shape (n, 3), zeros beyond the end of data."""
    if len(data) < _INLINE_BYTES:
        data = bytes(data).ljust(_INLINE_BYTES, b"\0")
    last = len(data) - _INLINE_BYTES
    windows = np.ndarray((last + 1,), f"V{_INLINE_BYTES}", data, strides=(1,))
    words = windows[np.minimum(start, last)]
    for late in np.flatnonzero(start > last).tolist():
        words[late] = bytes(memoryview(data)[int(start[late]) :]).ljust(_INLINE_BYTES, b"\0")
    return words.view(np.int32).reshape(-1, _WORDS)


def _bitmap(is_there: Array | None) -> Any:
    return None if is_there is None else pa.py_buffer(np.packbits(is_there, bitorder="little"))
