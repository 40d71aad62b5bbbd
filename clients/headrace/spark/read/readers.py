"""Which streaming reader a query gets: by the PySpark that runs, or one that says what is wrong."""

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
    """In place of a reader that can't be: whatever it is asked, it says why.

    An error on the way to a reader never comes through: PySpark 4.0 to 4.3 then stop the reader
    that they do not have, and raise UnboundLocalError.
    """

    def __init__(self, error: HeadraceError) -> None:
        self._error = error

    def _refuse(self, *_: Any) -> Any:
        raise self._error

    # Spark's names, and with them its types.
    initialOffset = latestOffset = partitions = read = _refuse  # type: ignore[assignment]  # noqa: N815


def stream_reader(
    options: ReadOptions, body: BodyFormat | None, schema: StructType
) -> StreamReader:
    """The reader for the PySpark that runs. Raises OptionError, SchemaError."""
    if find_spec("pyspark.sql.streaming.datasource"):
        from headrace.spark.read.admission import LimitedStreamReader  # imports what only 4.2 has

        return LimitedStreamReader(options, body, schema)
    if options.limits:
        _log.warning(
            "before PySpark 4.2, maxRows, maxBytes and maxSeconds do not limit the first batch of "
            "a new query, and nothing with the trigger availableNow"
        )
    return StreamReader(options, body, schema)
