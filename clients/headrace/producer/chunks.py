"""Messages of one topic with their keys, checked column by column."""

from __future__ import annotations

from operator import add
from typing import TYPE_CHECKING, NamedTuple, Protocol

from headrace.errors import InvalidMessage
from headrace.messages import (
    BODY_BYTES_MAX,
    PROPERTIES_BYTES_MAX,
    Message,
    check_topic,
    takes_batches,
)
from headrace.producer.block import Block
from headrace.producer.selector import queue_indices
from headrace_protocol.message import KEYS, TAGS, property_text

if TYPE_CHECKING:
    from collections.abc import Sequence

# So much is looked at in one go: enough for a block for each of several queues.
CHUNK_COUNT = 32 * 1024
CHUNK_BYTES = 8 * 1024 * 1024
_SHOWN_BYTES = 40


class ArrowTable(Protocol):
    """A table of pyarrow, polars, DuckDB, ...: what speaks Arrow's PyCapsule interface."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """See the Arrow specification."""


class Chunk(NamedTuple):
    """Messages of one topic. keys: of each message, UTF-8; None if there is none at all."""

    block: Block
    keys: Sequence[bytes] | None

    def first_and_rest(self) -> tuple[str, Block, Chunk | None]:
        """The first message with its key, and the others if there are any."""
        key = self.keys[0].decode() if self.keys else ""
        count = len(self.block)
        if count == 1:
            return key, self.block, None
        rest = Chunk(self.block.rows(range(1, count)), self.keys[1:] if self.keys else None)
        return key, self.block.rows([0]), rest

    def by_queue(self, queue_count: int) -> dict[int | None, Block]:
        """A block for each queue number that keys lead to; for None, those without a key."""
        if self.keys is None:
            return {None: self.block}
        rows: dict[int | None, list[int]] = {}
        indices = queue_indices(self.keys, queue_count)
        for row, (key, index) in enumerate(zip(self.keys, indices, strict=True)):
            rows.setdefault(index if key else None, []).append(row)
        return {number: self.block.rows(its_rows) for number, its_rows in rows.items()}


def check_batch_topic(topic: str) -> None:
    """Raise InvalidMessage unless several messages can go to ``topic`` at once."""
    check_topic(topic)
    if not takes_batches(topic):
        raise InvalidMessage(f"{topic} takes no batches: send its messages singly")


def chunk_of_columns(
    topic: str,
    bodies: list[bytes],
    keys: list[bytes] | None,
    tags: list[bytes] | None,
    *,
    first_row: int,
) -> Chunk:
    """The chunk of these columns. Raises InvalidMessage, naming a row by counting from the first.

    keys, tags: UTF-8; empty where a message has none.
    """
    check_batch_topic(topic)
    if set(map(type, bodies)) != {bytes}:
        _check_each(topic, bodies, keys, first_row)
    sizes = list(map(len, bodies))
    if min(distinct := set(sizes)) <= 0 or max(distinct) > BODY_BYTES_MAX:
        _check_each(topic, bodies, keys, first_row)
    properties = _properties(topic, keys, tags, first_row)
    block = Block(topic, bodies, properties, sizes=sizes)
    return Chunk(block, keys if keys and any(keys) else None)


def _check_each(topic: str, bodies: list[bytes], keys: list[bytes] | None, first_row: int) -> None:
    for row, body in enumerate(bodies):
        key = property_text(keys[row]) if keys and not body else ""
        try:
            Message(topic, body, key).check()
        except InvalidMessage as error:
            raise InvalidMessage(f"row {first_row + row}: {error}") from None


def _properties(
    topic: str, keys: list[bytes] | None, tags: list[bytes] | None, first_row: int
) -> list[bytes] | bytes:
    given = [
        (name, values) for name, values in ((KEYS, keys), (TAGS, tags)) if values and any(values)
    ]
    if not given:
        return b""
    is_one_for_all = len(given) == 1 and len(set(given[0][1])) == 1
    if is_one_for_all:
        given = [(name, values[:1]) for name, values in given]
    columns = [_property_column(topic, name, values, first_row) for name, values in given]
    properties = columns[0] if len(columns) == 1 else list(map(add, *columns))
    longest = max(map(len, properties))
    if longest > PROPERTIES_BYTES_MAX:
        row = first_row + next(r for r, raw in enumerate(properties) if len(raw) == longest)
        raise InvalidMessage(
            f"row {row}: key and tag of {longest} bytes for {topic}: at most "
            f"{PROPERTIES_BYTES_MAX} fit; put large things into the body"
        )
    return properties[0] if is_one_for_all else properties


def _property_column(topic: str, name: str, values: list[bytes], first_row: int) -> list[bytes]:
    joined = b"\n".join(values)
    if not (joined.isascii() or is_utf8(joined)):
        row = next(row for row, value in enumerate(values) if not is_utf8(value))
        raise InvalidMessage(
            f"row {first_row + row}: its {name.lower()} for {topic} is not UTF-8 but "
            f"{values[row][:_SHOWN_BYTES]!r}: encode it as text, such as hex"
        )
    if b"\x01" in joined or b"\x02" in joined:
        row = next(row for row, value in enumerate(values) if b"\x01" in value or b"\x02" in value)
        raise InvalidMessage(
            f"row {first_row + row}: its {name.lower()} for {topic} holds the byte 1 or 2, which "
            "separate properties: encode it"
        )
    start = name.encode() + b"\x01"
    return [start + value + b"\x02" if value else b"" for value in values]


def is_utf8(text: bytes) -> bool:
    """Whether these bytes are text."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
