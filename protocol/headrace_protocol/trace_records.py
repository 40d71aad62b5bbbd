r"""Records of RocketMQ's message trace, as its clients write them into the trace topic.

A message of the trace topic has many records: the name of a kind and its fields, joined by 0x01,
and 0x02 at the end. The fields are those of the classes, in that order; where the first is a time,
the region follows it. Source: docs/protocol.md "Trace"; tests/protocol/test_trace_records.py.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple, get_type_hints

from headrace_protocol.message import decimal

if TYPE_CHECKING:
    from collections.abc import Iterator

# Maximum body of a message in the trace topic, as in RocketMQ's clients.
BODY_BYTES_MAX: Final = 128_000

_REGION: Final = "DefaultRegion"
_FIELD: Final = "\x01"
_END: Final = "\x02"


class Kind(IntEnum):
    """Types of messages, by their numbers in a record."""

    NORMAL = 0
    HALF = 1
    COMMITTED = 2
    DELAYED = 3
    ORDERED = 4


class Code(IntEnum):
    """Outcomes of processing, by their numbers in a record."""

    SUCCESS = 0
    TIMEOUT = 1
    EXCEPTION = 2
    NOTHING = 3
    FAILED = 4


class Pub(NamedTuple):
    """A message was sent. cost_ms: until the answer. success: False if it was an error."""

    time_ms: int
    group: str
    topic: str
    message_id: str
    tags: str = ""
    keys: str = ""
    store_host: str = ""
    body_bytes: int = 0
    cost_ms: int = 0
    kind: int = Kind.NORMAL
    offset_message_id: str = ""
    success: bool = True


class SubBefore(NamedTuple):
    """A message was passed to a consumer. request_id: of its SubAfter."""

    time_ms: int
    group: str
    request_id: str
    message_id: str
    retries: int = 0
    keys: str = ""


class SubAfter(NamedTuple):
    """A consumer is done with a message. code: see ``Code``. Old clients leave out the last."""

    request_id: str
    message_id: str
    cost_ms: int = 0
    success: bool = True
    keys: str = ""
    code: int = Code.SUCCESS
    time_ms: int = 0
    group: str = ""


class EndTransaction(NamedTuple):
    """A transaction was decided. state: COMMIT_MESSAGE, ROLLBACK_MESSAGE or UNKNOW."""

    time_ms: int
    group: str
    topic: str
    message_id: str
    tags: str = ""
    keys: str = ""
    store_host: str = ""
    kind: int = Kind.COMMITTED
    transaction_id: str = ""
    state: str = ""
    is_check: bool = False


class Recall(NamedTuple):
    """A message with a time of delivery was recalled, or could not be."""

    time_ms: int
    group: str
    topic: str
    message_id: str
    success: bool = True


TraceRecord = Pub | SubBefore | SubAfter | EndTransaction | Recall


def encode_trace(record: TraceRecord) -> str:
    """A record as it is written; separators within a field become spaces."""
    fields = tuple(record)
    if not isinstance(record, SubAfter):
        fields = (fields[0], _REGION, *fields[1:])
    return _FIELD.join((type(record).__name__, *map(_field, fields))) + _END


def _field(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(int(value))
    return str(value).replace(_FIELD, " ").replace(_END, " ")


def decode_trace(text: str) -> Iterator[TraceRecord]:
    """The records of a message; those of other kinds, or too short, are left out."""
    for line in text.split(_END):
        name, *fields = line.split(_FIELD)
        kind: Any = _KINDS.get(name.strip())
        if kind is None:
            continue
        if kind is not SubAfter:
            del fields[1:2]
        # Clients before 4.3 tell no offset id.
        if kind is Pub and len(fields) == len(Pub._fields) - 1:
            fields.insert(-1, "")
        if len(fields) >= len(kind._fields) - len(kind._field_defaults):
            yield kind(*map(_read, _TYPES[kind], fields))


def _read(kind: type, value: str) -> str | int | bool:
    if kind is int:
        return decimal(value.strip().encode(), 0)
    if kind is bool:
        return value == "true"
    return "" if value == "null" else value


_KINDS: Final[dict[str, Any]] = {
    kind.__name__: kind for kind in (Pub, SubBefore, SubAfter, EndTransaction, Recall)
}
_TYPES: Final = {kind: tuple(get_type_hints(kind).values()) for kind in _KINDS.values()}
