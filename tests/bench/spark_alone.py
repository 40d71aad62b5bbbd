"""What Spark itself takes for the rows of our source: a source that has them before it is asked."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from headrace.spark.source import HeadraceSource

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableMapping

    import pyarrow as pa
    from pyspark.sql.types import StructType

TASKS = 16


class AloneSource(DataSource):
    """The first slice of a topic again and again, until there are ``rows``."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        topic = dict(options)
        self._rows = int(topic.pop("rows"))
        self._source = HeadraceSource(topic)

    @classmethod
    def name(cls) -> str:
        """What ``format`` is given."""
        return "alone"

    def schema(self) -> StructType:
        """That of our source."""
        return self._source.schema()

    def reader(self, schema: StructType) -> DataSourceReader:
        """Of a batch."""
        return _AloneReader(self._source.reader(schema), self._rows)


class _AloneReader(DataSourceReader):
    def __init__(self, source: DataSourceReader, rows: int) -> None:
        self._source = source
        self._rows = rows

    def partitions(self) -> list[InputPartition]:
        """Rows of each task."""
        ends = [self._rows * number // TASKS for number in range(TASKS + 1)]
        return [InputPartition(end - start) for start, end in pairwise(ends)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """As many rows as a task has, each slice a view of the first."""
        batch: pa.RecordBatch = next(iter(self._source.read(self._source.partitions()[0])))
        rows = partition.value
        while rows:
            count = min(rows, batch.num_rows)
            yield batch.slice(0, count)
            rows -= count
