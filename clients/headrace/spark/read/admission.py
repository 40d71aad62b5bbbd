"""The streaming reader for PySpark 4.2 and later: limits per trigger, AvailableNow, lag.

Source: ``pyspark.sql.streaming.datasource``.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from headrace.errors import HeadraceError
from headrace.spark.plan.ranges import Range
from headrace.spark.read.progress import Batch
from headrace.spark.read.stream import StreamReader, next_offset

if TYPE_CHECKING:
    from pyspark.sql.streaming.datasource import ReadLimit

    from headrace.spark.plan.ranges import Offsets, Ranges
    from headrace.spark.read.stream import Available

_log = logging.getLogger("headrace.spark")
# For limits that Spark has no class for; ours are known here anyway.
_ANY_ROWS = 2**63 - 1


class LimitedStreamReader(StreamReader, SupportsTriggerAvailableNow):
    """Spark says where each batch begins, and how much it may take."""

    _wants_target = False
    _target: Offsets | None = None
    _batch: Batch | None = None

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """What Spark hands back when the trigger does not want all there is."""
        limits = self._options.limits
        if not limits:
            return ReadAllAvailable()
        if limits.rows is None and limits.bytes is not None:
            return ReadMaxBytes(limits.bytes)
        return ReadMaxRows(limits.rows or _ANY_ROWS)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """The query ends where the queues end when its first batch is planned."""
        # Not looked up yet: brokers that only the checkpoint knows may have to be waited for.
        self._wants_target = True

    def latestOffset(  # type: ignore[override]  # noqa: N802 - Spark's name
        self, start: dict[str, Any], limit: ReadLimit
    ) -> dict[str, Any]:
        """Where the batch that begins at ``start`` ends; ``start`` itself when there is nothing."""
        known = self.known(start)
        # Spark asks for the next batch when all before it are done.
        self.show_progress(known.offsets)
        available = self.available()
        if self._wants_target and self._target is None:
            self._target = available.latest
        waiting = self._until_target(self.new_ranges(known, available))
        ranges = self._limited(waiting, limit, available)
        self._batch = Batch(available.queues, available.latest, waiting, ranges)
        end = next_offset(known, ranges, available)
        return start if end is known else end.to_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802 - Spark's name
        """What Spark's progress shows as the source's ``latestOffset``: see ``progress``."""
        if self._batch is None:
            return None
        try:
            return self._batch.progress(self._cluster, time.time_ns() // 1_000_000)
        except HeadraceError as error:
            _log.warning("the progress is not shown: %s", error)
            return None

    def _until_target(self, ranges: Ranges) -> Ranges:
        target = self._target
        if target is None:
            return ranges
        return {
            queue: Range(start, min(end, target[queue]))
            for queue, (start, end) in ranges.items()
            if queue in target
        }

    def _limited(self, ranges: Ranges, limit: ReadLimit, available: Available) -> Ranges:
        if isinstance(limit, ReadAllAvailable):
            return ranges
        limits = self._options.limits
        if isinstance(limit, ReadMaxRows):
            limits = dataclasses.replace(limits, rows=limit.max_rows)
        return self.within(limits, ranges, available)
