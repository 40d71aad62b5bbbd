"""The spans of a tier with messages of one queue: picklable, for tasks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headrace.spark.tier.locations import open_location
from headrace_protocol.tier.span_queue import SpanQueue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.spark.tier.locations import TierAccess
    from headrace_protocol.tier.location import Location
    from headrace_protocol.tier_bodies import LogSpan, UnitSpan


@dataclass(frozen=True, slots=True)
class TierRange:
    """Messages of a queue in a tier.

    units, log: in order, without overlaps. access: how a plan is asked for again.
    """

    access: TierAccess
    location: Location
    units: tuple[UnitSpan, ...]
    log: tuple[LogSpan, ...]

    def open(self) -> SpanQueue:
        """The queue, to be read. Raises OptionError."""
        return SpanQueue(open_location(self.location), "the queue", self.units, self.log)

    def runs(self, start: int, end: int) -> Iterator[tuple[int, int, bool]]:
        """The range in pieces that are wholly in the tier, or not at all: start, end, which."""
        at = start
        for covered in self._covered():
            first, stop = max(covered[0], at), min(covered[1], end)
            if first >= stop:
                continue
            if at < first:
                yield at, first, False
            yield first, stop, True
            at = stop
        if at < end:
            yield at, end, False

    def _covered(self) -> Iterator[tuple[int, int]]:
        first = stop = -1
        for span in self.units:
            if span.first != stop:
                if first < stop:
                    yield first, stop
                first = span.first
            stop = span.end
        if first < stop:
            yield first, stop

    def cut(self, start: int, end: int) -> TierRange:
        """The part that a range needs, in whole spans."""
        numbers = [
            number
            for number, span in enumerate(self.units)
            if span.first < end and span.end > start
        ]
        if not numbers:
            return replace(self, units=(), log=())
        low, after = self.units[numbers[0]].log_base, numbers[-1] + 1
        high = self.units[after].log_base if after < len(self.units) else -1
        log = tuple(span for span in self.log if span.end > low and (high < 0 or span.base < high))
        return replace(self, units=self.units[numbers[0] : after], log=log)
