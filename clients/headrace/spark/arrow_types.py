"""Convert Spark types to Arrow types."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType


def to_arrow(schema: StructType) -> pa.Schema:
    """The Arrow form of a schema, converted by Spark itself because Spark compares the two."""
    from pyspark.sql.pandas.types import to_arrow_schema

    try:
        return to_arrow_schema(schema, timezone="UTC")
    except TypeError:  # before 4.2: no such argument, timestamps are always UTC
        return to_arrow_schema(schema)
