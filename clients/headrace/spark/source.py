"""The entry point of ``format("headrace")`` for Spark.

Source: docs/spark.md; ``pyspark.sql.datasource``.
"""

from __future__ import annotations

import sys
from functools import cached_property
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from headrace.errors import HeadraceError
from headrace.spark.brief import brief
from headrace.spark.options import body_option, read_options
from headrace.spark.read.schema import source_schema

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType

    from headrace.spark.body.format import BodyFormat
    from headrace.spark.options import ReadOptions

_PUSHDOWN_WORKER = "pyspark.sql.worker.data_source_pushdown_filters"


class HeadraceSource(DataSource):
    """Topics of headrace or Apache RocketMQ as a table or a stream."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self.options = dict(options)

    @classmethod
    def name(cls) -> str:
        """The name to pass to ``format``."""
        return "headrace"

    @brief
    def schema(self) -> StructType:
        """The columns of a read. Raises OptionError, SchemaError."""
        return source_schema(self._body, table=self._read_options.table)

    @brief
    def reader(self, schema: StructType) -> DataSourceReader:
        """A batch reader, which accepts filters where Spark allows that. Raises OptionError."""
        # Imported here: Spark also starts processes that only ask for the name and the schema.
        if self._read_options.table:
            from headrace.spark.read.table import TableReader

            return TableReader(self._read_options, self._body, schema)
        from headrace.spark.read.batch import BatchReader, FilteringReader

        # Spark rejects any reader with pushFilters while filter pushdown is disabled.
        reader = FilteringReader if _pushes_filters() else BatchReader
        return reader(self._read_options, self._body, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's
        """A stream reader. Invalid options raise when Spark first calls it, see RefusedReader."""
        from headrace.spark.read.readers import RefusedReader, stream_reader

        try:
            return stream_reader(self._read_options, self._body, schema)
        except HeadraceError as error:
            return RefusedReader(error)

    @brief
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """A batch writer. Raises OptionError, SchemaError, TopicNotFound, NoQueue."""
        from headrace.spark.write.sink import batch_writer

        return batch_writer(self.options, schema, overwrite=overwrite)

    @brief
    def streamWriter(  # noqa: N802 - Spark's name
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        """A stream writer. Raises as ``writer``."""
        from headrace.spark.write.sink import stream_writer

        return stream_writer(self.options, schema, overwrite=overwrite)

    @cached_property
    def _read_options(self) -> ReadOptions:
        return read_options(self.options)

    @cached_property
    def _body(self) -> BodyFormat | None:
        return body_option(self._read_options.schema, self._read_options.encoding)


def _pushes_filters() -> bool:
    """True in the worker process in which Spark pushes filters down."""
    main = getattr(sys.modules["__main__"], "__spec__", None)
    return _PUSHDOWN_WORKER in sys.modules or getattr(main, "name", None) == _PUSHDOWN_WORKER
