"""Values of a table as message bodies: bytes, text, or JSON of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import msgspec

from headrace.errors import ConfigurationError, InvalidValue
from headrace.values import kind_of, plain_body

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


def codec(topic: str, model: type[Value] | None) -> Codec[Value]:
    """The codec for a model; see ``Table``. Raises ConfigurationError for an unsuitable one."""
    if model is None or model is bytes:
        return Codec(topic, "bytes", _checked_bytes, bytes)
    if model is str:
        return Codec(topic, "text", str.encode, bytes.decode)
    name = getattr(model, "__name__", repr(model))
    validate: Any = getattr(model, "model_validate_json", None)
    if validate:
        return Codec(topic, name, _pydantic_json(model), validate)
    try:
        decoder = msgspec.json.Decoder(model)
    except TypeError as error:
        raise ConfigurationError(f"model={name}: no type for JSON values: {error}") from error
    return Codec(topic, name, msgspec.json.encode, decoder.decode)


def _checked_bytes(value: object) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return plain_body(value)
    raise TypeError(f"a value is {kind_of(value)}; encode it, or give the table a model=")


def _pydantic_json(model: Any) -> Callable[[Any], bytes]:
    def to_body(value: Any) -> bytes:
        if not isinstance(value, model):
            raise TypeError(f"a value is {type(value).__name__}")
        text: str = value.model_dump_json()
        return text.encode()

    return to_body
