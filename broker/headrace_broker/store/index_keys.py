"""Key hashes of many records at once.

Java's hash of a text is a polynomial in 31, so with sums of ``byte * 31**-position``
(31 has an inverse modulo 2**32) the hash of any slice of a block is one sum and one
multiplication. The hash of ``topic#key`` follows from those of its two parts.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace_protocol.message import (
    KEYS,
    TAGS,
    UNIQ_KEY,
    decode_properties,
    index_key_hash,
    java_hash,
    split_keys,
)

if TYPE_CHECKING:
    from collections.abc import Callable

Array = npt.NDArray[Any]

TAGS_MARK: Final = "T#"  # between topic# and the TAGS text
_BLOCK_BYTES_MAX: Final = 1 << 18
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


def index_prefixes(topic: str) -> tuple[int, int]:
    """Hashes of what the index keys of a topic begin with: ``topic#`` and ``topic#T#``."""
    return java_hash(f"{topic}#") % _MODULUS, java_hash(f"{topic}#{TAGS_MARK}") % _MODULUS


def record_keys(properties: dict[str, str]) -> list[str]:
    """What follows ``topic#`` in the index keys of a record, in the peer's order."""
    uniq_key, tags = properties.get(UNIQ_KEY), properties.get(TAGS)
    keys = [uniq_key] if uniq_key else []
    keys += split_keys(properties.get(KEYS, ""))
    return [*keys, TAGS_MARK + tags] if tags else keys


def key_hashes(
    regions: list[bytes], prefixes: Array, topic_of: Callable[[int], str]
) -> tuple[Array, Array]:
    """All index keys of records.

    regions: the properties of each record.
    prefixes: shape (n, 2), the ``index_prefixes`` of each record's topic.
    topic_of: the topic of a record by number.

    Returns (record numbers, key hashes): one pair per key, in log order and the peer's order
    within a record.
    """
    lengths = np.fromiter(map(len, regions), np.int64, len(regions)) + 1
    ends = np.cumsum(lengths)
    numbers, hashes = [], []
    first = 0
    while first < len(regions):
        # One region has at most 32 767 bytes, so a block always holds several.
        limit = (ends[first - 1] if first else 0) + _BLOCK_BYTES_MAX - _PADDING_BYTES - 1
        upto = int(np.searchsorted(ends, limit, "right"))
        block = _Block(regions[first:upto], lengths[first:upto])
        number, value = block.hashes(prefixes[first:upto], partial(_from, first, topic_of))
        numbers.append(number + first)
        hashes.append(value)
        first = upto
    return np.concatenate(numbers), np.concatenate(hashes)


def _from(first: int, topic_of: Callable[[int], str], number: int) -> str:
    return topic_of(first + number)


class _Values(NamedTuple):
    """Slices of the block that hold values: whose, where, and their place among the keys."""

    number: Array
    start: Array
    end: Array
    rank: Array


class _Block:
    """The properties of some records in one array, each after a separator."""

    def __init__(self, regions: list[bytes], lengths: Array) -> None:
        self.regions = regions
        self.region_ends = np.cumsum(lengths) + 1
        joined = b"\x02".join(regions)
        self.text = np.frombuffer(b"\x02" + joined + b"\x02" + bytes(_PADDING_BYTES), np.uint8)

    def hashes(self, prefixes: Array, topic_of: Callable[[int], str]) -> tuple[Array, Array]:
        values = self._find_values()
        # Before keys are split: of a property given twice one may have no part.
        is_slow = self._slow_numbers(values)
        values = self._split_keys(values)
        if is_slow.any():
            values = _Values(*(column[~is_slow[values.number]] for column in values))
        hashes = self._slice_hashes(values, prefixes)
        places = values.number << _RANK_BITS | values.rank
        for number in np.flatnonzero(is_slow).tolist():
            exact = _exact_hashes(self.regions[number], topic_of(number))
            hashes = np.concatenate([hashes, exact])
            places = np.append(places, (number << _RANK_BITS) + np.arange(len(exact)))
        order = np.argsort(places, kind="stable")
        return places[order] >> _RANK_BITS, hashes[order]

    def _find_values(self) -> _Values:
        separators = np.flatnonzero(self.text == 2)
        starts, ends = separators[:-1] + 1, separators[1:]
        # The eight bytes at every position, as numbers.
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
        """Each part of a KEYS value with spaces becomes a value."""
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
        """Which values contain a marked byte."""
        at = np.flatnonzero(marked)
        return np.searchsorted(at, values.end) > np.searchsorted(at, values.start)

    def _slow_numbers(self, values: _Values) -> Array:
        """Records that need the exact way: text outside ASCII, or a property given twice."""
        is_slow = np.zeros(len(self.regions), bool)
        if self.text.max() >= 0x80:
            is_slow[values.number[self._contains(values, self.text >= 0x80)]] = True
        places = np.sort(values.number << _RANK_BITS | values.rank)
        is_slow[places[1:][places[1:] == places[:-1]] >> _RANK_BITS] = True
        return is_slow

    def _slice_hashes(self, values: _Values, prefixes: Array) -> Array:
        if not len(values.number):
            return np.empty(0, np.int32)
        weighted = self.text * _INVERSE_POWERS[: len(self.text)]
        # Sums over [start, end), between them sums that nobody needs.
        bounds = np.stack((values.start, values.end), axis=1).ravel()
        sums = np.add.reduceat(weighted, bounds, dtype=np.uint32)[::2]
        prefix = prefixes[values.number, (values.rank == _RANK_TAGS).astype(np.intp)]
        shift = _POWERS[values.end - values.start]
        return _not_negative(prefix * shift + sums * _POWERS[values.end - 1])


def _not_negative(hashes: Array) -> Array:
    signed = hashes.view(np.int32)
    return np.where(signed == np.iinfo(np.int32).min, 0, np.abs(signed)).astype(np.int32)


def _exact_hashes(region: bytes, topic: str) -> Array:
    keys = record_keys(decode_properties(region))
    return np.array([index_key_hash(topic, key) for key in keys], np.int32)
