"""A quick check of what ``KeyDemand`` asks, for messages to one queue.

It sees at a glance that messages have a key, belong to the queue, fit, and are stored unchanged.
What it does not see that way is left to ``KeyDemand``: a key that does not begin with printable
ASCII, KEYS twice, ``__DELETE__``, and every message that is rejected.

Source: docs/compaction.md "Messages"; tests/broker/compaction/test_compaction_key_check.py.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import numpy as np

from headrace_broker.compaction.keys import queue_of_key
from headrace_broker.store.log.uniform_batch import UniformBatch
from headrace_protocol.message import DELETE, KEYS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from headrace_broker.store.log.commit_log import BatchItems
    from headrace_protocol.columns import Array

_NAME: Final = f"{KEYS}\x01"
_RAW_NAME: Final = _NAME.encode()
_RAW_DELETE: Final = DELETE.encode()
_LENGTH_BYTES: Final = 2  # before the properties of an item
_PRINTABLE: Final = bytes(range(0x21, 0x7F))
_ANY: Final = "any"
_KEY: Final = re.compile(_RAW_NAME + rb"([^\x02]*)")
_NAME_NUMBER: Final = int.from_bytes(_RAW_NAME, "big")
_SEPARATOR: Final = 2


class KeyCheck:
    """See ``QuickCheck``."""

    def __init__(self, queue_id: int, queue_count: int, rule: str, record_bytes_max: int) -> None:
        """rule: ``key.queue`` of the topic. record_bytes_max: as for ``KeyDemand``."""
        self._queue_id = queue_id
        self._queue_count = queue_count
        self._rule = rule
        self._record_bytes_max = record_bytes_max

    def passes(self, properties: str) -> bool:
        """See ``QuickCheck``. Of a single message even the largest fits."""
        before, _, after = properties.partition(_NAME)
        return (
            "!" <= after[:1] <= "~"
            and (not before or before[-1] == "\x02")
            and _NAME not in after
            and DELETE not in properties
            and (self._rule == _ANY or self._are_here([after.partition("\x02")[0]]))
        )

    def passes_items(self, items: BatchItems) -> bool:
        """See ``QuickCheck``."""
        if items.record_bytes_max > self._record_bytes_max or _has_delete(items.ends):
            return False
        if isinstance(items, UniformBatch):
            has_keys = _have_keys_alike(items.ends, items.count)
        else:
            has_keys = _have_keys(items.ends, items.properties_starts)
        return has_keys and (self._rule == _ANY or self._are_here(_keys(items.properties())))

    def passes_all(self, properties: Sequence[bytes], record_bytes: int) -> bool:
        """See ``QuickCheck``."""
        text = b"".join(properties)
        sizes = np.fromiter(map(len, properties), np.int64, len(properties))
        return (
            record_bytes <= self._record_bytes_max
            and not _has_delete(text)
            and _have_keys(text, np.cumsum(sizes) - sizes)
            and (self._rule == _ANY or self._are_here(_keys(properties)))
        )

    def _are_here(self, keys: Iterable[str]) -> bool:
        rule, count, here = self._rule, self._queue_count, self._queue_id
        return all(key.isascii() and queue_of_key(rule, key, count) == here for key in keys)


def _keys(properties: Sequence[bytes]) -> Iterable[str]:
    """The keys in properties of which each has one."""
    # As latin-1, since a key that is no ASCII text doesn't pass anyway.
    return (key.decode("latin-1") for key in _KEY.findall(b"\x02".join(properties)))


def _has_delete(text: bytes) -> bool:
    # A single byte is found at a tenth of the cost of a text, and this one is rare.
    return b"L" in text and _RAW_DELETE in text


def _have_keys_alike(ends: bytes, count: int) -> bool:
    """True if each item of a uniform batch has one KEYS, at the same position in all."""
    stride = len(ends) // count
    at = ends.find(_RAW_NAME, _LENGTH_BYTES, stride)
    if at < 0 or not (at == _LENGTH_BYTES or ends[at - 1] == _SEPARATOR):
        return False
    name = ends[at - 1 : at + len(_RAW_NAME)]
    column = np.ndarray(count, f"V{len(name)}", ends, at - 1, (stride,))
    return (
        column.tobytes() == name * count
        # Other names and values rarely have the letter, and counting a letter costs less.
        and (ends.count(b"S") == count or ends.count(_RAW_NAME) == count)
        and not ends[at + len(_RAW_NAME) :: stride].translate(None, _PRINTABLE)
    )


def _have_keys(text: bytes, starts: Array) -> bool:
    """True if each of the properties that begin at ``starts`` has one KEYS."""
    data = np.frombuffer(text, np.uint8)
    letters = np.flatnonzero(data == _RAW_NAME[0])
    padded = text + bytes(8)
    # The eight bytes from each letter on: the name, the first letter of the key, and two more.
    words = np.ndarray(len(padded) - 7, ">u8", padded, strides=(1,))[letters]
    is_name = words >> np.uint64(24) == _NAME_NUMBER
    names = letters[is_name]
    if len(names) != len(starts):
        return False
    is_property = (data[names - 1] == _SEPARATOR) | (names == starts)
    firsts = words[is_name] >> np.uint64(16) & np.uint64(0xFF)
    is_printable = firsts - np.uint64(_PRINTABLE[0]) < len(_PRINTABLE)
    is_own = (names >= starts) & (names < np.append(starts[1:], len(text)))
    return bool((is_property & is_printable & is_own).all())
