"""Values as message bodies: bytes, text, or JSON or MessagePack of a model."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

import msgspec

from headrace.errors import ConfigurationError, InvalidValue
from headrace.values import kind_of, plain_body, shown

if TYPE_CHECKING:
    from collections.abc import Callable

Value = TypeVar("Value")


class Codec(NamedTuple, Generic[Value]):
    """Converts values of one topic.

    to_body, from_body: raise an exception for what they cannot convert.
    """

    topic: str
    name: str
    to_body: Callable[[Any], bytes]
    from_body: Callable[[bytes], Any]

    def encode(self, key: str, value: Value) -> bytes:
        """The body for a value. Raises InvalidValue."""
        try:
            body = self.to_body(value)
        except Exception as error:  # of a model's own serializers, too
            raise InvalidValue(self.topic, key, self.name, _reason(error)) from error
        if not body:
            reason = "an empty body deletes its key; call delete instead"
            raise InvalidValue(self.topic, key, self.name, reason)
        return body

    def decode(self, key: str, body: bytes | Exception) -> Value:
        """The value of a body, or of the error of reading it. Raises InvalidValue."""
        if isinstance(body, Exception):
            raise InvalidValue(self.topic, key, self.name, body) from body
        try:
            value: Value = self.from_body(body)
        except Exception as error:  # of a model's own validators, too
            raise InvalidValue(self.topic, key, self.name, _reason(error)) from error
        return value


def _reason(error: Exception) -> object:
    """The error as a reason; others than those of codecs say little without their type."""
    return error if isinstance(error, ValueError | TypeError) else repr(error)


def codec(topic: str, model: type[Value] | None, form: str = "json") -> Codec[Value]:
    """The codec for a model; see ``Table``. Raises ConfigurationError for an unsuitable one.

    form: "json" or "msgpack", of models.
    """
    if form not in _FORMS:
        raise ConfigurationError(f"form={shown(form)}: must be 'json' or 'msgpack'")
    if model is None or model is bytes:
        return Codec(topic, "bytes", _checked_bytes, bytes)
    if model is str:
        return Codec(topic, "text", str.encode, bytes.decode)
    name = getattr(model, "__name__", repr(model))
    if hasattr(model, "model_validate_json"):
        return Codec(topic, name, *_pydantic(model, form))
    library: Any = _FORMS[form]
    try:
        decoder = library.Decoder(model)
    except TypeError as error:
        raise ConfigurationError(f"model={name}: no type for its values: {error}") from error
    return Codec(topic, name, _checked(model, library.encode), decoder.decode)


_FORMS: Final = {"json": msgspec.json, "msgpack": msgspec.msgpack}


def _checked_bytes(value: object) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return plain_body(value)
    raise TypeError(f"a value is {kind_of(value)}; encode it, or give the table a model=")


def _instance(value: Any, model: type[Any]) -> Any:
    """The value, if it is one of the model; readers would refuse what merely resembles one."""
    if not isinstance(value, model):
        raise TypeError(f"a value is {type(value).__name__}")
    return value


def _checked(model: Any, encode: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    if not isinstance(model, type):
        return encode
    if not (issubclass(model, msgspec.Struct) or dataclasses.is_dataclass(model)):
        return encode
    return lambda value: encode(_instance(value, model))


def _pydantic(model: Any, form: str) -> tuple[Callable[[Any], bytes], Callable[[bytes], Any]]:
    def to_json(value: Any) -> bytes:
        text: str = _instance(value, model).model_dump_json(by_alias=True)
        return text.encode()

    def to_msgpack(value: Any) -> bytes:
        return msgspec.msgpack.encode(
            _instance(value, model).model_dump(mode="json", by_alias=True)
        )

    def from_msgpack(body: bytes) -> Any:
        return model.model_validate(msgspec.msgpack.decode(body))

    if form == "json":
        return to_json, model.model_validate_json
    return to_msgpack, from_msgpack
