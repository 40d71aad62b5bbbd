"""The columns of a read.

Does not import Arrow, because Spark starts a separate process just to get the schema.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from headrace.spark.body.ddl import parse_ddl
from headrace.spark.errors import SchemaError

if TYPE_CHECKING:
    from pyspark.sql.types import DataType

    from headrace.spark.body.format import BodyFormat

# The column with the reason why a row's body could not be decoded, null for valid bodies.
CORRUPT = "_corrupt"
# The column of a table that says whether a row deletes its key.
DELETED = "deleted"
# Prefix of a metadata column whose name the bodies use too.
_PREFIX = "_"
_OWN_COLUMNS = """
    topic string not null, broker string not null, queue int not null,
    queue_offset bigint not null, physical_offset bigint not null, message_id string not null,
    keys string, tags string, properties map<string, string> not null,
    born_timestamp timestamp not null, store_timestamp timestamp not null,
    born_host string not null, reconsume_times int not null, value binary not null
"""


def source_schema(body: BodyFormat | None = None, *, table: bool = False) -> StructType:
    """All columns of a read: the bodies' fields, the reason for corrupt ones, the metadata.

    table: the columns of a table, in which the value of a deleted key is null.
    """
    own = parse_ddl(_OWN_COLUMNS)
    shown = {name: _shown_name(name, body) for name in own.names}
    own_fields = [
        StructField(
            shown[field.name],
            field.dataType,
            field.nullable or (table and field.name == "value"),
        )
        for field in own.fields
    ]
    if table:
        own_fields.append(StructField(_shown_name(DELETED, body), BooleanType(), nullable=False))
    if body is None:
        return StructType(own_fields)
    schema = StructType([*body.fields, StructField(CORRUPT, StringType()), *own_fields])
    _check_names(schema)
    return schema


def own_columns(body: BodyFormat | None = None, *, table: bool = False) -> dict[str, str]:
    """Name in the schema -> metadata column."""
    own = {_shown_name(name, body): name for name in parse_ddl(_OWN_COLUMNS).names}
    if table:
        own |= {_shown_name("value", body): "value_or_null", _shown_name(DELETED, body): DELETED}
    return own


def _shown_name(name: str, body: BodyFormat | None) -> str:
    # Spark's column names are case-insensitive.
    is_taken = body is not None and name in map(str.lower, body.names)
    return _PREFIX + name if is_taken else name


def _check_names(kind: DataType, path: str = "") -> None:
    """Raise SchemaError if Spark, which ignores case, can't tell two columns or fields apart."""
    match kind:
        case ArrayType():
            _check_names(kind.elementType, f"{path}[]")
        case MapType():
            _check_names(kind.valueType, f"{path}{{}}")
        case StructType():
            lower = [name.lower() for name in kind.names]
            if twice := {name for name in kind.names if lower.count(name.lower()) > 1}:
                where = f" in {path}" if path else ""
                raise SchemaError(
                    f"the bodies' schema has {', '.join(sorted(twice))}{where}, a duplicate "
                    "column: leave it out, and take it from the column value if needed"
                )
            for field in kind.fields:
                _check_names(field.dataType, f"{path}.{field.name}".lstrip("."))
