"""The values of a condition, and tables of the operators on them.

A condition is true, false, unknown (a property is missing) or an error (a property can't be
compared); a message matches if it is true. An error differs from unknown: ``unknown OR true`` is
true, while Apache's broker gives up at the first error.
"""

from __future__ import annotations

from typing import Final

FALSE: Final = 0
TRUE: Final = 1
UNKNOWN: Final = 2
ERROR: Final = 3
_ALL: Final = (FALSE, TRUE, UNKNOWN, ERROR)

NOT: Final = bytes((TRUE, FALSE, UNKNOWN, ERROR))
IS_NULL: Final = bytes((FALSE, FALSE, TRUE, ERROR))
# Of ``condition = number`` and ``condition = text``, which Apache's broker can't convert.
EQUALS_NUMBER: Final = bytes((FALSE, FALSE, UNKNOWN, ERROR))
EQUALS_TEXT: Final = bytes((ERROR, ERROR, UNKNOWN, ERROR))
# Of ``number = condition``, and of text operators on a condition.
NEVER: Final = bytes((FALSE, FALSE, FALSE, ERROR))
# Of ``nothing = condition``.
NULL_EQUALS: Final = bytes((UNKNOWN, UNKNOWN, TRUE, ERROR))


def _and(left: int, right: int) -> int:
    if left in (FALSE, ERROR):
        return left
    return right if right in (FALSE, ERROR) else max(left, right)


def _or(left: int, right: int) -> int:
    if left in (TRUE, ERROR):
        return left
    return right if right in (TRUE, ERROR) else max(left, right)


def _equal(left: int, right: int) -> int:
    if ERROR in (left, right):
        return ERROR
    if UNKNOWN in (left, right):
        # What is missing on the right equals nothing, as in Apache's broker.
        return TRUE if left == right else UNKNOWN if left == UNKNOWN else FALSE
    return TRUE if left == right else FALSE


def _equal_to_property(left: int, is_there: int) -> int:
    found = _equal(left, is_there)
    return ERROR if UNKNOWN not in (left, is_there) else found


# Indexed by 4 * left + right.
AND: Final = bytes(_and(left, right) for left in _ALL for right in _ALL)
OR: Final = bytes(_or(left, right) for left in _ALL for right in _ALL)
EQUAL: Final = bytes(_equal(left, right) for left in _ALL for right in _ALL)
# Of ``condition = property``, which Apache's broker can't convert; right: TRUE if it is there.
EQUAL_TO_PROPERTY: Final = bytes(_equal_to_property(left, right) for left in _ALL for right in _ALL)
