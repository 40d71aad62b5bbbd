"""Messages as users write and read them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import count, repeat
from typing import TYPE_CHECKING, Any, NamedTuple, Self, overload

import msgspec

from headrace.errors import ConfigurationError, InvalidMessage
from headrace_protocol import message as record
from headrace_protocol.bodies import MessageQueue
from headrace_protocol.codes import ResponseCode
from headrace_protocol.system_topics import GROUP_PREFIXES

if TYPE_CHECKING:
    from pyarrow import RecordBatch

    from headrace_protocol.columns import RecordColumns
    from headrace_protocol.message import StoredMessage

BODY_BYTES_MAX = 4 * 1024 * 1024
DELAY_LEVEL_MAX = 18
# Room for a client's id is left.
PROPERTIES_BYTES_MAX = record.PROPERTIES_BYTES_MAX - len(f"{record.UNIQ_KEY}  ") - 32
# Characters of key and tag that do, however many bytes each has.
_SURELY_FIT = PROPERTIES_BYTES_MAX // 5
_TOPIC = re.compile(r"[%|a-zA-Z0-9_-]{1,127}")
_RETRY_TOPIC = re.compile(r"%(RETRY|DLQ)%[%|a-zA-Z0-9_-]{1,248}")
_GROUP = re.compile(r"[%|a-zA-Z0-9_-]{1,120}")
RESERVED_PROPERTIES = frozenset(
    {record.KEYS, record.TAGS, record.DELAY, record.UNIQ_KEY, record.WAIT, record.CLUSTER}
)


class Message(msgspec.Struct, gc=False):
    """A message to send.

    body: 1 byte to 4 MiB. A str is no body: encode it.
    key: messages with equal keys go to one queue, in order, and are found by it later. Several
        keys with spaces between them are indexed one by one; the whole text chooses the queue.
    tag: what consumers filter by.
    properties: names and values of your own; not empty.
    delay_level: 1 to 18 for 1s 5s 10s 30s 1m .. 10m 20m 30m 1h 2h; 0 delivers at once.
    """

    topic: str
    body: bytes
    key: str = ""
    tag: str = ""
    properties: dict[str, str] = {}
    delay_level: int = 0

    def check(self) -> None:
        """Raise InvalidMessage naming what no broker would take."""
        body: object = self.body
        if not isinstance(body, bytes):
            kind = type(body).__name__
            raise InvalidMessage(f"the body for {self.topic} is {kind}, not bytes: encode it")
        if not 0 < len(self.body) <= BODY_BYTES_MAX:
            raise InvalidMessage(
                f"a body of {len(self.body)} bytes for {self.topic}: brokers take 1 to "
                f"{BODY_BYTES_MAX} bytes; put larger things elsewhere and send where they are"
            )
        if not 0 <= self.delay_level <= DELAY_LEVEL_MAX:
            raise InvalidMessage(f"delay_level {self.delay_level}: 0 to {DELAY_LEVEL_MAX} exist")
        if self.key or self.tag or self.properties:
            text = self._key_and_tag()
            if self.properties or "\x01" in text or "\x02" in text or len(text) > _SURELY_FIT:
                self._check_properties()

    def _key_and_tag(self) -> str:
        try:
            return self.key + self.tag
        except TypeError:
            raise InvalidMessage(
                f"key {self.key!r} and tag {self.tag!r} for {self.topic}: both have to be str"
            ) from None

    def properties_text(self) -> str:
        """All properties as they go into the record, but for the ids of a client."""
        text = f"{record.KEYS}\x01{self.key}\x02" if self.key else ""
        if self.tag:
            text += f"{record.TAGS}\x01{self.tag}\x02"
        if self.delay_level:
            text += f"{record.DELAY}\x01{self.delay_level}\x02"
        if self.properties:
            properties = self.properties.items()
            text += "".join([f"{name}\x01{value}\x02" for name, value in properties])
        return text

    def _check_properties(self) -> None:
        if self.properties:
            self._check_user_properties()
        text = self.properties_text()
        count = bool(self.key) + bool(self.tag) + bool(self.delay_level) + len(self.properties)
        if text.count("\x01") != count or text.count("\x02") != count:
            raise InvalidMessage(
                f"key, tag or a property of a message for {self.topic} holds the byte 1 or 2, "
                "which separate properties: encode it"
            )
        if len(text) * 4 > PROPERTIES_BYTES_MAX:
            property_bytes = len(text.encode())
            if property_bytes > PROPERTIES_BYTES_MAX:
                raise InvalidMessage(
                    f"properties of {property_bytes} bytes for {self.topic}: at most "
                    f"{PROPERTIES_BYTES_MAX} fit; put large things into the body"
                )

    def _check_user_properties(self) -> None:
        reserved = RESERVED_PROPERTIES & self.properties.keys()
        if reserved:
            raise InvalidMessage(
                f"property {min(reserved)} belongs to the broker; use key=, tag= or delay_level="
            )
        for name, value in self.properties.items():
            if not isinstance(value, str):
                raise InvalidMessage(f"property {name!r} = {value!r}: it has to be a str")
            if not (name and value):
                raise InvalidMessage(f"property {name!r} = {value!r}: neither may be empty")


class SendResult(msgspec.Struct, frozen=True):
    """Where a message, or those of one request, were stored: one after the other in a queue.

    queue_offset: of the (first) message.
    message_ids: of each message, the client's id (UNIQ_KEY), or the broker's if it has none.
    offset_message_ids: of each message, the broker's id, which leads straight to the record.
    status: SUCCESS, or how durable it is not yet: FLUSH_DISK_TIMEOUT, FLUSH_SLAVE_TIMEOUT,
        SLAVE_NOT_AVAILABLE.
    """

    queue: MessageQueue
    queue_offset: int
    message_ids: Sequence[str]
    offset_message_ids: Sequence[str]
    status: int = ResponseCode.SUCCESS

    @property
    def message_count(self) -> int:
        """How many messages were stored."""
        return len(self.message_ids)

    @property
    def message_id(self) -> str:
        """The message's id; those of several are joined by commas."""
        return ",".join(self.message_ids)

    @property
    def offset_message_id(self) -> str:
        """The broker's id of the message; those of several are joined by commas."""
        return ",".join(self.offset_message_ids)

    def of_each(self) -> Iterator[SendResult]:
        """A result for each of the messages."""
        ids, offset_ids = self.message_ids, self.offset_message_ids
        for index in range(len(ids)):
            its_offset_ids = offset_ids[index : index + 1]
            its_ids = its_offset_ids if ids is offset_ids else ids[index : index + 1]
            yield SendResult(
                self.queue, self.queue_offset + index, its_ids, its_offset_ids, self.status
            )


class OffsetMessageIds(Sequence[str]):
    """The broker's ids of records that lie one after the other in its log; made when asked for."""

    __slots__ = ("_offsets", "_store_host")

    def __init__(self, first: str, sizes: Any) -> None:
        """first: id of the first record. sizes: array of all their sizes in bytes.

        Raises ValueError if ``first`` is no such id.
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


class ReceivedMessage(msgspec.Struct, eq=False, gc=False):
    """A message out of a queue.

    Its body is here; the rest is decoded when it is asked for, out of the batch that brought it:
    keeping a message keeps that batch's bytes. Any property but ``queue`` and ``queue_offset``
    raises CorruptRecord for damaged bytes.
    """

    queue: MessageQueue
    queue_offset: int
    _body: bytes | None
    _batch: MessageBatch | None
    _index: int
    _stored: StoredMessage | None = None

    @classmethod
    def from_stored(cls, stored: StoredMessage, broker_name: str) -> Self:
        """The message in a record that is decoded already."""
        queue = MessageQueue(topic=stored.topic, broker_name=broker_name, queue_id=stored.queue_id)
        return cls(queue, stored.queue_offset, None, None, 0, stored)

    def __repr__(self) -> str:
        queue = self.queue
        return (
            f"<ReceivedMessage {queue.topic}/{queue.broker_name}/{queue.queue_id}"
            f"@{self.queue_offset}>"
        )

    @property
    def stored(self) -> StoredMessage:
        """The record with all its fields."""
        if self._stored is None:
            assert self._batch is not None
            self._stored = self._batch.columns.message(self._index)
        return self._stored

    @property
    def body(self) -> bytes:
        """The body as it was sent. Raises CodecMissing, BodyTooLarge."""
        body = self._body
        if body is None:
            stored, batch = self.stored, self._batch
            limits = BODY_LIMITS if batch is None else batch.limits
            body = record.decompress(stored.stored_body, stored.sys_flag, limits.body_bytes_max)
            self._body = body
        return body

    @property
    def topic(self) -> str:
        """The topic it was sent to, also when it comes again by way of a retry topic."""
        return self.properties.get(record.RETRY_TOPIC) or self.queue.topic

    @property
    def properties(self) -> dict[str, str]:
        """All properties, the broker's own too."""
        return self.stored.properties

    @property
    def key(self) -> str:
        """The key it was sent with."""
        return self.properties.get(record.KEYS, "")

    @property
    def tag(self) -> str:
        """The tag it was sent with."""
        return self.properties.get(record.TAGS, "")

    @property
    def message_id(self) -> str:
        """The producer's id."""
        return self.stored.message_id

    @property
    def offset_message_id(self) -> str:
        """The broker's id, which leads straight to the record."""
        return self.stored.offset_message_id

    @property
    def born_timestamp_ms(self) -> int:
        """When the producer made it, milliseconds since 1970."""
        return self.stored.born_timestamp

    @property
    def store_timestamp_ms(self) -> int:
        """When the broker stored it, milliseconds since 1970."""
        return self.stored.store_timestamp

    @property
    def reconsume_times(self) -> int:
        """How often it was sent back before."""
        return self.stored.reconsume_times


class BodyLimits(NamedTuple):
    """Largest decompressed size of a body, and of all bodies of a batch together."""

    body_bytes_max: int = record.BODY_BYTES_MAX
    batch_bytes_max: int = record.BATCH_BYTES_MAX


BODY_LIMITS = BodyLimits()


class MessageBatch(Sequence[ReceivedMessage]):
    """Messages that came from one queue together, in order.

    queue_offset: where it begins. next_offset: where the next one begins; with a tag filter there
    may be gaps. columns: all fields as numpy arrays, see ``headrace_protocol.columns``.
    limits: larger bodies are not decompressed.

    A message is made of a record when it is iterated over or asked for by its index, and not kept.
    """

    __slots__ = ("columns", "limits", "next_offset", "queue", "queue_offset")

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

    def __repr__(self) -> str:
        queue = self.queue
        return (
            f"<MessageBatch {queue.topic}/{queue.broker_name}/{queue.queue_id}"
            f"@{self.queue_offset}: {len(self)} messages>"
        )

    @property
    def buffer_bytes(self) -> int:
        """The memory that it keeps."""
        return len(self.columns.data)

    def values(self) -> list[bytes]:
        """All bodies as they were sent.

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
        """As an Arrow table: value (the body), key, tag, queue_offset, two timestamps.

        Raises ConfigurationError without pyarrow, and what ``values`` raises.
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
        """Messages ``start`` to ``end``, by index; itself when these are all."""
        if start <= 0 and end >= len(self):
            return self
        return MessageBatch(
            self.queue,
            self.offset_at(start),
            self.offset_at(end),
            self.columns.select(slice(start, end)),
            self.limits,
        )

    def before(self, offset: int) -> MessageBatch:
        """The messages before a queue offset; itself when these are all."""
        return self.part(0, int(self.columns.queue_offset.searchsorted(offset)))

    def offset_at(self, index: int) -> int:
        """The queue offset to go on from when ``index`` messages are dealt with."""
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
        """The bodies as stored, and the indexes of those that are compressed or damaged."""
        from headrace_protocol.columns import checksums

        columns = self.columns
        bodies = columns.stored_bodies()
        is_other = (checksums(bodies) != columns.body_crc) | (columns.sys_flag & record.COMPRESSED)
        return bodies, is_other.nonzero()[0].tolist()


def _values_of(properties: list[bytes], name: str) -> list[str]:
    """One property of each message; empty where there is none."""
    key = name.encode()
    return [record.property_value(raw, key).decode(errors="replace") for raw in properties]


def check_topic(topic: str) -> None:
    """Raise InvalidMessage unless ``topic`` can be a topic's name."""
    if not isinstance(topic, str):
        raise InvalidMessage(f"{topic!r} is no topic name: it has to be a str")
    if not _TOPIC.fullmatch(topic) and not _RETRY_TOPIC.fullmatch(topic):
        raise InvalidMessage(
            f"{topic!r} is no topic name: 1 to 127 letters, digits, and any of % | _ -"
        )


def takes_batches(topic: str) -> bool:
    """Whether brokers take several messages at once for ``topic``: not for those of groups."""
    return not topic.startswith(GROUP_PREFIXES)


def check_group(group: str) -> None:
    """Raise ConfigurationError unless ``group`` can be a group's name."""
    if not _GROUP.fullmatch(group):
        raise ConfigurationError(
            f"{group!r} is no group name: 1 to 120 letters, digits, and any of % | _ -"
        )
