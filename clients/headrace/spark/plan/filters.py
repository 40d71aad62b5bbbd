"""Split Spark's filters into those that the source applies and those left to Spark.

The source applies each accepted filter exactly: queues and offsets at plan time, tags by the
broker's ConsumeQueue, keys by its index, and the remainder in the task. Source:
``pyspark.sql.datasource.Filter``.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_MILLISECOND = dt.timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class Span:
    """Whole numbers from ``start`` up to, but not including, ``end``; None is unbounded."""

    start: int | None = None
    end: int | None = None

    def __and__(self, other: Span) -> Span:
        starts = [start for start in (self.start, other.start) if start is not None]
        ends = [end for end in (self.end, other.end) if end is not None]
        return Span(max(starts, default=None), min(ends, default=None))

    def clip(self, start: int, end: int) -> tuple[int, int]:
        """The part of ``start`` to ``end`` within the span; ``start >= end`` if it is empty."""
        inside = self & Span(start, end)
        assert inside.start is not None
        assert inside.end is not None
        return inside.start, inside.end


_UNBOUNDED = Span()


@dataclass(frozen=True, slots=True)
class Predicates:
    """Conditions on messages; None, or an unbounded Span, accepts any value.

    queues: queue ids.
    queue_offsets: queue offsets.
    store_ms: store times, ms since 1970.
    tags, keys: the whole text of the property.
    """

    queues: frozenset[int] | None = None
    queue_offsets: Span = _UNBOUNDED
    store_ms: Span = _UNBOUNDED
    tags: frozenset[str] | None = None
    keys: frozenset[str] | None = None

    def __and__(self, other: Predicates) -> Predicates:
        return Predicates(
            _both(self.queues, other.queues),
            self.queue_offsets & other.queue_offsets,
            self.store_ms & other.store_ms,
            _both(self.tags, other.tags),
            _both(self.keys, other.keys),
        )

    @property
    def matches_nothing(self) -> bool:
        """True if no message can satisfy the conditions."""
        return frozenset() in {self.queues, self.tags, self.keys}

    def __str__(self) -> str:
        """A readable form for query plans; empty if there are no conditions."""
        parts = [_listed("queue", self.queues), _bounds("queue_offset", self.queue_offsets)]
        parts += [_bounds("store_ms", self.store_ms)]
        parts += [_listed("tags", self.tags), _listed("keys", self.keys)]
        return ", ".join(part for part in parts if part)


def push(
    filters: Iterable[Any], columns: Mapping[str, str] | None = None
) -> tuple[Predicates, list[Any]]:
    """The predicates that the source applies, and the ``filters`` left to Spark.

    filters: ``pyspark.sql.datasource.Filter`` objects, combined by AND.
    columns: column in the filter -> metadata column, see ``schema.own_columns``; the names are the
        same if left out.
    """
    taken = Predicates()
    remaining = []
    for each in filters:
        predicates = _predicates(each, columns)
        if predicates is None:
            remaining.append(each)
        else:
            taken &= predicates
    return taken, [each for each in remaining if not _is_implied(each, columns, taken)]


def _predicates(each: Any, columns: Mapping[str, str] | None) -> Predicates | None:
    """The predicates of a filter; None if the source cannot apply it."""
    make = _MAKERS.get(_column(each, columns))
    return make(type(each).__name__, each.value) if make and hasattr(each, "value") else None


def _column(each: Any, columns: Mapping[str, str] | None) -> str | None:
    """The metadata column of a filter; None if it has none."""
    match getattr(each, "attribute", ()):
        case (name,):
            return columns.get(name) if columns is not None else name
    return None


def _is_implied(each: Any, columns: Mapping[str, str] | None, taken: Predicates) -> bool:
    """True if the filter is IsNotNull on a column whose value another filter prescribes."""
    if type(each).__name__ != "IsNotNull":
        return False
    prescribed = {"tags": taken.tags, "keys": taken.keys}
    return prescribed.get(_column(each, columns) or "") is not None


def _values(kind: str, value: Any, of: type) -> frozenset[Any] | None:
    """The values that a filter allows; None unless it lists them, all of type ``of``."""
    if kind in _EQUAL:
        value = (value,)
    elif kind != "In":
        return None
    return frozenset(value) if all(type(each) is of for each in value) else None


def _queues(kind: str, value: Any) -> Predicates | None:
    queues = _values(kind, value, int)
    return None if queues is None else Predicates(queues=queues)


def _tags(kind: str, value: Any) -> Predicates | None:
    tags = _values(kind, value, str)
    # No message has empty tags, and the broker rejects an empty tag.
    return None if tags is None else Predicates(tags=tags - {""})


def _keys(kind: str, value: Any) -> Predicates | None:
    keys = _values(kind, value, str)
    return None if keys is None else Predicates(keys=keys - {""})


def _queue_offsets(kind: str, value: Any) -> Predicates | None:
    if type(value) is not int or kind not in _SPANS:
        return None
    return Predicates(queue_offsets=_SPANS[kind](value, value + 1))


def _store_ms(kind: str, value: Any) -> Predicates | None:
    if not isinstance(value, dt.datetime) or value.tzinfo is None or kind not in _SPANS:
        return None
    # Store times are whole milliseconds; the value may lie between two.
    floor, rest = divmod(value - _EPOCH, _MILLISECOND)
    if rest and kind in _EQUAL:
        return Predicates(store_ms=Span(0, 0))
    return Predicates(store_ms=_SPANS[kind](floor + bool(rest), floor + 1))


_EQUAL = ("EqualTo", "EqualNullSafe")
# By filter: the span for the first number not less than the value and the first one greater.
_SPANS: dict[str, Callable[[int, int], Span]] = {
    "EqualTo": Span,
    "EqualNullSafe": Span,
    "GreaterThan": lambda _, greater: Span(start=greater),
    "GreaterThanOrEqual": lambda not_less, _: Span(start=not_less),
    "LessThan": lambda not_less, _: Span(end=not_less),
    "LessThanOrEqual": lambda _, greater: Span(end=greater),
}
_MAKERS: dict[str | None, Callable[[str, Any], Predicates | None]] = {
    "queue": _queues,
    "queue_offset": _queue_offsets,
    "store_timestamp": _store_ms,
    "tags": _tags,
    "keys": _keys,
}


def _both(one: frozenset[Any] | None, other: frozenset[Any] | None) -> frozenset[Any] | None:
    if one is None or other is None:
        return other if one is None else one
    return one & other


def _listed(name: str, values: frozenset[Any] | None) -> str:
    if values is None:
        return ""
    return f"{name} in ({', '.join(str(value) for value in sorted(values))})"


def _bounds(name: str, span: Span) -> str:
    start = "" if span.start is None else f"{name} >= {span.start}"
    end = "" if span.end is None else f"{name} < {span.end}"
    return ", ".join(filter(None, (start, end)))
