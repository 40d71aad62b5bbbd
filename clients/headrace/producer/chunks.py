"""Messages of one topic with their keys, checked column by column."""

from __future__ import annotations

from contextlib import contextmanager
from operator import add
from typing import TYPE_CHECKING, NamedTuple, Protocol

from headrace.errors import InvalidMessage
from headrace.messages import BODY_BYTES_MAX, PROPERTIES_BYTES_MAX, check_size
from headrace.names import check_topic, takes_batches
from headrace.producer.block import Block
from headrace.producer.selector import queue_indices
from headrace.values import check_tag, plain_body
from headrace_protocol.message import KEYS, TAGS, property_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# So much is looked at in one go: enough for a block for each of several queues.
CHUNK_COUNT = 32 * 1024
CHUNK_BYTES = 8 * 1024 * 1024
_SHOWN_BYTES = 40
# What errors call the values of properties.
WORDS = {KEYS: "key", TAGS: "tag"}


class ArrowTable(Protocol):
    """A table of pyarrow, polars, DuckDB, ...: what speaks Arrow's PyCapsule interface."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """See the Arrow specification."""


class Chunk(NamedTuple):
    """Messages of one topic. keys: of each message, UTF-8; None if there is none at all."""

    block: Block
    keys: Sequence[bytes] | None

    def first_and_rest(self) -> tuple[bytes, Block, Chunk | None]:
        """The first message with its key, and the others if there are any."""
        key = self.keys[0] if self.keys else b""
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


def check_batch_topic(topic: str) -> str:
    """The plain name of a topic. Raises InvalidMessage unless it takes several messages at once."""
    topic = check_topic(topic)
    if not takes_batches(topic):
        raise InvalidMessage(f"{topic} takes no batches: send its messages singly")
    return topic


def chunk_of_columns(
    topic: str,
    bodies: list[bytes],
    keys: list[bytes] | None,
    tags: list[bytes] | None,
    rows: Sequence[int],
) -> Chunk:
    """The chunk of these columns. Raises InvalidMessage that names the row.

    keys, tags: UTF-8; empty where a message has none. rows: the number of each message in the
    caller's input.
    """
    topic = check_batch_topic(topic)
    if set(map(type, bodies)) != {bytes}:
        bodies = [
            plain_body(body, f"row {row}: body") for row, body in zip(rows, bodies, strict=True)
        ]
    sizes = list(map(len, bodies))
    if min(distinct := set(sizes)) <= 0 or max(distinct) > BODY_BYTES_MAX:
        for index, row in enumerate(rows):
            with row_named(row):
                check_size(topic, sizes[index], has_key=bool(keys and keys[index]))
    if tags:
        _check_tags(tags, rows)
    properties = _properties(topic, keys, tags, rows)
    block = Block(topic, bodies, properties, sizes=sizes)
    return Chunk(block, keys if keys and any(keys) else None)


@contextmanager
def row_named(row: int) -> Iterator[None]:
    """Names the row in an InvalidMessage."""
    try:
        yield
    except InvalidMessage as error:
        raise InvalidMessage(f"row {row}: {error}") from None


def _check_tags(tags: list[bytes], rows: Sequence[int]) -> None:
    if b"".join(tags).isalnum():
        return
    for tag in set(tags):
        if tag:
            with row_named(rows[tags.index(tag)]):
                check_tag(property_text(tag))


def _properties(
    topic: str, keys: list[bytes] | None, tags: list[bytes] | None, rows: Sequence[int]
) -> list[bytes] | bytes:
    given = [
        (name, values) for name, values in ((KEYS, keys), (TAGS, tags)) if values and any(values)
    ]
    if not given:
        return b""
    is_one_for_all = len(given) == 1 and len(set(given[0][1])) == 1
    if is_one_for_all:
        given = [(name, values[:1]) for name, values in given]
    columns = [_property_column(topic, name, values, rows) for name, values in given]
    properties = columns[0] if len(columns) == 1 else list(map(add, *columns))
    longest = max(map(len, properties))
    if longest > PROPERTIES_BYTES_MAX:
        row = next(row for row, raw in zip(rows, properties, strict=True) if len(raw) == longest)
        raise InvalidMessage(
            f"row {row}: key and tag of {longest} bytes for {topic}: at most "
            f"{PROPERTIES_BYTES_MAX} fit; put large things into the body"
        )
    return properties[0] if is_one_for_all else properties


def _property_column(
    topic: str, name: str, values: list[bytes], rows: Sequence[int]
) -> list[bytes]:
    joined = b"\n".join(values)
    if not (joined.isascii() or is_utf8(joined)):
        index = next(index for index, value in enumerate(values) if not is_utf8(value))
        raise InvalidMessage(
            f"row {rows[index]}: its {WORDS[name]} for {topic} is not UTF-8 but "
            f"{values[index][:_SHOWN_BYTES]!r}: encode it as text, such as hex"
        )
    if b"\x01" in joined or b"\x02" in joined:
        row = next(
            row
            for row, value in zip(rows, values, strict=True)
            if b"\x01" in value or b"\x02" in value
        )
        raise InvalidMessage(
            f"row {row}: its {WORDS[name]} for {topic} holds the byte 1 or 2, which "
            "separate properties: encode it"
        )
    start = name.encode() + b"\x01"
    return [start + value + b"\x02" if value else b"" for value in values]


def is_utf8(text: bytes) -> bool:
    """True if these bytes are text."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
