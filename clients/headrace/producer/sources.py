"""Conversion of the input of ``send_many`` to chunks: blocks with their messages' keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

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
from headrace_protocol.message import KEYS, TAGS

if TYPE_CHECKING:
    from collections.abc import Callable

Item = TypeVar("Item")

# Size of a chunk: enough for one block for each of several queues.
CHUNK_COUNT = 32 * 1024
CHUNK_BYTES = 8 * 1024 * 1024


class ArrowTable(Protocol):
    """A table of pyarrow, polars, DuckDB, ...: any object with Arrow's PyCapsule interface."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """See the Arrow specification."""


Source = Iterable[Message] | Iterable[bytes] | ArrowTable
Texts = Iterable[str | None] | None


class Chunk(NamedTuple):
    """Messages of one topic. keys: key of each message in UTF-8; None if no message has one."""

    block: Block
    keys: Sequence[bytes] | None

    def first_and_rest(self) -> tuple[str, Block, Chunk | None]:
        """The first message's key, its block, and a chunk of the others if there are any."""
        key = self.keys[0].decode() if self.keys else ""
        count = len(self.block)
        if count == 1:
            return key, self.block, None
        rest = Chunk(self.block.rows(range(1, count)), self.keys[1:] if self.keys else None)
        return key, self.block.rows([0]), rest

    def by_queue(self, queue_count: int) -> dict[int | None, Block]:
        """One block per queue number selected by keys; None maps to messages without a key."""
        if self.keys is None:
            return {None: self.block}
        rows: dict[int | None, list[int]] = {}
        indices = queue_indices(self.keys, queue_count)
        for row, (key, index) in enumerate(zip(self.keys, indices, strict=True)):
            rows.setdefault(index if key else None, []).append(row)
        return {number: self.block.rows(its_rows) for number, its_rows in rows.items()}


def chunks(source: Any, topic: str | None, keys: Texts, tags: Texts) -> Iterator[Chunk]:
    """The chunks of any ``Source``. Raises InvalidMessage."""
    if hasattr(source, "__arrow_c_stream__") or hasattr(source, "__arrow_c_array__"):
        from headrace.producer.arrow import chunks_of_table

        _refuse_texts(keys, tags, "an Arrow table has columns named key and tag")
        return chunks_of_table(source, topic)
    if topic is None:
        _refuse_texts(keys, tags, "a Message has a key and a tag of its own")
        return chunks_of_messages(source)
    return chunks_of_values(topic, source, keys, tags)


def _refuse_texts(keys: Texts, tags: Texts, reason: str) -> None:
    if keys is not None or tags is not None:
        raise InvalidMessage(f"keys= and tags= are for bytes with topic=: {reason}")


# -- messages --------------------------------------------------------------------------------------


def chunks_of_messages(messages: Iterable[Message]) -> Iterator[Chunk]:
    """Chunks of Message objects; each chunk has messages of one topic."""
    first_row = 0
    for some in _cut(messages, _body_bytes):
        topic, plain = _plain_bodies(some)
        if len(plain) == len(some):
            yield chunk_of_columns(topic, plain, None, None, first_row=first_row)
        elif _are_columns(some, topic):
            bodies = [message.body for message in some]
            keys = _encoded("keys", [message.key for message in some], first_row)
            tags = _encoded("tags", [message.tag for message in some], first_row)
            yield chunk_of_columns(topic, bodies, keys, tags, first_row=first_row)
        else:
            yield from [_chunk_of_topic(of_topic) for of_topic in _by_topic(some)]
        first_row += len(some)


def _plain_bodies(messages: list[Message]) -> tuple[str, list[bytes]]:
    """The first message's topic, and the bodies of messages with only that topic and a body."""
    try:
        topic = messages[0].topic
        return topic, [
            message.body
            for message in messages
            if message.topic == topic
            and not (message.key or message.tag or message.properties or message.delay_level)
        ]
    except AttributeError:
        _refuse_kinds(messages)
        raise


def _are_columns(messages: list[Message], topic: str) -> bool:
    """Whether all messages have ``topic`` and, besides bodies, only keys and tags."""
    return not [
        True
        for message in messages
        if message.topic != topic or message.properties or message.delay_level
    ]


def _body_bytes(message: Message) -> int:
    return len(message.body) if isinstance(message, Message) else 0


def _refuse_kinds(messages: list[Message]) -> None:
    for kind in set(map(type, messages)):
        if not issubclass(kind, Message):
            raise InvalidMessage(
                f"{kind.__name__} is no Message: send_many takes bytes together with topic="
            )


def _by_topic(messages: list[Message]) -> Iterable[list[Message]]:
    topics: dict[str, list[Message]] = {}
    for message in messages:
        topics.setdefault(message.topic, []).append(message)
    return topics.values()


def _chunk_of_topic(messages: list[Message]) -> Chunk:
    topic = messages[0].topic
    check_batch_topic(topic)
    for message in messages:
        message.check()
        if message.delay_level:
            raise InvalidMessage(f"a delayed message for {topic}: send it singly")
    keys = [message.key.encode() for message in messages]
    return Chunk(Block.of(messages), keys if any(keys) else None)


def check_batch_topic(topic: str) -> None:
    """Raise InvalidMessage unless ``topic`` accepts batches."""
    check_topic(topic)
    if not takes_batches(topic):
        raise InvalidMessage(f"{topic} takes no batches: send its messages singly")


# -- bytes -----------------------------------------------------------------------------------------


def chunks_of_values(
    topic: str, values: Iterable[bytes], keys: Texts = None, tags: Texts = None
) -> Iterator[Chunk]:
    """Chunks of bodies with their keys and tags."""
    columns = {"keys": keys, "tags": tags}
    for name, column in columns.items():
        if isinstance(column, str | bytes):
            raise InvalidMessage(f"{name}={column!r}: a sequence with one for each message")
        if isinstance(values, Sequence) and isinstance(column, Sequence):
            _check_count(name, len(column), len(values))
    texts = {name: iter(column) for name, column in columns.items() if column is not None}
    first_row = 0
    for bodies in _cut(values, _value_bytes):
        encoded = {
            name: _encoded(name, _next(name, column, len(bodies), first_row), first_row)
            for name, column in texts.items()
        }
        yield chunk_of_columns(
            topic, bodies, encoded.get("keys"), encoded.get("tags"), first_row=first_row
        )
        first_row += len(bodies)


def _check_count(name: str, count: int, message_count: int) -> None:
    if count != message_count:
        raise InvalidMessage(f"{count} {name} for {message_count} messages: one for each")


def _value_bytes(value: bytes) -> int:
    return len(value) if isinstance(value, bytes) else 0


def _next(name: str, texts: Iterator[str | None], count: int, first_row: int) -> list[str | None]:
    some = list(islice(texts, count))
    if len(some) < count:
        raise InvalidMessage(f"{first_row + len(some)} {name} for more messages: one for each")
    return some


def _encoded(name: str, texts: Sequence[str | None], first_row: int) -> list[bytes] | None:
    """The texts in UTF-8; None if all are empty."""
    if not any(texts):
        return None
    try:
        return [text.encode() if text else b"" for text in texts]
    except AttributeError:
        row = next(row for row, text in enumerate(texts) if not isinstance(text, str | None))
        kind = type(texts[row]).__name__
        raise InvalidMessage(f"{name}[{first_row + row}] is {kind}, not str or None") from None


def chunk_of_columns(
    topic: str,
    bodies: list[bytes],
    keys: list[bytes] | None,
    tags: list[bytes] | None,
    *,
    first_row: int,
) -> Chunk:
    """The chunk of these columns. Raises InvalidMessage; rows count from ``first_row``.

    keys, tags: UTF-8; empty where a message has none.
    """
    check_batch_topic(topic)
    if set(map(type, bodies)) != {bytes}:
        _check_each(topic, bodies, first_row)
    sizes = list(map(len, bodies))
    if min(distinct := set(sizes)) <= 0 or max(distinct) > BODY_BYTES_MAX:
        _check_each(topic, bodies, first_row)
    properties = _properties(topic, keys, tags, first_row)
    block = Block(topic, bodies, properties, sizes=sizes)
    return Chunk(block, keys if keys and any(keys) else None)


def _check_each(topic: str, bodies: list[bytes], first_row: int) -> None:
    for row, body in enumerate(bodies):
        try:
            Message(topic, body).check()
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
    joined = b"".join(values)
    if b"\x01" in joined or b"\x02" in joined:
        row = next(row for row, value in enumerate(values) if b"\x01" in value or b"\x02" in value)
        raise InvalidMessage(
            f"row {first_row + row}: its {name.lower()} for {topic} holds the byte 1 or 2, which "
            "separate properties: encode it"
        )
    start = name.encode() + b"\x01"
    return [start + value + b"\x02" if value else b"" for value in values]


# -- cutting ---------------------------------------------------------------------------------------


def _cut(items: Iterable[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Split into lists: sequences, already in memory, by count; other iterables by bytes too."""
    if isinstance(items, Sequence):
        for start in range(0, len(items), CHUNK_COUNT):
            yield list(items[start : start + CHUNK_COUNT])
        return
    chunk, chunk_bytes = list[Item](), 0
    for item in items:
        chunk.append(item)
        chunk_bytes += size(item)
        if chunk_bytes >= CHUNK_BYTES or len(chunk) >= CHUNK_COUNT:
            yield chunk
            chunk, chunk_bytes = [], 0
    if chunk:
        yield chunk
