"""Conversion of the input of ``send_many`` to chunks: blocks with their messages' keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import islice
from types import NoneType
from typing import Any, TypeVar

from headrace.errors import InvalidMessage
from headrace.messages import EMPTY, NO_DELAY, NO_LEVEL, EncodedMessage, Message, encoded
from headrace.producer.block import Block
from headrace.producer.chunks import (
    CHUNK_BYTES,
    CHUNK_COUNT,
    ArrowTable,
    Chunk,
    check_batch_topic,
    chunk_of_columns,
    row_named,
)
from headrace.values import encoded_text, kind_of, optional_text, plain_body, shown

Item = TypeVar("Item")

Source = Iterable[Message] | Iterable[bytes] | ArrowTable
Texts = Iterable[str | None] | None

_TEXTS = {str, NoneType}


def chunks(source: Any, topic: str | None, keys: Texts, tags: Texts) -> Iterator[Chunk]:
    """The chunks of any ``Source``; all messages of a chunk are good. Raises InvalidMessage."""
    if hasattr(source, "__arrow_c_stream__") or hasattr(source, "__arrow_c_array__"):
        from headrace.producer.arrow import chunks_of_table

        _refuse_texts(keys, tags, "an Arrow table has columns named key and tag")
        return chunks_of_table(source, topic)
    if not isinstance(source, Iterable):
        way_out = "pass its collect()" if hasattr(source, "collect") else "give a list"
        raise InvalidMessage(
            f"send_many takes several messages, bodies or a table, not {kind_of(source)}: {way_out}"
        )
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
    for some in _slices(messages) if isinstance(messages, Sequence) else _drawn(messages):
        rows = range(first_row, first_row + len(some))
        topic, plain = _plain_bodies(some)
        if len(plain) == len(some):
            yield chunk_of_columns(topic, plain, None, None, rows)
        elif _are_columns(some, topic):
            bodies = [message.body for message in some]
            keys = _encoded("key", [message.key for message in some], rows)
            tags = _encoded("tag", [message.tag for message in some], rows)
            yield chunk_of_columns(topic, bodies, keys, tags, rows)
        else:
            yield from _chunks_of_encoded(list(map(_encoded_row, rows, some)), rows)
        first_row += len(some)


def _drawn(messages: Iterable[Any]) -> Iterator[list[Message]]:
    """Split by count and bytes; copied when they are drawn, since the iterable may reuse them."""
    drawn = iter(messages)
    while True:
        chunk, chunk_bytes = list[Message](), 0
        for message in islice(drawn, CHUNK_COUNT):
            chunk.append(message)
            try:
                copied = chunk[-1] = message.__copy__()
                if copied.properties and isinstance(copied.properties, dict):
                    copied.properties = dict(copied.properties)
                if type(copied.body) is not bytes:
                    copied.body = plain_body(copied.body)
            except AttributeError:
                _refuse_kinds(chunk)
                raise
            chunk_bytes += len(copied.body)
            if chunk_bytes >= CHUNK_BYTES:
                break
        if not chunk:
            return
        yield chunk


def _plain_bodies(messages: list[Message]) -> tuple[str, list[bytes]]:
    """The first message's topic, and the bodies of messages with only that topic and a body."""
    try:
        topic = messages[0].topic
        return topic, [
            message.body
            for message in messages
            if message.topic == topic
            and message.key is EMPTY
            and message.tag is EMPTY
            and not message.properties
            and message.delay_level is NO_LEVEL
            and message.delay is NO_DELAY
            and message.deliver_at is None
        ]
    except AttributeError:
        _refuse_kinds(messages)
        raise


def _are_columns(messages: list[Message], topic: str) -> bool:
    """True if all messages have ``topic`` and, besides bodies, only keys and tags."""
    return not [
        True
        for message in messages
        if message.topic != topic
        or message.properties
        or not message.checks_tag
        or message.delay_level is not NO_LEVEL
        or message.delay is not NO_DELAY
        or message.deliver_at is not None
    ]


def _refuse_kinds(messages: list[Message]) -> None:
    for row, message in enumerate(messages):
        if not isinstance(message, Message):
            raise InvalidMessage(
                f"row {row}: {kind_of(message)} is no Message: send_many takes bytes together with "
                "topic="
            )


def _encoded_row(row: int, message: Message) -> EncodedMessage:
    with row_named(row):
        return encoded(message)


def _chunks_of_encoded(messages: list[EncodedMessage], rows: Sequence[int]) -> Iterator[Chunk]:
    topics: dict[str, list[EncodedMessage]] = {}
    for row, message in zip(rows, messages, strict=True):
        if message.is_delayed:
            raise InvalidMessage(
                f"row {row}: a delayed message for {message.topic}: send it singly"
            )
        topics.setdefault(message.topic, []).append(message)
    for topic in topics:
        check_batch_topic(topic)
    for its_messages in topics.values():
        keys = [message.key for message in its_messages]
        yield Chunk(Block.of(its_messages), keys if any(keys) else None)


# -- bytes -----------------------------------------------------------------------------------------


def chunks_of_values(
    topic: str, values: Iterable[bytes], keys: Any = None, tags: Any = None
) -> Iterator[Chunk]:
    """Chunks of bodies with their keys and tags."""
    columns = {"keys": keys, "tags": tags}
    for name, column in columns.items():
        _check_column(name, column, values)
    texts = {name: iter(column) for name, column in columns.items() if column is not None}
    first_row = 0
    for bodies in _slices(values) if isinstance(values, Sequence) else _bodies(values):
        rows = range(first_row, first_row + len(bodies))
        encoded_texts = {
            name: _encoded(name, _next(name, column, len(bodies), first_row), rows)
            for name, column in texts.items()
        }
        yield chunk_of_columns(
            topic, bodies, encoded_texts.get("keys"), encoded_texts.get("tags"), rows
        )
        first_row += len(bodies)


def _bodies(values: Iterable[Any]) -> Iterator[list[bytes]]:
    """Split an iterable by count and bytes, like ``_drawn``."""
    drawn = enumerate(values)
    while True:
        chunk, chunk_bytes = list[bytes](), 0
        for row, value in islice(drawn, CHUNK_COUNT):
            body = value if type(value) is bytes else plain_body(value, f"row {row}: body")
            chunk.append(body)
            chunk_bytes += len(body)
            if chunk_bytes >= CHUNK_BYTES:
                break
        if not chunk:
            return
        yield chunk


def _check_column(name: str, column: object, values: object) -> None:
    """Raise InvalidMessage for a column that can't have one text for each message."""
    if isinstance(column, str | bytes) or not isinstance(column, Iterable | None):
        raise InvalidMessage(f"{name}={shown(column)}: a sequence with one for each message")
    count, message_count = _count(column), _count(values)
    if None not in (count, message_count) and count != message_count:
        raise InvalidMessage(f"{count} {name} for {message_count} messages: one for each")


def _count(items: object) -> int | None:
    return len(items) if isinstance(items, Sized) else None


def _next(name: str, texts: Iterator[str | None], count: int, first_row: int) -> list[str | None]:
    some = list(islice(texts, count))
    if len(some) < count:
        raise InvalidMessage(f"{first_row + len(some)} {name} for more messages: one for each")
    return some


def _encoded(name: str, texts: Sequence[str | None], rows: Sequence[int]) -> list[bytes] | None:
    """The texts in UTF-8; None if all are empty."""
    raw = _encoded_at_once(texts)
    if len(raw) != len(texts):
        plain = [
            optional_text(text, f"{name}[{row}]") for row, text in zip(rows, texts, strict=True)
        ]
        raw = [encoded_text(text, f"{name}[{row}]") for row, text in zip(rows, plain, strict=True)]
    return raw if any(raw) else None


def _encoded_at_once(texts: Sequence[Any]) -> list[bytes]:
    """The texts in UTF-8; of another length if some are no texts, or cannot be stored."""
    try:
        # Joined, a subclass counts as its characters, and no text that can be stored has a 0x02.
        return "\x02".join(texts).encode().split(b"\x02")
    except UnicodeEncodeError:
        return []
    except TypeError:
        if set(map(type, texts)) <= _TEXTS:
            return _encoded_at_once([text or "" for text in texts])
        return []


def _slices(items: Sequence[Item]) -> Iterator[list[Item]]:
    """Split a sequence, as it is now, by count."""
    items = list(items)
    for start in range(0, len(items), CHUNK_COUNT):
        yield items[start : start + CHUNK_COUNT]
