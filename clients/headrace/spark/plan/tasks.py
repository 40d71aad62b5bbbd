"""What a read is divided into: picklable values that the driver plans and tasks carry out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition

from headrace.consumer.pulls import READER_GROUP, SLICE_BYTES

if TYPE_CHECKING:
    from headrace.spark.body.format import BodyFormat
    from headrace.spark.options import ReadOptions
    from headrace.spark.plan.filters import Predicates

# Spark turns batches of 1000 to 8000 rows into its own rows fastest.
ROWS_MAX = 8192


@dataclass(frozen=True, slots=True)
class QueueRange:
    """Messages of one queue, from ``start_offset`` up to, and without, ``end_offset``.

    address: ``host:port`` of the broker named ``broker``. Offsets are queue offsets.
    """

    topic: str
    broker: str
    address: str
    queue_id: int
    start_offset: int
    end_offset: int


class ReadTask(InputPartition):
    """What one Spark task reads, one range after the other."""

    def __init__(self, ranges: tuple[QueueRange, ...]) -> None:
        super().__init__(None)
        self.ranges = ranges


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """How the ranges are read: the same for all tasks of a read.

    group: in whose name. tags: ``"*"`` or ``"a || b"``. sql: an SQL92 filter in place of ``tags``;
    only brokers of Apache's have it. slice_bytes: what is asked for at once; it bounds a task's
    memory. rows_max: rows of a RecordBatch. fail_on_data_loss: whether messages of a range that
    are gone are an error (DataLoss), else they are skipped and logged.
    body: how bodies become columns. predicates: what Spark left to the source.
    """

    group: str = READER_GROUP
    tags: str = "*"
    sql: str | None = None
    slice_bytes: int = SLICE_BYTES
    rows_max: int = ROWS_MAX
    fail_on_data_loss: bool = True
    body: BodyFormat | None = None
    predicates: Predicates | None = None

    @classmethod
    def of(
        cls, options: ReadOptions, body: BodyFormat | None, predicates: Predicates | None = None
    ) -> ReadPlan:
        """The plan that ``options`` ask for."""
        return cls(
            group=options.reader_group,
            tags=options.tags,
            sql=options.sql,
            fail_on_data_loss=options.fail_on_data_loss,
            body=body,
            predicates=predicates,
        )
