"""The bits of a group's filter in the Bloom filters of Apache's broker.

That broker ignores all saved filters if one of them has other bits, so they are saved with them;
nothing here reads them. Source: docs/store-format.md "consumerFilter.json".
"""

from __future__ import annotations

from typing import Final

# Of 32 consumers with an error rate of 20 %, the peer's defaults.
BIT_COUNT: Final = 112
_HASH_COUNT: Final = 3
_MASK: Final = (1 << 64) - 1
_C1: Final = 0x87C37B91114253D5
_C2: Final = 0x4CF5AD432745937F


def bit_positions(group: str, topic: str) -> list[int]:
    """The positions of a group that subscribes to a topic."""
    first = _murmur3(f"{group}#{topic}".encode())
    one, other = _signed(first), _signed(first >> 32)
    sums = (_signed(one + number * other) for number in range(1, _HASH_COUNT + 1))
    return [(~each if each < 0 else each) % BIT_COUNT for each in sums]


def _signed(number: int) -> int:
    """The lowest 32 bits as Java's int."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


def _murmur3(data: bytes) -> int:
    """The first 64 bits of murmur3_128 with seed 0, as Guava computes it."""
    one = other = 0
    whole = len(data) // 16 * 16
    for at in range(0, whole, 16):
        low = int.from_bytes(data[at : at + 8], "little")
        high = int.from_bytes(data[at + 8 : at + 16], "little")
        one = (_rotated(one ^ _mixed(low, _C1, 31, _C2), 27) + other) * 5 + 0x52DCE729 & _MASK
        other = (_rotated(other ^ _mixed(high, _C2, 33, _C1), 31) + one) * 5 + 0x38495AB5 & _MASK
    rest = data[whole:].ljust(16, b"\0")
    one ^= _mixed(int.from_bytes(rest[:8], "little"), _C1, 31, _C2) ^ len(data)
    other ^= _mixed(int.from_bytes(rest[8:], "little"), _C2, 33, _C1) ^ len(data)
    one = one + other & _MASK
    other = other + one & _MASK
    return _final(one) + _final(other) & _MASK


def _rotated(number: int, bits: int) -> int:
    return (number << bits | number >> 64 - bits) & _MASK


def _mixed(number: int, before: int, bits: int, after: int) -> int:
    return _rotated(number * before & _MASK, bits) * after & _MASK


def _final(number: int) -> int:
    number = (number ^ number >> 33) * 0xFF51AFD7ED558CCD & _MASK
    number = (number ^ number >> 33) * 0xC4CEB9FE1A85EC53 & _MASK
    return number ^ number >> 33
