"""Messages to send, received messages and batches, and the results of sending."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import count, repeat
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, overload

import msgspec

from headrace.delays import LEVEL_MAX
from headrace.errors import ConfigurationError, InvalidMessage
from headrace_protocol import message as record
from headrace_protocol.bodies import MessageQueue
from headrace_protocol.codes import ResponseCode
from headrace_protocol.message import CorruptRecord
from headrace_protocol.system_topics import GROUP_PREFIXES

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from pyarrow import RecordBatch

    from headrace_protocol.columns import RecordColumns
    from headrace_protocol.message import StoredMessage

BODY_BYTES_MAX = 4 * 1024 * 1024
# Past this no clock can count in milliseconds.
_DELAY_S_END = 2**53 / 1000
# The rest is left for the client's message id.
PROPERTIES_BYTES_MAX = record.PROPERTIES_BYTES_MAX - len(f"{record.UNIQ_KEY}  ") - 32
# Length in characters of a key and tag that fit, however many bytes each character takes.
_SURELY_FIT = PROPERTIES_BYTES_MAX // 5
_SHOWN_MAX = 40
_TOPIC = re.compile(r"[%|a-zA-Z0-9_-]{1,127}")
_RETRY_TOPIC = re.compile(r"%(RETRY|DLQ)%[%|a-zA-Z0-9_-]{1,248}")
_GROUP = re.compile(r"[%|a-zA-Z0-9_-]{1,120}")


class Message(msgspec.Struct, gc=False):
    """A message to send.

    body: 1 byte to 4 MiB. A str is not accepted: encode it. Empty only with a key, to delete the
        key from a table.
    key: messages with equal keys go to one queue, in order, and can be looked up by key later.
        Several keys separated by spaces are indexed one by one; the whole text selects the queue.
    tag: label that consumers can filter by.
    properties: names and values of your own; none may be empty.
    delay_level: 1 to 18 for 1s 5s 10s 30s 1m .. 10m 20m 30m 1h 2h; 0 delivers at once.
    delay: seconds from now until the message is delivered, in milliseconds' precision.
    deliver_at: time of delivery: a datetime with a time zone, or milliseconds since 1970. A time
        in the past delivers at once.

    At most one of the last three; brokers accept up to three days ahead by default.
    """

    topic: str
    body: bytes
    key: str = ""
    tag: str = ""
    properties: dict[str, str] = {}
    delay_level: int = 0
    delay: float = 0
    deliver_at: datetime | int | None = None

    def check(self) -> None:
        """Raise InvalidMessage for anything that every broker would reject."""
        body: object = self.body
        if not isinstance(body, bytes):
            kind = type(body).__name__
            raise InvalidMessage(f"the body for {self.topic} is {kind}, not bytes; encode it")
        if not self.body and not self.key:
            raise InvalidMessage(
                f"a body of 0 bytes for {self.topic}: only a message with a key may have none; it "
                "deletes the key from a table"
            )
        if len(self.body) > BODY_BYTES_MAX:
            raise InvalidMessage(
                f"a body of {len(self.body)} bytes for {self.topic}: brokers accept at most "
                f"{BODY_BYTES_MAX} bytes; store larger data elsewhere and send a reference to it"
            )
        if self.delay_level or self.delay or self.deliver_at:
            self._check_delay()
        if self.key or self.tag or self.properties:
            text = self._key_and_tag()
            if self.properties or "\x01" in text or "\x02" in text or len(text) > _SURELY_FIT:
                self._check_properties()

    @property
    def is_delayed(self) -> bool:
        """Whether it is not for delivery at once."""
        return bool(self.delay_level or self.delay or self.deliver_at)

    def _check_delay(self) -> None:
        if bool(self.delay_level) + bool(self.delay) + bool(self.deliver_at) > 1:
            raise InvalidMessage(
                f"delay_level={self.delay_level}, delay={self.delay}, deliver_at={self.deliver_at} "
                f"for {self.topic}: set only one of them"
            )
        if not 0 <= self.delay_level <= LEVEL_MAX:
            raise InvalidMessage(f"delay_level {self.delay_level}: must be 0 to {LEVEL_MAX}")
        delay: object = self.delay
        if not (isinstance(delay, int | float) and 0 <= delay < _DELAY_S_END):
            raise InvalidMessage(f"delay={delay!r} for {self.topic}: must be seconds from now")
        at = self.deliver_at
        if isinstance(at, datetime) and at.tzinfo is None:
            raise InvalidMessage(f"deliver_at={at} for {self.topic}: a datetime needs a time zone")
        if not isinstance(at, datetime | int | None) or (isinstance(at, int) and at < 0):
            raise InvalidMessage(
                f"deliver_at={at!r} for {self.topic}: must be a datetime or milliseconds since 1970"
            )

    def _delay_property(self) -> str:
        if self.delay_level:
            return f"{record.DELAY}\x01{self.delay_level}\x02"
        if self.delay:
            return f"{record.TIMER_DELAY_MS}\x01{round(self.delay * 1000)}\x02"
        at = self.deliver_at
        at_ms = round(at.timestamp() * 1000) if isinstance(at, datetime) else at
        return f"{record.TIMER_DELIVER_MS}\x01{at_ms}\x02"

    def _key_and_tag(self) -> str:
        try:
            return self.key + self.tag
        except TypeError:
            raise InvalidMessage(
                f"key {self.key!r} and tag {self.tag!r} for {self.topic}: both must be str"
            ) from None

    def properties_text(self) -> str:
        """All properties as stored in the record, except the client's message id."""
        text = f"{record.KEYS}\x01{self.key}\x02" if self.key else ""
        if self.tag:
            text += f"{record.TAGS}\x01{self.tag}\x02"
        if self.delay_level or self.delay or self.deliver_at:
            text += self._delay_property()
        if self.properties:
            properties = self.properties.items()
            text += "".join([f"{name}\x01{value}\x02" for name, value in properties])
        return text

    def _check_properties(self) -> None:
        if self.properties:
            self._check_user_properties()
        text = self.properties_text()
        count = bool(self.key) + bool(self.tag) + self.is_delayed + len(self.properties)
        if text.count("\x01") != count or text.count("\x02") != count:
            raise InvalidMessage(
                f"the key, tag or a property of a message for {self.topic} contains byte 1 or 2, "
                "which separate properties; encode it"
            )
        if len(text) * 4 > PROPERTIES_BYTES_MAX:
            property_bytes = len(text.encode())
            if property_bytes > PROPERTIES_BYTES_MAX:
                raise InvalidMessage(
                    f"properties of {property_bytes} bytes for {self.topic}: at most "
                    f"{PROPERTIES_BYTES_MAX} fit; put large values into the body"
                )

    def _check_user_properties(self) -> None:
        reserved = record.SYSTEM_PROPERTIES & self.properties.keys()
        if reserved:
            raise InvalidMessage(
                f"property {min(reserved)} is reserved for clients and brokers: rename it, or use "
                "key=, tag=, delay= or delay_level="
            )
        for name, value in self.properties.items():
            if not isinstance(value, str):
                raise InvalidMessage(f"property {name!r} = {value!r}: the value must be a str")
            if not (name and value):
                raise InvalidMessage(
                    f"property {name!r} = {value!r}: neither name nor value may be empty"
                )


class SendResult(msgspec.Struct, frozen=True):
    """Where the message or messages of one request were stored: consecutively in one queue.

    queue_offset: offset of the first message; -1 while the offsets of a static topic's queue are
        undecided.
    message_ids: the client's id (UNIQ_KEY) of each message, or the broker's id if it has none.
    offset_message_ids: the broker's id of each message, which encodes the record's position.
    recall_handle: for ``Producer.recall``, of a message with ``delay`` or ``deliver_at``.
    status: SUCCESS, or what durability is still missing: FLUSH_DISK_TIMEOUT,
        FLUSH_SLAVE_TIMEOUT, SLAVE_NOT_AVAILABLE.
    """

    queue: MessageQueue
    queue_offset: int
    message_ids: Sequence[str]
    offset_message_ids: Sequence[str]
    status: int = ResponseCode.SUCCESS
    recall_handle: str | None = None

    @property
    def message_count(self) -> int:
        """Number of messages stored."""
        return len(self.message_ids)

    @property
    def message_id(self) -> str:
        """The message's id; several ids are joined by commas."""
        return ",".join(self.message_ids)

    @property
    def offset_message_id(self) -> str:
        """The broker's id of the message; several ids are joined by commas."""
        return ",".join(self.offset_message_ids)

    def of_each(self) -> Iterator[SendResult]:
        """One result per message."""
        ids, offset_ids = self.message_ids, self.offset_message_ids
        if len(ids) == 1:
            yield self
            return
        for index in range(len(ids)):
            own_offset_ids = offset_ids[index : index + 1]
            own_ids = own_offset_ids if ids is offset_ids else ids[index : index + 1]
            offset = self.queue_offset if self.queue_offset < 0 else self.queue_offset + index
            yield SendResult(self.queue, offset, own_ids, own_offset_ids, self.status)


class OffsetMessageIds(Sequence[str]):
    """The broker's ids of consecutive records in its log, computed on access."""

    __slots__ = ("_offsets", "_store_host")

    def __init__(self, first: str, sizes: Any) -> None:
        """first: id of the first record. sizes: array of the records' sizes in bytes.

        Raises ValueError if ``first`` is not such an id.
        """
        self._store_host, offset = record.decode_offset_message_id(first)
        self._offsets = sizes.cumsum(dtype="i8") - sizes + offset

    def __repr__(self) -> str:
        return f"<OffsetMessageIds of {len(self)} messages>"

    def __len__(self) -> int:
        return len(self._offsets)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> OffsetMessageIds: ...
    def __getitem__(self, index: int | slice) -> str | OffsetMessageIds:
        if isinstance(index, slice):
            part = OffsetMessageIds.__new__(OffsetMessageIds)
            part._store_host, part._offsets = self._store_host, self._offsets[index]
            return part
        return record.encode_offset_message_id(self._store_host, int(self._offsets[index]))


class Returns(Protocol):
    """A consumer to which messages can be returned; a blocking one has returned them at once."""

    def retry(self, message: ReceivedMessage, after: float | None) -> Awaitable[None]:
        """See ``ReceivedMessage.retry``."""
        ...

    def reject(self, message: ReceivedMessage) -> Awaitable[None]:
        """See ``ReceivedMessage.reject``."""
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
        queue = self.queue
        return (
            f"<ReceivedMessage {queue.topic}/{queue.broker_name}/{queue.queue_id}"
            f"@{self.queue_offset} {self._contents()}>"
        )

    def _contents(self) -> str:
        """Key and body, shortened; decompresses nothing."""
        try:
            stored, key = self.stored, self.key
        except CorruptRecord:
            return "(damaged)"
        body = self._body
        if body is None and stored.sys_flag & record.COMPRESSED:
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
        """The body, decompressed. Raises CodecMissing, BodyTooLarge."""
        body = self._body
        if body is None:
            stored, batch = self.stored, self._batch
            limits = BODY_LIMITS if batch is None else batch.limits
            body = record.decompress(stored.stored_body, stored.sys_flag, limits.body_bytes_max)
            self._body = body
        return body

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

    def _returns(self) -> Returns:
        returns = self._batch and self._batch.returns
        if not returns:
            raise ConfigurationError(
                f"{self} was not read by a Consumer of this process, so it has no group"
            )
        return returns

    def copy_to(self, topic: str) -> Message:
        """A message to send to ``topic``: the same body, key, tag and properties.

        The trace context of this message is left out: the send of the other has its own.
        """
        properties = self.properties
        for name in ("traceparent", "tracestate"):
            properties.pop(name, None)
        return Message(topic, self.body, self.key, self.tag, properties)

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

    body_bytes_max: int = record.BODY_BYTES_MAX
    batch_bytes_max: int = record.BATCH_BYTES_MAX


BODY_LIMITS = BodyLimits()


class MessageBatch(Sequence[ReceivedMessage]):
    """Messages fetched together from one queue, in order.

    queue_offset: offset at which the batch begins. next_offset: offset at which the next batch
    begins; with a tag filter there may be gaps. columns: all fields as numpy arrays, see
    ``headrace_protocol.columns``. limits: larger bodies are not decompressed. returns: the group's
    consumer that read the batch, if one did.

    Iteration and indexing build message objects from the records; the batch does not keep them.
    """

    __slots__ = ("columns", "limits", "next_offset", "queue", "queue_offset", "returns")

    def __init__(
        self,
        queue: MessageQueue,
        queue_offset: int,
        next_offset: int,
        columns: RecordColumns,
        limits: BodyLimits = BODY_LIMITS,
    ) -> None:
        self.queue = queue
        self.queue_offset = queue_offset
        self.next_offset = next_offset
        self.columns = columns
        self.limits = limits
        self.returns: Returns | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        place = (self.queue, self.queue_offset, self.next_offset)
        return type(self), (*place, self.columns, self.limits)

    def __repr__(self) -> str:
        queue = self.queue
        return (
            f"<MessageBatch {queue.topic}/{queue.broker_name}/{queue.queue_id}"
            f"@{self.queue_offset}: {len(self)} messages>"
        )

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
            record.decompress_each(bodies, zip(others, flags, strict=True), *self.limits)
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
        queue_offset = int(self.columns.queue_offset[index])
        return ReceivedMessage(self.queue, queue_offset, None, self, index)

    def _bodies(self) -> tuple[list[bytes], list[int]]:
        """The stored bodies, and the indexes of those that are compressed or damaged."""
        from headrace_protocol.columns import checksums

        columns = self.columns
        bodies = columns.stored_bodies()
        is_other = (checksums(bodies) != columns.body_crc) | (columns.sys_flag & record.COMPRESSED)
        return bodies, is_other.nonzero()[0].tolist()


def _short(value: str | bytes) -> str:
    """A value's repr, cut after 40 characters or bytes."""
    cut = len(value) > _SHOWN_MAX
    return f"{value[:_SHOWN_MAX]!r}... ({len(value)})" if cut else repr(value)


def _values_of(properties: list[bytes], name: str) -> list[str]:
    """One property of each message; empty where a message lacks it."""
    key = name.encode()
    return [record.property_text(record.property_value(raw, key)) for raw in properties]


def check_topic(topic: str) -> None:
    """Raise InvalidMessage unless ``topic`` is a valid topic name."""
    if not isinstance(topic, str):
        raise InvalidMessage(f"{topic!r} is not a valid topic name: it must be a str")
    if not _TOPIC.fullmatch(topic) and not _RETRY_TOPIC.fullmatch(topic):
        raise InvalidMessage(
            f"{topic!r} is not a valid topic name: use 1 to 127 letters, digits, and any of % | _ -"
        )


def takes_batches(topic: str) -> bool:
    """Whether brokers accept batches for ``topic``: not for retry and dead-letter topics."""
    return not topic.startswith(GROUP_PREFIXES)


def check_group(group: str) -> None:
    """Raise ConfigurationError unless ``group`` is a valid group name."""
    if not _GROUP.fullmatch(group):
        hint = f" (the first argument is the group: write nameserver={group!r})"
        raise ConfigurationError(
            f"{group!r} is not a valid group name: use 1 to 120 letters, digits, and any of % | _ -"
            + (hint if ":" in group else "")
        )
