"""RocketMQ's JSON dialect for bodies and config files, read leniently and written exactly.

Beyond JSON it has integer keys without quotes, ``{0:"10.0.0.1:10911"}``, and objects as keys,
``{{"brokerName":"a","queueId":0,"topic":"T"}:5}``; its readers also accept single quotes and bare
names. Most texts are plain JSON, so that is tried first; the parser here handles the others. It
takes up to a microsecond per character, so text from peers must pass ``bounded`` first.
Source: docs/protocol.md "JSON bodies"; tests/protocol/test_fastjson.py.
"""

from __future__ import annotations

import contextlib
import functools
import json.encoder
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from itertools import islice
from typing import Any, TypeVar, get_type_hints

import msgspec

from headrace_protocol.bounds import INTEGER_DIGITS_MAX
from headrace_protocol.errors import PortableError
from headrace_protocol.java_values import java_value
from headrace_protocol.waiting import take_break

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview

# Limit for text in the dialect from a peer; parsing takes at most 30 ms.
PARSED_BYTES_MAX = 32 * 1024
# Limits for text whose integer keys get quoted before decoding, and for the number of such keys.
# Only registrations with static topics get that large.
_QUOTED_BYTES_MAX = 1024 * 1024
_QUOTED_KEYS_MAX = 10_000

# RocketMQ's deepest body has eight levels; deeper nesting aims to exhaust the stack.
DEPTH_MAX = 64


class MalformedJson(PortableError, msgspec.DecodeError, ValueError):
    """Text that is not JSON in RocketMQ's dialect, or not the expected body.

    position: index of the first invalid character; None if the text is well-formed but has the
        wrong content.
    """

    def __init__(self, reason: str, position: int | None = None) -> None:
        super().__init__(reason if position is None else f"{reason} at character {position}")
        self.position = position


class ObjectKey(Mapping[str, Any]):
    """An object as a map key: an immutable, hashable mapping."""

    __slots__ = ("_fields", "_hash")

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = dict(fields)
        self._hash = hash(frozenset(self._fields.items()))

    def __getitem__(self, name: str) -> Any:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectKey) and self._fields == other._fields

    def __repr__(self) -> str:
        return f"ObjectKey({self._fields!r})"


# -- reading ---------------------------------------------------------------------------------------


def loads(data: Buffer) -> Any:
    """Decode text to dicts, lists, str, int, float, bool and None.

    Dict keys are str, int (if written without quotes) or ObjectKey; of equal keys the last wins.
    Raises MalformedJson with the position.
    """
    try:
        value = msgspec.json.decode(data)
    except _NOT_PLAIN as error:
        # The parser would add no more than the position of the out-of-range number.
        if isinstance(error, msgspec.ValidationError) and len(data) > PARSED_BYTES_MAX:
            raise MalformedJson(str(error)) from error
        return _Parser(data).parse()
    _check_depth(value, 1)
    return value


def decode(data: Buffer, value_type: type[T]) -> T:
    """Decode text to ``value_type``, a type that msgspec can convert to.

    As lenient as RocketMQ: see ``java_values``. Raises MalformedJson with the position, or with the
    mistyped field.
    """
    try:
        return msgspec.json.decode(data, type=value_type, strict=False)
    except _NOT_PLAIN:
        value = java_value(loads(data), value_type)
    try:
        return msgspec.convert(value, value_type, strict=False, str_keys=True)
    except msgspec.ValidationError as error:
        raise MalformedJson(str(error)) from error


def decode_plain(data: Buffer, value_type: type[T]) -> T | None:
    """As ``decode``, but returns None for anything other than plain JSON.

    Cost: at most about 5 ms per MiB; ``decode`` has no such limit.
    """
    try:
        return msgspec.json.decode(data, type=value_type, strict=False)
    except _NOT_PLAIN:
        return None


def decode_strict(data: Buffer, value_type: type[T]) -> T:
    """Decode JSON, with integer keys bare or quoted, to a type whose fields must match exactly.

    Cost: linear, some 12 ms per MiB; 4 ms if integer keys are the first of their lines.
    Raises MalformedJson with the field.
    """
    # Never valid by mistake: a string that is cut here is followed by a number.
    with contextlib.suppress(*_NOT_PLAIN):
        return msgspec.json.decode(_KEY_OF_LINE.sub(rb'\1"\2"', data), type=value_type)
    try:
        return msgspec.json.decode(_TO_INTEGER_KEY.sub(_quoted_key, data), type=value_type)
    except _NOT_PLAIN as error:
        raise MalformedJson(str(error)) from error


def bounded(data: Buffer) -> Buffer:
    """Convert text from a peer to a form for which the time of ``decode`` is limited.

    Up to PARSED_BYTES_MAX bytes may use the whole dialect. Longer text must be JSON except for
    integer keys, which get quoted here. Raises MalformedJson for anything else.
    """
    if len(data) <= PARSED_BYTES_MAX or _is_json(data):
        return data
    if len(data) <= _QUOTED_BYTES_MAX:
        quoted = _TO_INTEGER_KEY.sub(_quoted_key, data, _QUOTED_KEYS_MAX)
        if _is_json(quoted):
            return quoted
    raise MalformedJson(
        f"{len(data)} bytes that are not JSON: above {PARSED_BYTES_MAX} bytes only JSON is read, "
        f"with at most {_QUOTED_KEYS_MAX} integer keys in up to {_QUOTED_BYTES_MAX} bytes"
    )


# Errors of msgspec for text that is not plain JSON of the type, at any depth of nesting.
_NOT_PLAIN = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_KEY_OF_LINE = re.compile(rb"(\n[\t ]*+)(-?\d++)(?=:)")
# Matches up to the next integer key, or to the end. Quantifiers are possessive and exactly one
# alternative matches each character, so the time is linear in the length.
_TO_INTEGER_KEY = re.compile(
    rb"""
    ( (?: [^"{,]++
        | "(?:[^"\\]++|\\.)*+(?:"|\Z)
        | [{,](?!\s*+-?\d++\s*+:)
      )*+ )
    (?: ([{,]\s*+) (-?\d++) | \Z )
    """,
    re.DOTALL | re.VERBOSE,
)


def _quoted_key(match: re.Match[bytes]) -> bytes:
    before, separator, key = match.groups()
    return b'%b%b"%b"' % (before, separator, key) if key else before


def _is_json(data: Buffer) -> bool:
    """True if the text is JSON; its strings may be invalid UTF-8."""
    try:
        _skip(data)
    except _NOT_PLAIN:
        return False
    return True


_skip = msgspec.json.Decoder(msgspec.Raw).decode


def _check_depth(value: Any, depth: int) -> None:
    if isinstance(value, dict):
        children = value.values()
    elif isinstance(value, list):
        children = value  # type: ignore[assignment]
    else:
        return
    if depth > DEPTH_MAX:
        raise MalformedJson(_too_deep())
    for child in children:
        _check_depth(child, depth + 1)


def _too_deep() -> str:
    return f"more than {DEPTH_MAX} levels of nesting"


_SPACE = re.compile(r"[ \t\r\n\f\b]*")
_NUMBER = re.compile(r"-?\d+(?P<fraction>\.\d+)?(?P<exponent>[eE][+-]?\d+)?", re.ASCII)
_NAME = re.compile(r"[^\W\d][\w$.-]*|\$[\w$.-]*")
# Quoted text up to its closing quote; a backslash escapes the next character. Possessive, because
# text without a closing quote would otherwise take exponential time.
_QUOTED = {
    '"': re.compile(r'"((?:[^"\\]++|\\.)*+)"', re.DOTALL),
    "'": re.compile(r"'((?:[^'\\]++|\\.)*+)'", re.DOTALL),
}
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_ESCAPED = {
    '"': '"', "'": "'", "\\": "\\", "/": "/",
    "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v",
}  # fmt: skip
_SURROGATE = re.compile("[\ud800-\udfff]")
_WORDS = {"true": True, "false": False, "null": None}


class _Parser:
    """A recursive-descent parser; ``position`` is the index of the next character."""

    def __init__(self, data: Buffer) -> None:
        try:
            self.text = str(data, "utf-8")
        except UnicodeDecodeError as error:
            before = bytes(data[: error.start]).decode()
            raise MalformedJson(f"not UTF-8 ({error.reason})", len(before)) from error
        self.position = 0

    def parse(self) -> Any:
        value = self.value(1)
        if self.peek():
            raise self.unexpected("the end")
        return value

    def peek(self) -> str:
        """Skip whitespace; returns the next character, "" at the end."""
        match = _SPACE.match(self.text, self.position)
        assert match is not None
        self.position = match.end()
        return self.text[self.position : self.position + 1]

    def take(self, wanted: str) -> None:
        if self.peek() != wanted:
            raise self.unexpected(repr(wanted))
        self.position += 1

    def unexpected(self, wanted: str) -> MalformedJson:
        found = self.text[self.position : self.position + 16]
        what = repr(found) if found else "the end"
        return MalformedJson(f"expected {wanted}, found {what}", self.position)

    def value(self, depth: int) -> Any:
        start = self.peek()
        if start == "{":
            return self.object(depth)
        if start == "[":
            return self.array(depth)
        if start in _QUOTED:
            return self.quoted(start)
        if start == "-" or start.isdecimal():
            return self.number()
        return self.word()

    def object(self, depth: int) -> dict[Any, Any]:
        self.enter(depth)
        fields: dict[Any, Any] = {}
        while self.has_next(fields, "}"):
            key = self.key(depth + 1)
            self.take(":")
            fields[key] = self.value(depth + 1)
        return fields

    def array(self, depth: int) -> list[Any]:
        self.enter(depth)
        items: list[Any] = []
        while self.has_next(items, "]"):
            items.append(self.value(depth + 1))
        return items

    def enter(self, depth: int) -> None:
        if depth > DEPTH_MAX:
            raise MalformedJson(_too_deep(), self.position)
        self.position += 1

    def has_next(self, so_far: dict[Any, Any] | list[Any], end: str) -> bool:
        """Consume the comma before the next item, or the end bracket; False at the end."""
        if self.peek() == end:
            self.position += 1
            return False
        if so_far:
            self.take(",")
        return True

    def key(self, depth: int) -> str | int | ObjectKey:
        start = self.peek()
        if start in _QUOTED:
            return self.quoted(start)
        if start == "{":
            return self.object_key(depth)
        if start == "-" or start.isdecimal():
            return self.integer_key()
        return self.name()

    def object_key(self, depth: int) -> ObjectKey:
        position = self.position
        try:
            return ObjectKey(self.object(depth))
        except TypeError:
            raise MalformedJson("an object key contains objects or arrays", position) from None

    def integer_key(self) -> int:
        position = self.position
        number = self.number()
        if not isinstance(number, int):
            raise MalformedJson("a key with a fraction", position)
        return number

    def name(self) -> str:
        match = _NAME.match(self.text, self.position)
        if match is None:
            raise self.unexpected("a key")
        self.position = match.end()
        return match.group()

    def word(self) -> bool | None:
        match = _NAME.match(self.text, self.position)
        if match is None or match.group() not in _WORDS:
            raise self.unexpected("a value")
        self.position = match.end()
        return _WORDS[match.group()]

    def number(self) -> int | float:
        match = _NUMBER.match(self.text, self.position)
        if match is None:
            raise self.unexpected("a number")
        text = match.group()
        number: int | float
        if match["fraction"] or match["exponent"]:
            number = float(text)
        else:
            # Larger integers can be crafted to have equal hashes, making a dict quadratic.
            is_small = len(text.removeprefix("-")) <= INTEGER_DIGITS_MAX
            number = int(text) if is_small else math.inf
        if number in {math.inf, -math.inf}:
            raise MalformedJson("a number out of range", self.position)
        self.position = match.end()
        return number

    def quoted(self, quote: str) -> str:
        match = _QUOTED[quote].match(self.text, self.position)
        if match is None:
            raise MalformedJson("text without its closing quote", self.position)
        text = match[1]
        if "\\" in text:
            text = _ESCAPE.sub(self.unescape, text)
            if _SURROGATE.search(text):
                text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        self.position = match.end()
        return text

    def unescape(self, match: re.Match[str]) -> str:
        if match[1]:
            return chr(int(match[1], 16))
        try:
            return _ESCAPED[match[2]]
        except KeyError:
            position = self.position + 1 + match.start()
            raise MalformedJson(f"unknown escape {match.group()!r}", position) from None


# -- writing ---------------------------------------------------------------------------------------


def dumps(value: Any, *, strict: bool = False, pretty: bool = False) -> bytes:
    """Encode a value exactly as RocketMQ does.

    value: dicts, lists, tuples, scalars, enums (by name) and msgspec structs, whose fields come in
    alphabetical order. A dict's key may be text, int, ObjectKey or a struct. Fields that are None
    are left out.
    strict: JSON for any reader: keys sorted and quoted, ASCII only. Objects as keys, for which JSON
        has no form, stay as they are.
    pretty: the format of config files: a tab per level, no space after the colon.
    """
    return b"".join(_Writer(strict=strict, pretty=pretty).parts(value))


def dumps_parts(value: Any) -> tuple[bytes, ...]:
    """As ``dumps``, in parts, so that an already encoded value is not copied."""
    return tuple(_Writer(strict=False, pretty=False).parts(value))


class Written(msgspec.Struct):
    """An already encoded value, in parts, which other values may include."""

    parts: tuple[bytes, ...]


async def dumps_sliced(items: Iterable[tuple[Any, Any]]) -> Written:
    """Encode a map in slices, for a caller that interleaves other work.

    Yields after each slice, which takes about a millisecond; returns the encoded map.
    """
    parts, table = [b"{"], dict[Any, Any]()
    for key, value in items:
        if isinstance(value, dict) and len(value) > _SLICE_ITEMS:
            table[key] = await dumps_sliced(value.items())
        else:
            table[key] = value
        if len(table) == _SLICE_ITEMS:
            _extend(parts, table)
            table = {}
            await take_break()
    _extend(parts, table)
    return Written((*parts, b"}"))


async def dumps_list_sliced(items: Iterable[Any]) -> Written:
    """Encode a list in slices; see ``dumps_sliced``."""
    remaining = iter(items)
    parts = [b"["]
    while some := list(islice(remaining, _SLICE_ITEMS)):
        _extend(parts, some)
        await take_break()
    return Written((*parts, b"]"))


def _extend(parts: list[bytes], some: dict[Any, Any] | list[Any]) -> None:
    """Add items to a map or list whose encoding ``parts`` begin."""
    if not some:
        return
    encoded = list(dumps_parts(some))
    encoded[0] = (b"," if len(parts) > 1 else b"") + encoded[0][1:]
    encoded[-1] = encoded[-1][:-1]
    parts += encoded


_SLICE_ITEMS = 128
# Stands for a written value in the text around it; strings have it escaped.
_HOLE = "\0"


class _Writer:
    def __init__(self, *, strict: bool, pretty: bool) -> None:
        self.strict = strict
        self.pretty = pretty
        escape = json.encoder.encode_basestring_ascii if strict else json.encoder.encode_basestring
        self.quote: Any = escape
        self.written: list[Written] = []

    def parts(self, value: Any) -> list[bytes]:
        first, *others = self.text(value, 0).encode().split(_HOLE.encode())
        parts = [first]
        for written, text in zip(self.written, others, strict=True):
            parts += (*written.parts, text)
        return parts

    def text(self, value: Any, level: int) -> str:
        if isinstance(value, str):
            return str(self.quote(value))
        if isinstance(value, dict | ObjectKey):
            return self.map(value, level)
        if isinstance(value, list | tuple):
            items = [self.text(item, level + 1) for item in value]
            return self.block(items, "[", "]", level)
        if isinstance(value, Written):
            self.written.append(value)
            return _HOLE
        if isinstance(value, msgspec.Struct):
            return self.struct(value, level)
        return self.scalar(value)

    def scalar(self, value: Any) -> str:
        if value is None:
            return "null"
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, Enum):
            return str(self.quote(value.name))
        if isinstance(value, int):
            return str(value)
        if isinstance(value, float):
            return repr(value) if math.isfinite(value) else "null"
        raise TypeError(f"no JSON form for {type(value).__name__}")

    def map(self, value: Mapping[Any, Any], level: int) -> str:
        if not self.pretty and _is_numbers(value):
            return self.numbers(value)
        items = [(key, item) for key, item in value.items() if item is not None]
        if self.strict:
            items.sort(key=lambda pair: str(pair[0]))
        fields = [f"{self.key(key, level + 1)}:{self.text(item, level + 1)}" for key, item in items]
        return self.block(fields, "{", "}", level)

    def numbers(self, value: Mapping[int, int]) -> str:
        """A map of numbers: a route has one of up to 65,536, and this is ten times as fast."""
        if self.strict:
            fields = [f'"{key}":{value[int(key)]}' for key in sorted(map(str, value))]
        else:
            fields = [f"{key}:{number}" for key, number in value.items()]
        return f"{{{','.join(fields)}}}"

    def key(self, key: Any, level: int) -> str:
        if isinstance(key, str):
            return str(self.quote(key))
        if isinstance(key, int):
            return f'"{key}"' if self.strict else str(key)
        return self.text(key, level)

    def struct(self, value: msgspec.Struct, level: int) -> str:
        if not self.strict and not self.pretty and _is_plain(type(value)):
            return msgspec.json.encode(value).decode()
        fields = [
            f'"{name}":{self.text(item, level + 1)}'
            for name, attribute in _wire_fields(type(value))
            if (item := getattr(value, attribute)) is not None
        ]
        return self.block(fields, "{", "}", level)

    def block(self, parts: list[str], start: str, end: str, level: int) -> str:
        if not parts or not self.pretty:
            return f"{start}{','.join(parts)}{end}"
        indent = "\n" + "\t" * (level + 1)
        return f"{start}{indent}{f',{indent}'.join(parts)}{indent[:-1]}{end}"


def _is_numbers(value: Mapping[Any, Any]) -> bool:
    return set(map(type, value)) == {int} == set(map(type, value.values()))


@functools.cache
def _wire_fields(struct_type: type[msgspec.Struct]) -> list[tuple[str, str]]:
    """Wire name and attribute of each field, in RocketMQ's order."""
    return sorted(
        zip(struct_type.__struct_encode_fields__, struct_type.__struct_fields__, strict=True)
    )


@functools.cache
def _is_plain(struct_type: type[msgspec.Struct]) -> bool:
    """True if msgspec's encoding is identical; it takes a twentieth of the time."""
    hints = get_type_hints(struct_type)
    fields = [hints[attribute] for _, attribute in _wire_fields(struct_type)]
    names = struct_type.__struct_encode_fields__
    return list(names) == sorted(names) and all(hint in _PLAIN_TYPES for hint in fields)


_PLAIN_TYPES = (int, str, bool, float, dict[str, str])
