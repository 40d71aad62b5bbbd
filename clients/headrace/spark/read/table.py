"""The batch reader of a table: one row for each key that is not deleted.

A task reads its queue twice: first for the newest offset of each key, then for the messages at
these offsets. So its memory does not grow with the values.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from pyspark.sql.datasource import DataSourceReader

from headrace.producer.selector import queue_indices
from headrace.spark.brief import brief, brief_rows
from headrace.spark.cluster import Cluster
from headrace.spark.connections import TASK_TIMEOUT_MS, Connections
from headrace.spark.errors import KeyInTwoQueues, OptionError
from headrace.spark.plan.tables import current, table_tasks
from headrace.spark.plan.tasks import ReadPlan, TableTask
from headrace.spark.read.columns import RecordBlock, arrow_schema
from headrace.spark.read.newest import Hasher, Hashes, HashSet, Newest
from headrace.spark.read.task import BatchMaker, read_slices
from headrace_protocol.codes import RequestCode
from headrace_protocol.headers import GetMaxOffsetHeader, OffsetResponseHeader
from headrace_protocol.java_hash import java_hash
from headrace_protocol.message import property_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa
    from pyspark.sql.datasource import InputPartition
    from pyspark.sql.types import StructType

    from headrace.spark.body.format import BodyFormat
    from headrace.spark.options import ReadOptions
    from headrace.spark.plan.tasks import QueueRange
    from headrace_protocol.columns import Array, RecordColumns


class TableReader(DataSourceReader):
    """Reads tables as they are when its tasks run, which may be often for one plan."""

    def __init__(self, options: ReadOptions, body: BodyFormat | None, schema: StructType) -> None:
        """Raises OptionError, SchemaError."""
        for name, is_given in (
            *((name, True) for name in options.limits.named()),
            ("starting", options.starting is not None),
            ("ending", options.ending is not None),
        ):
            if is_given:
                raise OptionError(name, None, "a batch read of a table reads the whole table")
        self._options = options
        self._body = body
        self._schema: pa.Schema = arrow_schema(schema, body, table=True)

    @brief
    def partitions(self) -> Sequence[InputPartition]:
        """Plan the tasks. Raises HeadraceError if the cluster cannot satisfy the options."""
        with self._cluster() as cluster:
            queues = cluster.queues(self._options.topics)
            cluster.require_whole()
            return table_tasks(cluster, queues)

    def _cluster(self) -> Cluster:
        options = self._options
        return Cluster(
            options.nameservers, options.dial, allow_partial=not options.fail_on_data_loss
        )

    @brief_rows
    def read(self, partition: InputPartition) -> Iterator[Any]:
        """The rows of a task, as Arrow batches."""
        assert isinstance(partition, TableTask)
        task = current(partition, self._cluster, self._options.patience)
        return read_table(ReadPlan.of(self._options, self._body), task, self._schema)


def read_table(plan: ReadPlan, task: TableTask, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The newest row of each key of a queue. Raises KeyInTwoQueues, and as ``read_range``."""
    if task.ranges:
        yield from _TableQueue(plan, task, schema).rows()


class _Keyed:
    """Records of one queue that have a key."""

    def __init__(self, part: QueueRange, columns: RecordColumns, hasher: Hasher) -> None:
        block = RecordBlock(part.topic, part.broker, part.queue_id, columns)
        keys = block.raw_keys.to_pylist()
        kept = [index for index, key in enumerate(keys) if key]
        if len(kept) < len(keys):
            block, keys = block.select(np.array(kept, np.int64)), [keys[index] for index in kept]
        self.block = block
        self.keys: list[bytes] = keys
        self.hashes = hasher.hashes(keys)

    @property
    def offsets(self) -> Array:
        """Queue offset of each record."""
        return self.block.columns.queue_offset


class _TableQueue:
    """The work of one task."""

    def __init__(self, plan: ReadPlan, task: TableTask, schema: pa.Schema) -> None:
        self._plan = plan
        self._task = task
        self._makers = [(part, BatchMaker(plan, part, schema)) for part in task.ranges]
        self._hasher = Hasher()

    def rows(self) -> Iterator[pa.RecordBatch]:
        """The newest message of each key that is not deleted."""
        hashes, offsets, is_live = self._newest()
        live = offsets[is_live]
        is_found = np.zeros(len(live), bool)
        for part, maker in self._makers:
            for columns in read_slices(self._plan, part):
                slots = np.searchsorted(live, columns.queue_offset).clip(max=len(live) - 1)
                is_newest = live[slots] == columns.queue_offset if len(live) else slots > 0
                is_found[slots[is_newest]] = True
                if is_newest.any():
                    yield from maker.batches(columns.select(is_newest))
        if not is_found.all():
            yield from self._replaced(hashes.select(is_live).select(~is_found))

    def _newest(self) -> tuple[Hashes, Array, Array]:
        """Hash, newest offset and existence of each key, ascending by offset."""
        newest = Newest()
        deleted: list[Array] = []
        strays: list[Hashes] = []
        for part in self._task.ranges:
            for keyed in self._keyed(part):
                newest.add(keyed.hashes, keyed.offsets)
                deleted.append(keyed.offsets[keyed.block.is_deleted])
                strays.append(self._strays(keyed))
        self._check_others(strays)
        hashes, offsets = newest.result()
        markers = np.concatenate(deleted) if deleted else np.empty(0, np.int64)
        return hashes, offsets, ~np.isin(offsets, markers, assume_unique=True)

    def _keyed(self, part: QueueRange) -> Iterator[_Keyed]:
        for columns in read_slices(self._plan, part):
            yield _Keyed(part, columns, self._hasher)

    def _strays(self, keyed: _Keyed) -> Hashes:
        """The keys that belong to another queue by the topic's rule."""
        task = self._task
        if task.by_java_hash:
            numbers = [
                abs(java_hash(key.decode(errors="replace"))) % task.queue_count
                for key in keyed.keys
            ]
        else:
            numbers = queue_indices(keyed.keys, task.queue_count)
        return keyed.hashes.select(np.array(numbers, np.int64) != task.number)

    def _check_others(self, strays: Sequence[Hashes]) -> None:
        """Raise KeyInTwoQueues if another queue has one of these keys.

        Of two queues with the same key, at least one is not the key's by the rule. So if all keys
        keep the rule, no task reads another queue.
        """
        if not any(len(each.first) for each in strays):
            return
        wanted = HashSet(Hashes.joined(strays))
        for part in self._task.others:
            for keyed in self._keyed(part):
                is_here = wanted.holds(keyed.hashes)
                if is_here.any():
                    key = property_text(keyed.keys[int(is_here.argmax())])
                    raise KeyInTwoQueues(key, _name(self._task.ranges[0]), _name(part))

    def _replaced(self, missing: Hashes) -> Iterator[pa.RecordBatch]:
        """The rows of keys whose message was compacted away between both reads.

        A newer message has replaced it, behind the end of the planned range.
        """
        part, maker = self._makers[-1]
        wanted = HashSet(missing)
        tail = replace(part, start_offset=part.end_offset, end_offset=_end(self._plan, part))
        newest = Newest()
        found: list[_Keyed] = []
        for keyed in self._keyed(tail):
            is_missing = wanted.holds(keyed.hashes)
            newest.add(keyed.hashes.select(is_missing), keyed.offsets[is_missing])
            found.append(keyed)
        _, offsets = newest.result()
        for keyed in found:
            is_row = np.isin(keyed.offsets, offsets) & ~keyed.block.is_deleted
            if is_row.any():
                yield from maker.batches(keyed.block.columns.select(is_row))


def _name(part: QueueRange) -> str:
    return f"{part.topic}/{part.broker}/{part.queue_id}"


def _end(plan: ReadPlan, part: QueueRange) -> int:
    """One past the last offset of a queue now."""
    physical = part.physical
    header = GetMaxOffsetHeader(
        topic=physical.topic,
        queue_id=physical.queue_id,
        logical=None if part.physical_queue is None else False,
    )
    with Connections(plan.dial, TASK_TIMEOUT_MS) as brokers:
        (response,) = brokers.ask(part.address, [(RequestCode.GET_MAX_OFFSET, header, b"")])
    end = response.expect().header(OffsetResponseHeader).offset + part.offset_delta
    return max(end, part.end_offset)
