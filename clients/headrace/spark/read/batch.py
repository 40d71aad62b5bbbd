"""The batch reader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import uuid4

from pyspark.sql.datasource import DataSourceReader

from headrace.spark.brief import brief, brief_rows
from headrace.spark.cluster import Cluster
from headrace.spark.errors import OptionError
from headrace.spark.options import Point
from headrace.spark.plan.direct import tasks_for
from headrace.spark.plan.filters import push
from headrace.spark.plan.ranges import Range, drop_lost, extent, narrow, resolve
from headrace.spark.plan.tasks import ReadPlan, ReadTask
from headrace.spark.read.columns import arrow_schema
from headrace.spark.read.frozen import execution_id, warn_if_repeated
from headrace.spark.read.schema import own_columns
from headrace.spark.read.task import read_range
from headrace.spark.tier.manifest import open_tier

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import pyarrow as pa
    from pyspark.sql.datasource import Filter, InputPartition
    from pyspark.sql.types import StructType

    from headrace.spark.body.format import BodyFormat
    from headrace.spark.options import ReadOptions
    from headrace.spark.plan.filters import Predicates
    from headrace.spark.tier.manifest import StoredTier

_EARLIEST = Point("earliest")
_LATEST = Point("latest")


class BatchReader(DataSourceReader):
    """Reads the messages that queues have when the read is planned."""

    def __init__(self, options: ReadOptions, body: BodyFormat | None, schema: StructType) -> None:
        """Raises OptionError, SchemaError."""
        for name, value in options.limits.named().items():
            raise OptionError(
                name, str(value), "limits a streaming trigger; a batch read ends at option ending"
            )
        self._options = options
        self._body = body
        self._schema: pa.Schema = arrow_schema(schema, body)
        self._predicates: Predicates | None = None

    @brief
    def partitions(self) -> Sequence[InputPartition]:
        """Plan the tasks. Raises HeadraceError if the cluster cannot satisfy the options."""
        options = self._options
        with self._source() as cluster:
            queues = cluster.queues(options.topics)
            if isinstance(cluster, Cluster):
                cluster.require_whole()
                cluster.check_sql(options.sql, queues)
            has = extent(cluster, queues)
            starts = resolve("starting", options.starting or _EARLIEST, cluster, queues, has)
            ends = resolve("ending", options.ending or _LATEST, cluster, queues, has)
            ranges = {queue: Range(starts[queue], ends[queue]) for queue in queues}
            ranges = drop_lost(ranges, has.min, fail=options.fail_on_data_loss)
            if self._predicates:
                ranges = narrow(ranges, self._predicates, cluster, queues)
            tasks = [*tasks_for(cluster, queues, ranges, options)] or [ReadTask(())]
        plan_id = uuid4().hex
        for task in tasks:
            task.plan_id = plan_id
        return tasks

    def _source(self) -> Cluster | StoredTier:
        """The source of the read: the brokers of a cluster, or a tier without one."""
        access = self._options.tier
        if access is not None and access.manifest is not None:
            return open_tier(access)
        options = self._options
        return Cluster(
            options.nameservers, options.dial, allow_partial=not options.fail_on_data_loss
        )

    @brief_rows
    def read(self, partition: InputPartition) -> Iterator[Any]:
        """The rows of a task, as Arrow batches."""
        assert isinstance(partition, ReadTask)
        if self._options.ending is None:
            warn_if_repeated(partition.plan_id, execution_id(), str(self._options.topics))
        plan = ReadPlan.of(self._options, self._body, self._predicates)
        return read_task(plan, partition, self._schema)


class FilteringReader(BatchReader):
    """A batch reader to which Spark pushes filters down."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Accept the filters that the source applies; return the others to Spark."""
        self._predicates, remaining = push(filters, own_columns(self._body))
        return remaining


def read_task(plan: ReadPlan, task: ReadTask, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of a task, range by range."""
    for each in task.ranges:
        yield from read_range(plan, each, schema)
