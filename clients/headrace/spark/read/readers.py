"""Choose the streaming reader for the installed PySpark, or one that reports an error."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader

from headrace.spark.read.stream import StreamReader

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from headrace.errors import HeadraceError
    from headrace.spark.body.format import BodyFormat
    from headrace.spark.options import ReadOptions

_log = logging.getLogger("headrace.spark")


class RefusedReader(DataSourceStreamReader):
    """A reader for invalid options: every method raises the error.

    An error raised while Spark creates a reader is lost: PySpark 4.0 to 4.3 then try to stop the
    reader that was not created, and raise UnboundLocalError instead.
    """

    def __init__(self, error: HeadraceError) -> None:
        self._error = error

    def _refuse(self, *_: Any) -> Any:
        raise self._error

    # Spark's names and types.
    initialOffset = latestOffset = partitions = read = _refuse  # type: ignore[assignment]  # noqa: N815


def stream_reader(
    options: ReadOptions, body: BodyFormat | None, schema: StructType
) -> StreamReader:
    """The reader for the installed PySpark. Raises OptionError, SchemaError."""
    if find_spec("pyspark.sql.streaming.datasource"):
        from headrace.spark.read.limited_stream import LimitedStreamReader  # needs PySpark 4.2

        return LimitedStreamReader(options, body, schema)
    if options.limits:
        _log.warning(
            "before PySpark 4.2, maxRows, maxBytes and maxSeconds do not limit the first "
            "micro-batch of a new query, and have no effect with trigger availableNow"
        )
    return StreamReader(options, body, schema)
