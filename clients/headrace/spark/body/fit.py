"""Fit decoded values to their columns before Arrow sees them.

Bodies are foreign, and Arrow trusts its input: it allocates what a decimal's exponent promises, and
rounds or overflows without an error. Values of the types below are checked here; a value that its
column cannot hold raises ValueError or ArithmeticError.
"""

from __future__ import annotations

import decimal
import math
import re
import struct
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
from pyspark import TaskContext

from headrace.spark.errors import SparkConnectorError

Fit = Callable[[Any], Any]

_FLOAT_MAX = struct.unpack(">f", b"\x7f\x7f\xff\xff")[0]
_ZONE_SETTING = "spark.sql.session.timeZone"
_OFFSET = re.compile(r"(?:UTC|GMT|UT)?([+-])(\d{1,2})(?::?(\d\d)(?::?(\d\d))?)?")


def fitting(kind: pa.DataType) -> Fit | None:
    """A function that fits values of an Arrow type to it; None if every decoded value fits.

    It is called with None, too: a function around it for that would cost as much as it does.
    """
    if pa.types.is_decimal(kind):
        return _decimals(kind)
    if pa.types.is_timestamp(kind) and kind.tz:
        return _times()
    if pa.types.is_float32(kind):
        return _float
    if pa.types.is_list(kind):
        return _items(fitting(kind.value_type))
    if pa.types.is_map(kind):
        return _values(fitting(kind.item_type))
    if pa.types.is_struct(kind):
        fields = [kind.field(number) for number in range(kind.num_fields)]
        return _parts({field.name: fitting(field.type) for field in fields})
    return None


def session_zone() -> tzinfo | None:
    """The time zone of the session that runs this task; None for that of this machine.

    Raises SparkConnectorError for a zone that only Java knows.
    """
    context = TaskContext.get()
    name = context.getLocalProperty(_ZONE_SETTING) if context else None
    return None if name is None else _zone(name)


def _zone(name: str) -> tzinfo:
    if name == "Z":
        return UTC
    if found := _OFFSET.fullmatch(name):
        sign, *parts = found.groups()
        hours, minutes, seconds = (int(part or 0) for part in parts)
        offset = timedelta(hours=hours, minutes=minutes, seconds=seconds)
        return timezone(-offset if sign == "-" else offset)
    try:
        return ZoneInfo(name)
    except (LookupError, ValueError, OSError):
        raise SparkConnectorError(
            f"{_ZONE_SETTING}={name} is not a zone that Python knows, so times without a zone "
            "cannot be read: set it to a region such as America/Los_Angeles, or to an offset"
        ) from None


# --- values ---------------------------------------------------------------------------------------


def _decimals(kind: pa.DataType) -> Fit:
    # The context bounds the result: it never has more digits than the column.
    traps = [decimal.Inexact, decimal.InvalidOperation]
    quantize = decimal.Context(prec=kind.precision, traps=traps).quantize
    unit = decimal.Decimal(1).scaleb(-kind.scale)
    name = f"decimal({kind.precision},{kind.scale})"

    def fit(value: decimal.Decimal | None) -> decimal.Decimal | None:
        if value is None:
            return None
        try:
            fitted = quantize(value, unit)
        except ArithmeticError:
            raise ValueError(f"the number does not fit {name}") from None
        if not fitted.is_finite():
            raise ValueError(f"{fitted} does not fit {name}")
        return fitted

    return fit


def _times() -> Fit:
    zone: list[tzinfo | None] = []

    def fit(value: datetime | None) -> datetime | None:
        if value is None or value.tzinfo is not None:
            return value
        if not zone:  # most bodies have zones, so the session's is looked up late
            zone.append(session_zone())
        return value.astimezone() if zone[0] is None else value.replace(tzinfo=zone[0])

    return fit


def _float(value: float | None) -> float | None:
    if value is not None and _FLOAT_MAX < abs(value) < math.inf:
        raise ValueError(f"{value} does not fit float")
    return value


# --- values within others -------------------------------------------------------------------------


def _optional(fit: Fit) -> Fit:
    return lambda value: None if value is None else fit(value)


def _items(fit: Fit | None) -> Fit | None:
    return fit and _optional(lambda values: [fit(value) for value in values])


def _values(fit: Fit | None) -> Fit | None:
    return fit and _optional(lambda values: {key: fit(value) for key, value in values.items()})


def _parts(fits: dict[str, Fit | None]) -> Fit | None:
    checked = [(name, fit) for name, fit in fits.items() if fit is not None]

    def fit_parts(values: dict[str, Any]) -> dict[str, Any]:
        return values | {name: fit(values[name]) for name, fit in checked if name in values}

    return _optional(fit_parts) if checked else None
