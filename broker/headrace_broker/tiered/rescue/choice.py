"""A choice of the parts of objects that count, by what the objects alone say.

Objects that a manifest no longer names may still be there: sources of merges, uploads that were
repeated, queues of deleted topics. What is newer counts. An older part counts if it continues the
queue: in its offsets and in its log, without an overlap.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace_broker.tiered.container.stored_tier import Name
    from headrace_protocol.tier.rows import ObjectRow, Part


class _Chosen:
    """Parts of a queue, in order."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        # Uploads are in the order of their offsets: nothing older is past the newer ones.
        self._end_max = 1 << 63

    def take(self, part: Part, *, is_upload: bool) -> bool:
        """Take an older part than all before, if it belongs to the same queue."""
        at = bisect_left(self._parts, part.first, key=lambda other: other.first)
        before, after = self._parts[:at][-1:], self._parts[at : at + 1]
        is_next = all(_follows(part, other) for other in before)
        is_next = is_next and all(_follows(other, part) for other in after)
        if not part.count or part.end > self._end_max or not is_next:
            return False
        self._parts.insert(at, part)
        if is_upload:
            self._end_max = part.first
        return True


def _follows(part: Part, other: Part) -> bool:
    if part.first == other.end:
        return part.log_base == other.log_end
    return part.first > other.end and part.log_base >= other.log_end


def choose(rows: Iterable[ObjectRow]) -> list[ObjectRow]:
    """The rows of objects that count, each with the parts of it that do.

    rows: of all objects. Names are in the order in which objects were made.
    """
    queues: dict[Name, _Chosen] = {}
    found = []
    for row in sorted(rows, key=lambda row: row.name, reverse=True):
        parts: dict[str, list[Part]] = {}
        for topic, of_topic in row.parts.items():
            for part in sorted(of_topic, key=lambda part: part.first, reverse=True):
                queue = queues.setdefault((topic, part.queue_id), _Chosen())
                if queue.take(part, is_upload=not row.level):
                    parts.setdefault(topic, []).append(part)
        if parts:
            found.append(msgspec.structs.replace(row, parts=parts))
    return found
