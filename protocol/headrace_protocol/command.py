"""RemotingCommand: a frame's header, independent of its codec."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from headrace_protocol.headers import Int64  # noqa: TC001 - msgspec reads annotations

if TYPE_CHECKING:
    from collections.abc import Mapping

FLAG_RESPONSE = 1
FLAG_ONEWAY = 2

# The RocketMQ version that we implement and announce (5.5.0). Clients gate features on it.
VERSION = 513

Header = TypeVar("Header", bound=msgspec.Struct)


class Command(msgspec.Struct, gc=False):
    """The header of one frame.

    code: request code, or response code when ``is_response``.
    opaque: number that matches a response to its request, per connection and direction.
    ext_fields: extension fields in the codec's form; see ``header()`` and ``ext()``.
    """

    code: Int64
    language: str = "JAVA"
    version: Int64 = 0
    opaque: Int64 = 0
    flag: Int64 = 0
    remark: str | None = None
    ext_fields: Any = None

    @property
    def is_response(self) -> bool:
        """True for a response to a request of ours."""
        return bool(self.flag & FLAG_RESPONSE)

    @property
    def is_oneway(self) -> bool:
        """True if the sender expects no response."""
        return bool(self.flag & FLAG_ONEWAY)

    def header(self, header_type: type[Header]) -> Header:
        """The extension fields as ``header_type``.

        Raises msgspec.ValidationError with the name of a missing or mistyped field.
        """
        ext_fields = self.ext_fields
        if isinstance(ext_fields, msgspec.Raw):
            header: Header | None = _decode_raw(_json_decoder(header_type), ext_fields)
            if header is not None:
                return header
            ext_fields = None
        return msgspec.convert(ext_fields or {}, header_type, strict=False)

    def ext(self) -> dict[str, str]:
        """The extension fields as text, as on the wire.

        Raises msgspec.ValidationError unless they are a map of texts and numbers.
        """
        ext_fields = self.ext_fields
        if isinstance(ext_fields, msgspec.Raw):
            ext_fields = _decode_raw(_EXT_DECODER, ext_fields)
        return {} if ext_fields is None else to_text_fields(ext_fields)


def to_text_fields(fields: Mapping[str, Any]) -> dict[str, str]:
    """Extension fields with values in the peer's spelling; None values are left out."""
    return {name: _to_text(value) for name, value in fields.items() if value is not None}


def header_fields(header: msgspec.Struct | Mapping[str, object] | None) -> dict[str, Any] | None:
    """A header as a map by wire names; None stays None."""
    return None if header is None else msgspec.to_builtins(header)


def _to_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _decode_raw(decoder: msgspec.json.Decoder[Any], ext_fields: msgspec.Raw) -> Any:
    """Decode fields that were skipped when the frame was read, so may not be valid JSON."""
    try:
        return decoder.decode(ext_fields)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise msgspec.ValidationError(f"unreadable extension fields: {error}") from error


_EXT_DECODER = msgspec.json.Decoder(dict[str, str | int | float | bool | None] | None)
_decoders: dict[type[msgspec.Struct], msgspec.json.Decoder[Any]] = {}


def _json_decoder(header_type: type[Header]) -> msgspec.json.Decoder[Header | None]:
    decoder = _decoders.get(header_type)
    if decoder is None:
        # Values of any type are text on the wire ("0", "true"); a null object is valid and means
        # no fields.
        decoder = _decoders[header_type] = msgspec.json.Decoder(
            header_type | None,
            strict=False,
        )
    return decoder
