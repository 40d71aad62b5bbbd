"""Numbers in texts, as Java's ``Integer``, ``Long`` and ``Double.valueOf`` read them.

None stands for NumberFormatException. Doubles become keys in the order of ``Double.compareTo``:
-0.0 is less than 0.0, and NaN is greater than all.
"""

from __future__ import annotations

import math
import re
from typing import Final

DoubleKey = tuple[bool, float, float]

_INTEGER = re.compile(r"[+-]?[0-9]+", re.ASCII)
# Digits of other scripts, which Java reads as long as they take one of its chars.
_ANY_INTEGER = re.compile(r"[+-]?\d+")
_DECIMAL = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)[fFdD]?", re.ASCII)
_HEX = re.compile(
    r"([+-]?0[xX](?:[0-9a-fA-F]+\.?|[0-9a-fA-F]*\.[0-9a-fA-F]+)[pP][+-]?\d+)[fFdD]?", re.ASCII
)
_SPECIAL: Final = {
    sign + name: float(sign + value)
    for sign in ("", "+", "-")
    for name, value in (("NaN", "nan"), ("Infinity", "inf"))
}
_BLANKS: Final = "".join(map(chr, range(33)))
_BMP_MAX: Final = "\uffff"
# Beyond that int() is slow, and refuses.
_DIGITS_MAX: Final = 40


def integer(text: str) -> int | None:
    """A number of 32 bits."""
    return _whole(text, 1 << 31)


def long(text: str) -> int | None:
    """A number of 64 bits."""
    return _whole(text, 1 << 63)


def _whole(text: str, limit: int) -> int | None:
    if _INTEGER.fullmatch(text) is None:
        if _ANY_INTEGER.fullmatch(text) is None or max(text) > _BMP_MAX:
            return None
        text = "".join(each if each in "+-" else str(int(each)) for each in text)
    if len(text) > _DIGITS_MAX:
        sign, digits = (text[0], text[1:]) if text[0] in "+-" else ("", text)
        text = sign + (digits.lstrip("0") or "0")
        if len(text) > _DIGITS_MAX:
            return None
    number = int(text)
    return number if -limit <= number < limit else None


def double(text: str) -> DoubleKey | None:
    """A floating-point number of 64 bits, as a key."""
    text = text.strip(_BLANKS)
    if found := _DECIMAL.fullmatch(text):
        return double_key(float(found[1]))
    if found := _HEX.fullmatch(text):
        return double_key(_from_hex(found[1]))
    special = _SPECIAL.get(text)
    return None if special is None else double_key(special)


def _from_hex(text: str) -> float:
    try:
        return float.fromhex(text)
    except OverflowError:
        return -math.inf if text.startswith("-") else math.inf


def double_key(number: float) -> DoubleKey:
    """The key of a number: equal and ordered as in Java."""
    if math.isnan(number):
        return True, 0.0, 0.0
    return False, float(number), math.copysign(1.0, number)
