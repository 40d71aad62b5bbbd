"""Spark's types as Arrow's."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType


def to_arrow(schema: StructType) -> pa.Schema:
    """The Arrow form of a schema: Spark's own, since Spark compares."""
    from pyspark.sql.pandas.types import to_arrow_schema

    try:
        return to_arrow_schema(schema, timezone="UTC")
    except TypeError:  # before 4.2 timestamps are of UTC without being asked
        return to_arrow_schema(schema)
