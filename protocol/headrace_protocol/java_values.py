"""Converts JSON values to the types of our structs as RocketMQ's JSON reader does.

Clients write whatever Java's reader accepts: the C++ client sends enums as ordinals, others send
numbers as text. The rules are those of fastjson2 in Apache RocketMQ 5.5.0, seen by decoding each
variant with its RemotingSerializable; tests/protocol/test_java_values.py lists them.
"""

from __future__ import annotations

import functools
import json
import math
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import inspect

if TYPE_CHECKING:
    from collections.abc import Callable

# The value of a field that keeps its default.
ABSENT: Any = object()
_NAMES = "names"
_ORDINAL_CHARS = 9


def _names(*names: str) -> msgspec.Meta:
    """The names of an enum's values, in the order of their ordinals."""
    # Other text is a quoted ordinal, or a name in lower case.
    return msgspec.Meta(pattern="^[A-Z]", extra={_NAMES: names})


ConsumeType = Annotated[str, _names("CONSUME_ACTIVELY", "CONSUME_PASSIVELY", "CONSUME_POP")]
MessageModel = Annotated[str, _names("BROADCASTING", "CLUSTERING", "LITE_SELECTIVE")]
ConsumeFromWhere = Annotated[
    str,
    _names(
        "CONSUME_FROM_LAST_OFFSET",
        "CONSUME_FROM_LAST_OFFSET_AND_FROM_MIN_WHEN_BOOT_FIRST",
        "CONSUME_FROM_MIN_OFFSET",
        "CONSUME_FROM_MAX_OFFSET",
        "CONSUME_FROM_FIRST_OFFSET",
        "CONSUME_FROM_TIMESTAMP",
    ),
]
TopicFilterType = Annotated[str, _names("SINGLE_TAG", "MULTI_TAG")]
MessageRequestMode = Annotated[str, _names("PULL", "POP")]

_TRUE = frozenset({"true", "True", "TRUE", "1", "Y"})
_FALSE = frozenset({"false", "False", "FALSE", "0", "N"})
_NO_VALUE = frozenset({"", "null"})


def java_value(value: Any, wanted: Any) -> Any:
    """Convert a decoded JSON value to what ``msgspec.convert`` accepts for ``wanted``, a type.

    Nulls are dropped, since RocketMQ leaves out null fields. What has no conversion stays, so that
    msgspec names it in its error.
    """
    converted = _convert(value, _type_of(wanted))
    return None if converted is ABSENT else converted


@functools.cache
def _type_of(wanted: Any) -> inspect.Type:
    return inspect.type_info(wanted)


def _convert(value: Any, wanted: inspect.Type) -> Any:
    if value is None:
        return ABSENT
    conversion = _CONVERSIONS.get(type(wanted), _anything)
    return conversion(value, wanted)


def _text(value: Any, _: Any) -> Any:
    # The peer also takes objects and lists as their text, which no client relies on.
    return json.dumps(value) if isinstance(value, bool | int | float) else value


def _integer(value: Any, _: Any) -> Any:
    if isinstance(value, str):
        if value in _NO_VALUE:
            return 0
        whole, point, fraction = value.partition(".")
        return whole if point and fraction.isdecimal() else value
    if isinstance(value, float) and math.isfinite(value):
        return int(value)
    return int(value) if isinstance(value, bool) else value


def _boolean(value: Any, _: Any) -> Any:
    if isinstance(value, str):
        if value in _TRUE:
            return True
        return False if value in _FALSE or value in _NO_VALUE else value
    return value == 1 if isinstance(value, int) else value


def _annotated(value: Any, wanted: Any) -> Any:
    """An enum, which bodies keep as the name of its value."""
    names = (wanted.extra or {}).get(_NAMES)
    return _enum_name(value, names) if names else _convert(value, wanted.type)


def _enum_name(value: Any, names: tuple[str, ...]) -> Any:
    if isinstance(value, str) and not value.isdecimal():
        return value.upper() if value.upper() in names else ABSENT
    # Text of more digits is no ordinal, and converting it takes quadratic time.
    ordinal = int(value[:_ORDINAL_CHARS]) if isinstance(value, str) else value
    is_ordinal = not isinstance(ordinal, bool) and ordinal in range(len(names))
    return names[int(ordinal)] if is_ordinal else value


def _list(value: Any, wanted: Any) -> Any:
    if value == "":
        return ABSENT
    items = value if isinstance(value, list) else [value]
    converted = (_convert(item, wanted.item_type) for item in items)
    return [item for item in converted if item is not ABSENT]


def _dict(value: Any, wanted: Any) -> Any:
    if not isinstance(value, dict):
        return value
    converted = {key: _convert(item, wanted.value_type) for key, item in value.items()}
    return {key: item for key, item in converted.items() if item is not ABSENT}


def _struct(value: Any, wanted: Any) -> Any:
    if not isinstance(value, dict):
        return value
    fields = _fields(wanted.cls)
    converted = {
        name: _convert(item, fields[name]) for name, item in value.items() if name in fields
    }
    return {name: item for name, item in converted.items() if item is not ABSENT}


@functools.cache
def _fields(struct: type[msgspec.Struct]) -> dict[str, inspect.Type]:
    """The types of a struct's fields by their names on the wire."""
    info = _type_of(struct)
    assert isinstance(info, inspect.StructType)
    return {field.encode_name: field.type for field in info.fields}


def _union(value: Any, wanted: Any) -> Any:
    """An optional value: a union of one type and None."""
    kinds = [each for each in wanted.types if not isinstance(each, inspect.NoneType)]
    return _convert(value, kinds[0]) if len(kinds) == 1 else _anything(value, wanted)


def _anything(value: Any, _: Any) -> Any:
    if isinstance(value, dict):
        return {key: _anything(item, _) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_anything(item, _) for item in value]
    return value


_CONVERSIONS: dict[type[inspect.Type], Callable[[Any, Any], Any]] = {
    inspect.Metadata: _annotated,
    inspect.StrType: _text,
    inspect.IntType: _integer,
    inspect.BoolType: _boolean,
    inspect.ListType: _list,
    inspect.VarTupleType: _list,
    inspect.SetType: _list,
    inspect.FrozenSetType: _list,
    inspect.DictType: _dict,
    inspect.StructType: _struct,
    inspect.UnionType: _union,
}
