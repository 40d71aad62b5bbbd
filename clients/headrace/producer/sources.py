"""Conversion of the input of ``send_many`` to chunks: blocks with their messages' keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from headrace.errors import InvalidMessage
from headrace.messages import Message
from headrace.producer.block import Block
from headrace.producer.chunks import (
    CHUNK_BYTES,
    CHUNK_COUNT,
    ArrowTable,
    Chunk,
    check_batch_topic,
    chunk_of_columns,
)

if TYPE_CHECKING:
    from collections.abc import Callable

Item = TypeVar("Item")

Source = Iterable[Message] | Iterable[bytes] | ArrowTable
Texts = Iterable[str | None] | None


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
            and not (message.key or message.tag or message.properties)
            and not (message.delay_level or message.delay or message.deliver_at)
        ]
    except AttributeError:
        _refuse_kinds(messages)
        raise


def _are_columns(messages: list[Message], topic: str) -> bool:
    """Whether all messages have ``topic`` and, besides bodies, only keys and tags."""
    return not [
        True
        for message in messages
        if message.topic != topic
        or message.properties
        or message.delay_level
        or message.delay
        or message.deliver_at
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
        if message.is_delayed:
            raise InvalidMessage(f"a delayed message for {topic}: send it singly")
    keys = [message.key.encode() for message in messages]
    return Chunk(Block.of(messages), keys if any(keys) else None)


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
