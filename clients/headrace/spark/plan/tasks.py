"""The units of a read: picklable values, planned by the driver and executed by tasks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition

from headrace.consumer.pulls import SLICE_BYTES
from headrace.spark.connections import PLAIN, Dial
from headrace.spark.retry import READING, Patience
from headrace_protocol.bodies import MessageQueue
from headrace_protocol.system_topics import READER_GROUP

if TYPE_CHECKING:
    from headrace.spark.body.format import BodyFormat
    from headrace.spark.options import ReadOptions
    from headrace.spark.plan.filters import Predicates
    from headrace.spark.tier.spans import TierRange

# Spark converts Arrow batches of 1000 to 8000 rows fastest.
ROWS_MAX = 8192


@dataclass(frozen=True, slots=True)
class QueueRange:
    """Messages of one queue, from ``start_offset`` up to, but not including, ``end_offset``.

    address: ``host:port`` of the broker that has them. Offsets are queue offsets.
    physical_queue, offset_delta: of a static topic's queue, the queue there, and how much less its
        offsets are; None if the queue is not one.
    tier: where the messages are in the tier, to be read there; None for those that the broker has.
    """

    topic: str
    broker: str
    address: str
    queue_id: int
    start_offset: int
    end_offset: int
    physical_queue: MessageQueue | None = None
    offset_delta: int = 0
    tier: TierRange | None = None

    @property
    def physical(self) -> MessageQueue:
        """The queue at the broker, with offsets less by ``offset_delta``."""
        return self.physical_queue or MessageQueue(self.topic, self.broker, self.queue_id)


class ReadTask(InputPartition):
    """The ranges that one Spark task reads, in order.

    plan_id: the same for all tasks of a batch read, however often Spark runs it.
    """

    def __init__(self, ranges: tuple[QueueRange, ...], plan_id: str | None = None) -> None:
        super().__init__(None)
        self.ranges = ranges
        self.plan_id = plan_id


class TableTask(ReadTask):
    """A queue of a table that one Spark task reads, as consecutive ranges; none if it is empty.

    number: of the queue among the ``queue_count`` queues of its topic, by which keys choose it.
    others: the ranges of the other queues. by_java_hash: whether keys choose queues by Java's hash,
        as with SelectMessageQueueByHash, instead of the hash of headrace's producers.
    """

    def __init__(
        self,
        queue: MessageQueue,
        ranges: tuple[QueueRange, ...],
        number: int = 0,
        queue_count: int = 1,
        others: tuple[QueueRange, ...] = (),
        *,
        by_java_hash: bool = False,
    ) -> None:
        super().__init__(ranges)
        self.queue = queue
        self.by_java_hash = by_java_hash
        self.number = number
        self.queue_count = queue_count
        self.others = others


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Settings of a read, common to all of its tasks.

    group: the consumer group named in pull requests.
    tags: ``"*"`` or ``"a || b"``.
    sql: an SQL92 filter in place of ``tags``; supported by Apache RocketMQ brokers only.
    slice_bytes: size of one pull; bounds a task's memory.
    rows_max: most rows in a RecordBatch.
    fail_on_data_loss: raise DataLoss for missing messages of a range, instead of skipping and
        logging them.
    body: the conversion of bodies to columns.
    predicates: filters that Spark pushed down to the source.
    table: the messages are changes of a table: those without a key are left out, and missing older
        ones are not lost.
    patience: with a broker that restarts.
    dial: how brokers are connected to.
    """

    group: str = READER_GROUP
    tags: str = "*"
    sql: str | None = None
    slice_bytes: int = SLICE_BYTES
    rows_max: int = ROWS_MAX
    fail_on_data_loss: bool = True
    body: BodyFormat | None = None
    predicates: Predicates | None = None
    table: bool = False
    patience: Patience = READING
    dial: Dial = PLAIN

    @classmethod
    def of(
        cls, options: ReadOptions, body: BodyFormat | None, predicates: Predicates | None = None
    ) -> ReadPlan:
        """The plan for ``options``."""
        return cls(
            group=options.reader_group,
            tags=options.tags,
            sql=options.sql,
            fail_on_data_loss=options.fail_on_data_loss,
            body=body,
            predicates=predicates,
            table=options.table,
            dial=options.dial,
            patience=options.patience,
        )
