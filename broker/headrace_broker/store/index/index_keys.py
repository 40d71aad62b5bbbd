"""Key hashes of many records at once.

Java's string hash is a polynomial in 31. Most records of a block have properties of the same
layout, so their keys are columns of a table: the hashes of a column are a product with powers of
31, computed only over the bytes that differ between records. For all other records there are sums
of ``byte * 31**-position`` (31 has an inverse modulo 2**32), so the hash of any slice of a block
takes one sum and one multiplication. The hash of ``topic#key`` follows from those of its two parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace_protocol.columns import split
from headrace_protocol.inner_batch import properties_in
from headrace_protocol.java_hash import index_key_hash, java_hash
from headrace_protocol.message import KEYS, TAGS, UNIQ_KEY, decode_properties, split_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Array = npt.NDArray[Any]

TAGS_MARK: Final = "T#"  # between topic# and the TAGS text
_BLOCK_BYTES_MAX: Final = 1 << 18
_MESSAGES_BYTES: Final = 160 << 10
_RANK_BITS: Final = 20
_RANK_TAGS: Final = (1 << _RANK_BITS) - 1
_MODULUS: Final = 1 << 32


def _powers(base: int) -> Array:
    powers = np.full(_BLOCK_BYTES_MAX, base, np.uint32)
    powers[0] = 1
    return np.cumprod(powers, dtype=np.uint32)


_POWERS = _powers(31)
_INVERSE_POWERS = _powers(pow(31, -1, _MODULUS))

_UNIQ_KEY_8 = int.from_bytes(b"UNIQ_KEY", "big")
_KEYS_5 = int.from_bytes(b"KEYS\x01", "big")
_TAGS_5 = int.from_bytes(b"TAGS\x01", "big")
_PADDING_BYTES = 16

# With fewer rows a table costs more than it saves.
_TABLE_ROWS_MIN = 32
_JOINED_ROWS = 16
_TABLE_RANKS = {UNIQ_KEY.encode(): 0, KEYS.encode(): 1, TAGS.encode(): _RANK_TAGS}


def index_prefixes(topic: str) -> tuple[int, int]:
    """Hashes of the prefixes of a topic's index keys: ``topic#`` and ``topic#T#``."""
    return java_hash(f"{topic}#") % _MODULUS, java_hash(f"{topic}#{TAGS_MARK}") % _MODULUS


def record_keys(properties: dict[str, str]) -> list[str]:
    """The index keys of a record without ``topic#``, in the peer's order."""
    uniq_key, tags = properties.get(UNIQ_KEY), properties.get(TAGS)
    keys = [uniq_key] if uniq_key else []
    keys += split_keys(properties.get(KEYS, ""))
    return [*keys, TAGS_MARK + tags] if tags else keys


class Regions(NamedTuple):
    """The ranges of the properties of records, in log order; none is empty.

    text: a part of the log, shape (n,), uint8. start, size: of each record's properties, in bytes.
    """

    text: Array
    start: Array
    size: Array

    def take(self, numbers: Array) -> Regions:
        """The regions of some of the records."""
        return Regions(self.text, self.start[numbers], self.size[numbers])

    def cells(self) -> Array:
        """A copy as a table, shape (records, size); all must have the size of the first."""
        size = int(self.size[0])
        pieces = np.ndarray(len(self.text) - size + 1, f"V{size}", self.text, strides=(1,))
        cells: Array = pieces[self.start].view(np.uint8).reshape(len(self.start), size)
        return cells

    def slices(self) -> list[bytes]:
        """A copy of each region."""
        return split(self.text.data, self.start, self.size)


def with_messages(
    regions: Regions, record_sizes: Array, is_batch: Array
) -> Iterator[tuple[Array, Regions]]:
    """The regions of records and of the messages in batches, which are records of their own.

    record_sizes: in bytes, of whole records. is_batch: a mask of the records that are batches.

    Returns blocks in log order: the record number of each region, and the regions.
    """
    if not is_batch.any():
        yield np.arange(len(is_batch)), regions
        return
    numbers, starts, sizes = [], [], []
    for number, (start, size) in enumerate(zip(regions.start, regions.size, strict=True)):
        if is_batch[number]:
            end = int(start + size)
            begin = end - int(record_sizes[number])
            at, found = properties_in(regions.text[begin:end].data)
            starts.append(at + begin)
            sizes.append(found)
            numbers.append(np.full(len(at), number))
        starts.append(np.array([start]))
        sizes.append(np.array([size]))
        numbers.append(np.array([number]))
    all_numbers, all_starts, all_sizes = map(np.concatenate, (numbers, starts, sizes))
    blocks = np.cumsum(all_sizes) // _MESSAGES_BYTES
    for part in np.split(np.arange(len(blocks)), np.flatnonzero(np.diff(blocks)) + 1):
        yield all_numbers[part], Regions(regions.text, all_starts[part], all_sizes[part])


class _Hashes(NamedTuple):
    """Hashes of keys. ``order`` sorts them by record number, then by rank within the record."""

    order: Array
    key_hash: Array


def key_hashes(
    regions: Regions, prefixes: Array, topic_of: Callable[[int], str]
) -> tuple[Array, Array]:
    """All index keys of records.

    prefixes: shape (n, 2), uint32: the ``index_prefixes`` of each record's topic.
    topic_of: the topic of a record by number.

    Returns (record numbers, key hashes): one pair per key, in log order and the peer's order
    within a record.
    """
    parts: list[_Hashes] = []
    others: list[Array] = []
    for numbers in _groups(regions.size):
        alike = regions if len(numbers) == len(regions.size) else regions.take(numbers)
        table = _Table.of(alike.cells()) if len(numbers) >= _TABLE_ROWS_MIN else None
        if table is None:
            others.append(numbers)
        else:
            parts += table.hashes(numbers, prefixes[numbers])
    if others:
        numbers = np.sort(np.concatenate(others))
        parts += _text_hashes(regions.take(numbers).slices(), numbers, prefixes[numbers], topic_of)
    return _in_order(parts)


def _groups(sizes: Array) -> list[Array]:
    """The record numbers, grouped by size."""
    if (sizes == sizes[0]).all():
        return [np.arange(len(sizes))]
    order = np.argsort(sizes, kind="stable")
    ordered = sizes[order]
    return np.split(order, np.flatnonzero(ordered[1:] != ordered[:-1]) + 1)


def _in_order(parts: list[_Hashes]) -> tuple[Array, Array]:
    if not parts:
        return np.empty(0, np.int64), np.empty(0, np.int32)
    orders = np.concatenate([part.order for part in parts])
    hashes = np.concatenate([part.key_hash for part in parts])
    if len(parts) > 1:
        sorting = np.argsort(orders, kind="stable")
        orders, hashes = orders[sorting], hashes[sorting]
    return orders >> _RANK_BITS, hashes


def _text_hashes(
    regions: list[bytes], numbers: Array, prefixes: Array, topic_of: Callable[[int], str]
) -> list[_Hashes]:
    """Hashes for records of any layout, computed in blocks of bounded size."""
    lengths = np.fromiter(map(len, regions), np.int64, len(regions)) + 1
    ends = np.cumsum(lengths)
    parts = []
    first = 0
    while first < len(regions):
        # One region has at most 32 767 bytes, so a block always holds several.
        limit = (ends[first - 1] if first else 0) + _BLOCK_BYTES_MAX - _PADDING_BYTES - 1
        upto = int(np.searchsorted(ends, limit, "right"))
        mine = slice(first, upto)
        block = _Block(regions[mine], lengths[mine], numbers[mine])
        parts.append(block.hashes(prefixes[mine], topic_of))
        first = upto
    return parts


class _Table:
    """Properties of one layout: the same names at the same positions, so each key is a column."""

    def __init__(self, cells: Array, low: Array, varies: Array, keys: dict[bytes, slice]) -> None:
        self._cells = cells
        self._low = low
        self._varies = varies
        self._keys = keys

    @classmethod
    def of(cls, cells: Array) -> _Table | None:
        """A table, or None if the layouts differ or keys need exact treatment.

        cells: shape (rows, bytes).
        """
        low, high = _extreme(np.min, cells), _extreme(np.max, cells)
        varies = low != high
        is_fixed = low <= 2
        keys: dict[bytes, slice] = {}
        at = 0
        for entry in cells[0].tobytes().split(b"\x02"):
            name, mark, value = entry.partition(b"\x01")
            value_at = at + len(name) + 1
            is_fixed[at:value_at] = True
            at += len(entry) + 1
            if not mark or not value or name not in _TABLE_RANKS:
                continue
            where = slice(value_at, value_at + len(value))
            is_list = name == b"KEYS" and low[where].min() <= 32
            if name in keys or is_list or high[where].max() >= 0x80:
                return None
            keys[name] = where
        return None if varies[is_fixed].any() else cls(cells, low, varies, keys)

    def hashes(self, numbers: Array, prefixes: Array) -> list[_Hashes]:
        """The hashes of each key column. numbers, prefixes: those of the rows' records."""
        orders = numbers << _RANK_BITS
        return [
            _Hashes(
                orders | _TABLE_RANKS[name],
                self._hash(where, prefixes[:, int(name == b"TAGS")]),
            )
            for name, where in self._keys.items()
        ]

    def _hash(self, where: slice, prefix: Array) -> Array:
        length = where.stop - where.start
        powers = _POWERS[length - 1 :: -1]
        varies = self._varies[where]
        same = np.sum(self._low[where][~varies] * powers[~varies], dtype=np.uint32)
        sums = self._cells[:, where][:, varies].astype(np.uint32) @ powers[varies]
        return _not_negative(prefix * _POWERS[length] + sums + same)


class _Values(NamedTuple):
    """Slices of the block that hold values: record number, position, rank among its keys."""

    number: Array
    start: Array
    end: Array
    rank: Array


class _Block:
    """The properties of some records in one array, each preceded by a separator."""

    def __init__(self, regions: list[bytes], lengths: Array, numbers: Array) -> None:
        """numbers: the record numbers, which order the ``_Hashes``."""
        self.regions = regions
        self.numbers = numbers
        self.region_ends = np.cumsum(lengths) + 1
        joined = b"\x02".join(regions)
        self.text = np.frombuffer(b"\x02" + joined + b"\x02" + bytes(_PADDING_BYTES), np.uint8)

    def hashes(self, prefixes: Array, topic_of: Callable[[int], str]) -> _Hashes:
        values = self._find_values()
        # Before keys are split, since one of two equal properties may split into nothing.
        is_slow = self._slow_numbers(values)
        values = self._split_keys(values)
        if is_slow.any():
            values = _Values(*(column[~is_slow[values.number]] for column in values))
        hashes = self._slice_hashes(values, prefixes)
        orders = self.numbers[values.number] << _RANK_BITS | values.rank
        for at in np.flatnonzero(is_slow).tolist():
            number = int(self.numbers[at])
            exact = _exact_hashes(self.regions[at], topic_of(number))
            hashes = np.concatenate([hashes, exact])
            orders = np.append(orders, (number << _RANK_BITS) + np.arange(len(exact)))
        sorting = np.argsort(orders, kind="stable")
        return _Hashes(orders[sorting], hashes[sorting])

    def _find_values(self) -> _Values:
        separators = np.flatnonzero(self.text == 2)
        starts, ends = separators[:-1] + 1, separators[1:]
        # The eight bytes at every position, as integers.
        words = np.ndarray((len(self.text) - 7,), ">u8", self.text, strides=(1,))[starts]
        is_uniq = (words == _UNIQ_KEY_8) & (self.text[starts + 8] == 1)
        words >>= np.uint64(24)
        is_tags = words == _TAGS_5
        is_key = is_uniq | is_tags | (words == _KEYS_5)
        starts = starts + np.where(is_uniq, 9, 5)
        is_key &= ends > starts
        rank = np.where(is_uniq, 0, np.where(is_tags, _RANK_TAGS, 1))[is_key]
        starts, ends = starts[is_key], ends[is_key]
        number = np.searchsorted(self.region_ends, starts, "right")
        return _Values(number, starts, ends, rank)

    def _split_keys(self, values: _Values) -> _Values:
        """Split KEYS values at spaces; each part becomes a value."""
        has_space = self._contains(values, self.text == 32) & (values.rank == 1)
        if not has_space.any():
            return values
        parts = []
        for number, start, end, _ in zip(*(c[has_space].tolist() for c in values), strict=True):
            at = start
            for part in self.text[start:end].tobytes().split(b" "):
                if part:
                    parts.append((number, at, at + len(part), 1 + at - start))
                at += len(part) + 1
        whole = [column[~has_space] for column in values]
        columns = np.array(parts, np.int64).reshape(-1, 4).T
        return _Values(*(np.concatenate(pair) for pair in zip(whole, columns, strict=True)))

    @staticmethod
    def _contains(values: _Values, marked: Array) -> Array:
        """A mask of the values that contain a marked byte."""
        at = np.flatnonzero(marked)
        return np.searchsorted(at, values.end) > np.searchsorted(at, values.start)

    def _slow_numbers(self, values: _Values) -> Array:
        """A mask of records that need exact hashing: non-ASCII text, or a repeated property."""
        is_slow = np.zeros(len(self.regions), bool)
        if self.text.max() >= 0x80:
            is_slow[values.number[self._contains(values, self.text >= 0x80)]] = True
        orders = np.sort(values.number << _RANK_BITS | values.rank)
        is_slow[orders[1:][orders[1:] == orders[:-1]] >> _RANK_BITS] = True
        return is_slow

    def _slice_hashes(self, values: _Values, prefixes: Array) -> Array:
        if not len(values.number):
            return np.empty(0, np.int32)
        weighted = self.text * _INVERSE_POWERS[: len(self.text)]
        # Sums over [start, end), with unneeded sums in between.
        bounds = np.stack((values.start, values.end), axis=1).ravel()
        sums = np.add.reduceat(weighted, bounds, dtype=np.uint32)[::2]
        prefix = prefixes[values.number, (values.rank == _RANK_TAGS).astype(np.intp)]
        shift = _POWERS[values.end - values.start]
        return _not_negative(prefix * shift + sums * _POWERS[values.end - 1])


def _extreme(extreme_of: Callable[..., Array], cells: Array) -> Array:
    """Minimum or maximum of each column; rows are joined first, as numpy is slow on short ones."""
    joined = len(cells) // _JOINED_ROWS * _JOINED_ROWS
    wide = cells[:joined].reshape(-1, _JOINED_ROWS * cells.shape[1])
    folded = extreme_of(wide, axis=0).reshape(_JOINED_ROWS, -1)
    return extreme_of(np.concatenate([folded, cells[joined:]]), axis=0)


def _not_negative(hashes: Array) -> Array:
    signed = hashes.view(np.int32)
    return np.where(signed == np.iinfo(np.int32).min, 0, np.abs(signed)).astype(np.int32)


def _exact_hashes(region: bytes, topic: str) -> Array:
    # Bytes that are not UTF-8 count as Java reads them.
    keys = record_keys(decode_properties(region.decode(errors="replace").encode()))
    return np.array([index_key_hash(topic, key) for key in keys], np.int32)
