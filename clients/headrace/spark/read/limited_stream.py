"""The streaming reader for PySpark 4.2 and later: trigger limits, AvailableNow, lag.

Source: ``pyspark.sql.streaming.datasource``.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from headrace.errors import HeadraceError
from headrace.spark.brief import brief
from headrace.spark.plan.ranges import Range
from headrace.spark.read.lag import MicroBatch
from headrace.spark.read.stream import StreamReader, next_offset
from headrace.spark.retry import OUTAGES

if TYPE_CHECKING:
    from pyspark.sql.streaming.datasource import ReadLimit

    from headrace.spark.plan.ranges import Offsets, Ranges
    from headrace.spark.read.stream import Available

_LAG = "the lag in Spark's progress"
# Stands for limits without a Spark class; this reader applies its own limits anyway.
_ANY_ROWS = 2**63 - 1


class LimitedStreamReader(StreamReader, SupportsTriggerAvailableNow):
    """A reader that gets each micro-batch's start and limit from Spark."""

    _wants_target = False
    _target: Offsets | None = None
    _micro_batch: MicroBatch | None = None

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """The limit that Spark passes back unless the trigger wants all available messages."""
        limits = self._options.limits
        if not limits:
            return ReadAllAvailable()
        if limits.rows is None and limits.bytes is not None:
            return ReadMaxBytes(limits.bytes)
        return ReadMaxRows(limits.rows or _ANY_ROWS)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """End the query where the queues end when its first micro-batch is planned."""
        # Looked up later: it may have to wait for brokers that only the checkpoint names.
        self._wants_target = True

    @brief
    def latestOffset(  # type: ignore[override]  # noqa: N802 - Spark's name
        self, start: dict[str, Any], limit: ReadLimit
    ) -> dict[str, Any]:
        """The end of the micro-batch that begins at ``start``; ``start`` itself if it is empty."""
        known = self.known(start)
        # Spark plans the next micro-batch only after all previous ones are done.
        self.commit_positions(known.offsets)
        available = self.available()
        if self._wants_target and self._target is None:
            self._target = available.latest
        waiting = self._until_target(self.new_ranges(known, available))
        ranges = self._limited(waiting, limit, available)
        self._micro_batch = MicroBatch(available.queues, available.latest, waiting, ranges)
        end = next_offset(known, ranges, available)
        return start if end is known else end.to_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802 - Spark's name
        """The source's ``latestOffset`` in Spark's progress: see ``MicroBatch.lag``."""
        if self._micro_batch is None:
            return None
        try:
            lag = self._micro_batch.lag(self._cluster, time.time_ns() // 1_000_000)
        except HeadraceError as error:
            OUTAGES.failed(_LAG, error)
            return None
        OUTAGES.worked(_LAG)
        return lag

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
