"""Models as body schemas: the model itself validates each body.

A model is one of pydantic, a msgspec struct or a dataclass, as a ``Topic`` has it.

A model is code, so an option that names one chooses the code to run. Options can come from table
definitions written by others; the environment of Spark's driver must therefore permit models.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import importlib
import os
import types
import typing
import uuid
from datetime import date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import msgspec
import pydantic
from pyspark import cloudpickle
from pyspark.sql import types as t

from headrace.spark.body.kinds import Field, Kind, array, leaf, mapping, struct
from headrace.spark.errors import SchemaError

if TYPE_CHECKING:
    from headrace.typed import Topic

Model = type[Any]

PICKLED_VARIABLE = "HEADRACE_SPARK_PICKLED_SCHEMAS"
MODULES_VARIABLE = "HEADRACE_SPARK_SCHEMA_MODULES"

_PICKLED = "pydantic:"
_LEAVES: dict[Any, t.DataType] = {
    bool: t.BooleanType(),
    int: t.LongType(),
    float: t.DoubleType(),
    str: t.StringType(),
    bytes: t.BinaryType(),
    datetime: t.TimestampType(),
    date: t.DateType(),
    Decimal: t.DecimalType(38, 18),
    uuid.UUID: t.StringType(),
}


def model_schema(model: Model) -> str:
    """The option ``schema`` for a model without an importable module, as in a notebook.

    Spark's driver accepts it only with HEADRACE_SPARK_PICKLED_SCHEMAS=1 in its environment.
    """
    pickled: bytes = cloudpickle.dumps(model)  # type: ignore[no-untyped-call]
    return _PICKLED + base64.b64encode(pickled).decode()


def typed(topic: Topic[Any]) -> dict[str, str]:
    """The options ``topic``, ``schema`` and ``encoding`` of a read of a topic with a model.

    A model of the program itself, which workers cannot import, is passed by ``model_schema``.
    """
    model = topic.model
    module, name = model.__module__, model.__qualname__
    is_importable = module != "__main__" and name.isidentifier()
    schema = f"{module}:{name}" if is_importable else model_schema(model)
    return {"topic": str(topic), "schema": schema, "encoding": topic.form}


def is_pickled(schema: str) -> bool:
    """True if ``schema`` is the result of ``model_schema``."""
    return schema.startswith(_PICKLED)


def check_allowed(schema: str) -> None:
    """Raise SchemaError unless the environment allows options to run this model's code."""
    if is_pickled(schema):
        if os.environ.get(PICKLED_VARIABLE) != "1":
            raise SchemaError(
                "option schema holds a pickled model, and unpickling runs any code in it, even if "
                f"the option comes from a table definition. Set {PICKLED_VARIABLE}=1 in the "
                "environment of Spark's driver before it starts if you trust everyone who writes "
                "its options, or name the model as package.module:Model"
            )
        return
    module = schema.partition(":")[0]
    listed = [name.strip() for name in os.environ.get(MODULES_VARIABLE, "").split(",")]
    if not any(name and f"{module}.".startswith(f"{name}.") for name in listed):
        raise SchemaError(
            f"option schema={schema!r}: importing {module} runs its code, so the module must be "
            f"listed. Set {MODULES_VARIABLE}={module} (comma-separated; a package stands for all "
            "its modules) in the environment of Spark's driver before it starts"
        )


def load_model(schema: str) -> Model:
    """The model for ``package.module:Model`` or a pickled schema. Raises SchemaError."""
    if is_pickled(schema):
        model = cloudpickle.loads(base64.b64decode(schema.removeprefix(_PICKLED)))
    else:
        module, _, name = schema.partition(":")
        try:
            model = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise SchemaError(
                f"schema {schema!r} does not name a model that Spark's Python workers can import: "
                f"{error}; put it on their path, or pass headrace.spark.model_schema({name})"
            ) from error
    if not (isinstance(model, type) and is_model(model)):
        raise SchemaError(
            f"schema {schema!r}: {model!r} is not a pydantic model, msgspec struct or dataclass"
        )
    return model


def is_model(annotation: Any) -> bool:
    """Whether a type is one whose fields become columns."""
    if not isinstance(annotation, type):
        return False
    return is_pydantic(annotation) or _has_fields(annotation)


def is_pydantic(model: type[Any]) -> bool:
    """Whether pydantic validates values of a model; msgspec does those of others."""
    return issubclass(model, pydantic.BaseModel)


def _has_fields(kind: type[Any]) -> bool:
    return issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind)


def model_fields(model: Model) -> tuple[Field, ...]:
    """The fields of a model. Raises SchemaError for a type that no column can hold."""
    try:
        return tuple(
            (name, *_nullable(annotation, f"{model.__name__}.{name}"))
            for name, annotation in _annotations(model).items()
        )
    except RecursionError:
        raise SchemaError(f"{model.__name__} contains itself, which no column can hold") from None


def _annotations(model: Model) -> dict[str, Any]:
    if is_pydantic(model):
        return {name: field.annotation for name, field in model.model_fields.items()}
    hints = typing.get_type_hints(model, include_extras=True)
    return {name: hints[name] for name in _field_names(model)}


def _field_names(model: Model) -> list[str]:
    """The fields of a struct or a dataclass, of a class or of an instance."""
    if hasattr(model, "__struct_fields__"):
        return list(model.__struct_fields__)
    return [field.name for field in dataclasses.fields(model)]


def plain(value: Any) -> Any:
    """A value of a model's field, converted to types that Arrow supports."""
    if _has_fields(type(value)):
        return {name: plain(getattr(value, name)) for name in _field_names(type(value))}
    match value:
        case pydantic.BaseModel():
            return plain(value.model_dump())
        case dict():
            return {key: plain(each) for key, each in value.items()}
        case list() | tuple() | set() | frozenset():
            return [plain(each) for each in value]
        case enum.Enum():
            return value.value
        case uuid.UUID():
            return str(value)
    return value


def _nullable(annotation: Any, path: str) -> tuple[Kind, bool]:
    if typing.get_origin(annotation) in {typing.Union, types.UnionType}:
        others = [each for each in typing.get_args(annotation) if each is not type(None)]
        if len(others) == 1:
            return _kind(others[0], path), True
    return _kind(annotation, path), False


def _kind(annotation: Any, path: str) -> Kind:
    annotation = _plain_type(annotation)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in _LEAVES:
        return leaf(_LEAVES[annotation])
    if is_model(annotation):
        return struct(model_fields(annotation))
    if origin in {list, set, frozenset} or (origin is tuple and arguments[1:] == (...,)):
        item, has_nulls = _nullable(arguments[0], f"{path}[]")
        return array(item, has_nulls=has_nulls)
    if origin is dict and arguments[0] is str:
        value, has_nulls = _nullable(arguments[1], f"{path}{{}}")
        return mapping(value, has_nulls=has_nulls)
    raise SchemaError(f"{path} is {annotation!r}, which no column can hold")


def _plain_type(annotation: Any) -> Any:
    """The value type of Annotated, Literal and enumerations."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _plain_type(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) is typing.Literal:
        return _one_type(typing.get_args(annotation), annotation)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return _one_type([member.value for member in annotation], annotation)
    return annotation


def _one_type(values: Any, annotation: Any) -> Any:
    kinds = {type(value) for value in values}
    return kinds.pop() if len(kinds) == 1 else annotation
