"""Received messages, one by one and in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, repeat
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, overload

import msgspec

from headrace.errors import ConfigurationError
from headrace.messages import Copy
from headrace_protocol import compression
from headrace_protocol import message as record
from headrace_protocol.bodies import MessageQueue
from headrace_protocol.compression import (
    COMPRESSED,
    UNREADABLE,
    decompress,
    decompress_each,
    placed,
)
from headrace_protocol.errors import CorruptRecord

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from pyarrow import RecordBatch

    from headrace.messages import Message
    from headrace_protocol.columns import RecordColumns
    from headrace_protocol.message import StoredMessage

_SHOWN_MAX = 40


class Returns(Protocol):
    """A consumer to which messages can be returned; a blocking one has returned them at once."""

    def retry(self, message: ReceivedMessage, after: float | None) -> Awaitable[None]:
        """See ``ReceivedMessage.retry``."""
        ...

    def reject(self, message: ReceivedMessage) -> Awaitable[None]:
        """See ``ReceivedMessage.reject``."""
        ...

    def reply(self, message: ReceivedMessage, body: bytes) -> Awaitable[None]:
        """See ``ReceivedMessage.reply``."""
        ...


class ReceivedMessage(msgspec.Struct, eq=False, gc=False):
    """A message read from a queue.

    Only the body is extracted; the other properties are decoded on access from the batch that
    contained the message, so keeping a message keeps the bytes of its batch. All properties except
    ``queue`` and ``queue_offset`` raise CorruptRecord if the bytes are damaged.
    """

    queue: MessageQueue
    queue_offset: int
    _body: bytes | None
    _batch: MessageBatch | None
    _index: int
    _stored: StoredMessage | None = None

    @classmethod
    def from_stored(cls, stored: StoredMessage, broker_name: str) -> Self:
        """The message of a record that is already decoded."""
        queue = MessageQueue(topic=stored.topic, broker_name=broker_name, queue_id=stored.queue_id)
        return cls(queue, stored.queue_offset, None, None, 0, stored)

    def __reduce__(self) -> tuple[Any, ...]:
        batch = self._batch and self._batch.part(self._index, self._index + 1)
        stored = None if batch else self._stored
        return type(self), (self.queue, self.queue_offset, self._body, batch, 0, stored)

    def __repr__(self) -> str:
        return f"<ReceivedMessage {_place(self.queue, self.queue_offset)} {self._contents()}>"

    def _contents(self) -> str:
        """Key and body, shortened; decompresses nothing."""
        try:
            stored, key = self.stored, self.key
        except CorruptRecord:
            return "(damaged)"
        body = self._body
        if body is None and stored.sys_flag & COMPRESSED:
            return f"key={_short(key)} body of {len(stored.stored_body)} bytes, compressed"
        return f"key={_short(key)} body={_short(stored.stored_body if body is None else body)}"

    @property
    def stored(self) -> StoredMessage:
        """The record with all its fields."""
        if self._stored is None:
            assert self._batch is not None
            self._stored = self._batch.columns.message(self._index)
        return self._stored

    @property
    def body(self) -> bytes:
        """The body, decompressed. Raises BodyTooLarge, CodecMissing, CorruptRecord."""
        body = self._body
        if body is None:
            stored = self.stored
            most = self.body_limits.body_bytes_max
            try:
                body = decompress(stored.stored_body, stored.sys_flag, most)
            except UNREADABLE as error:
                raise placed(error, _place(self.queue, self.queue_offset)) from None
            self._body = body
        return body

    @property
    def body_limits(self) -> BodyLimits:
        """A body that is larger is not decompressed."""
        return BODY_LIMITS if self._batch is None else self._batch.limits

    @property
    def topic(self) -> str:
        """The topic the message was sent to, even if it is redelivered through a retry topic."""
        return self.stored.properties.get(record.RETRY_TOPIC) or self.queue.topic

    @property
    def properties(self) -> dict[str, str]:
        """The properties that the sender gave it, as in ``Message.properties``."""
        system = record.SYSTEM_PROPERTIES
        return {name: value for name, value in self.stored.properties.items() if name not in system}

    @property
    def system_properties(self) -> dict[str, str]:
        """The properties set by clients and brokers, such as KEYS, TAGS and UNIQ_KEY."""
        system = record.SYSTEM_PROPERTIES
        return {name: value for name, value in self.stored.properties.items() if name in system}

    def retry(self, *, after: float | None = None) -> Awaitable[None]:
        """Have the message delivered to its group again later; await it, unless blocking.

        after: seconds, at most 7200, rounded up to the broker's next delay level: 1 s, 5 s, 10 s,
            30 s, ... By default the consumer's ``retry_delay``; without that, the delay grows
            from 10 s to 2 h.
        After ``max_attempts`` the message goes to the group's dead letters instead.

        An ordered consumer gets the message itself, after 0.01 to 30 s (by default 1 s), and its
        queue waits until then; the message must be its current one. Later messages of a batch
        come again, too.

        Raises ConfigurationError if no Consumer read the message.
        """
        return self._returns().retry(self, after)

    def reject(self) -> Awaitable[None]:
        """Store the message in its group's dead letters; await it, unless blocking.

        Raises ConfigurationError if no Consumer read the message.
        """
        return self._returns().reject(self)

    def reply(self, body: bytes) -> Awaitable[None]:
        """Reply to the producer that waits in ``Producer.request``; await it, unless blocking.

        Raises ConfigurationError if the sender asked for no reply or no Consumer read the message,
        and BrokerError if the sender has left.
        """
        return self._returns().reply(self, body)

    def _returns(self) -> Returns:
        returns = self._batch and self._batch.returns
        if not returns:
            raise ConfigurationError(
                f"{self} was not read by a Consumer of this process, so it has no group"
            )
        return returns

    def copy_to(self, topic: str) -> Message:
        """A message to send to ``topic``: the same body, key, tag and properties.

        The tag may be one that no subscription can select, which ``Message`` does not take.

        The trace context of this message is left out: the send of the other has its own.
        """
        properties = self.properties
        for name in ("traceparent", "tracestate"):
            properties.pop(name, None)
        return Copy(topic, self.body, self.key, self.tag, properties)

    @property
    def key(self) -> str:
        """The key the message was sent with."""
        return self.stored.properties.get(record.KEYS, "")

    @property
    def tag(self) -> str:
        """The tag the message was sent with."""
        return self.stored.properties.get(record.TAGS, "")

    @property
    def message_id(self) -> str:
        """The message id given by the producer."""
        return self.stored.message_id

    @property
    def offset_message_id(self) -> str:
        """The message id given by the broker, which encodes the record's position."""
        return self.stored.offset_message_id

    @property
    def born_timestamp_ms(self) -> int:
        """Time at which the producer created the message, in milliseconds since 1970."""
        return self.stored.born_timestamp

    @property
    def store_timestamp_ms(self) -> int:
        """Time at which the broker stored the message, in milliseconds since 1970."""
        return self.stored.store_timestamp

    @property
    def reconsume_times(self) -> int:
        """Number of times the message was sent back before."""
        return self.stored.reconsume_times


class BodyLimits(NamedTuple):
    """Maximum decompressed size of one body, and of all bodies of a batch together."""

    body_bytes_max: int = compression.BODY_BYTES_MAX
    batch_bytes_max: int = compression.BATCH_BYTES_MAX


BODY_LIMITS = BodyLimits()


class MessageBatch(Sequence[ReceivedMessage]):
    """Messages fetched together from one queue, in order.

    queue_offset: offset at which the batch begins. next_offset: offset at which the next batch
    begins; with a tag filter there may be gaps. limits: larger bodies are not decompressed.
    returns: the group's consumer that read the batch, if one did.

    Iteration and indexing build message objects from the records; the batch does not keep them.
    """

    __slots__ = ("_columns", "limits", "next_offset", "queue", "queue_offset", "returns")

    def __init__(
        self,
        queue: MessageQueue,
        queue_offset: int,
        next_offset: int,
        columns: RecordColumns | None,
        limits: BodyLimits = BODY_LIMITS,
    ) -> None:
        """columns: None if a subclass builds them."""
        self.queue = queue
        self.queue_offset = queue_offset
        self.next_offset = next_offset
        self._columns = columns
        self.limits = limits
        self.returns: Returns | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        head = (self.queue, self.queue_offset, self.next_offset)
        return type(self), (*head, self.columns, self.limits)

    def __repr__(self) -> str:
        place = _place(self.queue, self.queue_offset)
        return f"<MessageBatch {place}: {len(self)} messages>"

    @property
    def columns(self) -> RecordColumns:
        """All fields as numpy arrays, see ``headrace_protocol.columns``."""
        assert self._columns is not None
        return self._columns

    @property
    def buffer_bytes(self) -> int:
        """Number of bytes of memory that the batch holds."""
        return len(self.columns.data)

    def values(self) -> list[bytes]:
        """All bodies, decompressed.

        Raises CorruptRecord, CodecMissing, BodyTooLarge; BatchTooLarge if together they exceed
        ``limits``.
        """
        bodies, others = self._bodies()
        if others:
            for index in others:
                bodies[index] = self.columns.message(index).stored_body
            flags = self.columns.sys_flag[others].tolist()
            compressed = zip(others, flags, strict=True)
            decompress_each(bodies, compressed, *self.limits, place_of=self._place)
        return bodies

    def to_arrow(self) -> RecordBatch:
        """The batch as an Arrow table: value (the body), key, tag, queue_offset, two timestamps.

        Raises ConfigurationError if pyarrow is not installed, and the errors of ``values``.
        """
        try:
            import pyarrow as pa
        except ImportError as error:
            raise ConfigurationError("Arrow tables need pyarrow: pip install pyarrow") from error
        columns = self.columns
        properties = columns.properties()
        milliseconds = pa.timestamp("ms", tz="UTC")
        return pa.record_batch(
            {
                "value": pa.array(self.values(), pa.binary()),
                "key": pa.array(_values_of(properties, record.KEYS), pa.string()),
                "tag": pa.array(_values_of(properties, record.TAGS), pa.string()),
                "queue_offset": pa.array(columns.queue_offset),
                "born_timestamp": pa.array(columns.born_timestamp).cast(milliseconds),
                "store_timestamp": pa.array(columns.store_timestamp).cast(milliseconds),
            }
        )

    def part(self, start: int, end: int) -> MessageBatch:
        """The messages from index ``start`` up to ``end``; the batch itself if that is all."""
        if start <= 0 and end >= len(self):
            return self
        part = MessageBatch(
            self.queue,
            self.offset_at(start),
            self.offset_at(end),
            self.columns.select(slice(start, end)),
            self.limits,
        )
        part.returns = self.returns
        return part

    def before(self, offset: int) -> MessageBatch:
        """The messages before a queue offset; the batch itself if that is all."""
        return self.part(0, int(self.columns.queue_offset.searchsorted(offset)))

    def offset_at(self, index: int) -> int:
        """The queue offset to resume from after the first ``index`` messages."""
        if index <= 0:
            return self.queue_offset
        return int(self.columns.queue_offset[index]) if index < len(self) else self.next_offset

    def __len__(self) -> int:
        return len(self.columns)

    def __iter__(self) -> Iterator[ReceivedMessage]:
        stored, others = self._bodies()
        bodies: list[bytes | None] = [*stored]
        for index in others:
            bodies[index] = None
        offsets = self.columns.queue_offset.tolist()
        return map(ReceivedMessage, repeat(self.queue), offsets, bodies, repeat(self), count())

    @overload
    def __getitem__(self, index: int) -> ReceivedMessage: ...
    @overload
    def __getitem__(self, index: slice) -> list[ReceivedMessage]: ...
    def __getitem__(self, index: int | slice) -> ReceivedMessage | list[ReceivedMessage]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        return self._message(index)

    def _message(self, index: int) -> ReceivedMessage:
        queue_offset = int(self.columns.queue_offset[index])
        return ReceivedMessage(self.queue, queue_offset, None, self, index)

    def _place(self, index: int) -> str:
        return _place(self.queue, int(self.columns.queue_offset[index]))

    def _bodies(self) -> tuple[list[bytes], list[int]]:
        """The stored bodies, and the indexes of those that are compressed or damaged."""
        from headrace_protocol.columns import checksums

        columns = self.columns
        bodies = columns.stored_bodies()
        is_other = (checksums(bodies) != columns.body_crc) | (columns.sys_flag & COMPRESSED)
        return bodies, is_other.nonzero()[0].tolist()


def _place(queue: MessageQueue, queue_offset: int) -> str:
    return f"{queue.topic}/{queue.broker_name}/{queue.queue_id}@{queue_offset}"


def _short(value: str | bytes) -> str:
    """A value's repr, cut after 40 characters or bytes."""
    cut = len(value) > _SHOWN_MAX
    return f"{value[:_SHOWN_MAX]!r}... ({len(value)})" if cut else repr(value)


def _values_of(properties: list[bytes], name: str) -> list[str]:
    """One property of each message; empty where a message lacks it."""
    key = name.encode()
    return [record.property_text(record.property_value(raw, key)) for raw in properties]
