"""Messages to send, received messages and batches, and the results of sending."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import count, repeat
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self, overload

import msgspec

from headrace.delays import LEVEL_MAX
from headrace.errors import ConfigurationError, InvalidMessage
from headrace.values import (
    check_tag,
    encoded_text,
    is_int,
    kind_of,
    optional_text,
    plain_body,
    plain_int,
    plain_number,
    plain_text,
    shown,
)
from headrace_protocol import compression, message_ids
from headrace_protocol import message as record
from headrace_protocol.bodies import MessageQueue
from headrace_protocol.codes import ResponseCode
from headrace_protocol.compression import COMPRESSED, decompress, decompress_each
from headrace_protocol.errors import CorruptRecord
from headrace_protocol.system_topics import GROUP_PREFIXES

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from pyarrow import RecordBatch

    from headrace_protocol.columns import RecordColumns
    from headrace_protocol.message import StoredMessage

BODY_BYTES_MAX = 4 * 1024 * 1024
# Past this no clock can count in milliseconds.
_DELAY_S_END = 2**53 / 1000
_TIME_MS_END = 2**63
# Defaults of a message's fields. CPython has one empty str and one 0.
EMPTY: Any = ""
NO_LEVEL: Any = 0
NO_DELAY: Any = 0
# The rest is left for the client's message id.
PROPERTIES_BYTES_MAX = record.PROPERTIES_BYTES_MAX - len(f"{record.UNIQ_KEY}  ") - 32
# Length in characters of a key and tag that fit, however many bytes each character takes.
_SURELY_FIT = PROPERTIES_BYTES_MAX // 5
_SHOWN_MAX = 40
_TOPIC = re.compile(r"[%|a-zA-Z0-9_-]{1,127}")
_RETRY_TOPIC = re.compile(r"%(RETRY|DLQ)%[%|a-zA-Z0-9_-]{1,248}")
_GROUP = re.compile(r"[%|a-zA-Z0-9_-]{1,120}")


class Message(msgspec.Struct, gc=False):
    """A message to send; each send takes a copy of it, so a program may reuse the object.

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

    At most one of the last three; brokers accept up to three days ahead by default. "What a message
    may hold" in docs/clients.md lists the types that each field takes.
    """

    topic: str
    body: bytes
    key: str = ""
    tag: str = ""
    properties: dict[str, str] = {}
    delay_level: int = 0
    delay: float = 0
    deliver_at: datetime | int | None = None

    # Whether its tag must be one that subscriptions can select.
    checks_tag: ClassVar[bool] = True

    def check(self) -> None:
        """Raise InvalidMessage for anything that every broker would reject."""
        self.encoded()

    def encoded(self) -> EncodedMessage:
        """The message as it is now, checked, copied and encoded. Raises InvalidMessage."""
        body = self.body
        properties = self.properties
        # Compares identities: a value of a wrong type may be falsy, or answer == with an array.
        if (
            type(body) is bytes
            and type(self.topic) is str
            and type(properties) is dict
            and not properties
            and self.delay_level is NO_LEVEL
            and self.delay is NO_DELAY
            and self.deliver_at is None
            and 0 < len(body) <= BODY_BYTES_MAX
        ):
            if self.key is EMPTY and self.tag is EMPTY:
                return EncodedMessage(self, self.topic, body)
            return self._with_texts(body)
        return self._encoded()

    def _with_texts(self, body: bytes) -> EncodedMessage:
        """``encoded`` of a message with a key or a tag, and nothing else that is optional."""
        key = self.key
        tag = self.tag
        if type(key) is str and type(tag) is str and (tag is EMPTY or tag.isalnum()):
            if tag:
                text = f"KEYS\x01{key}\x02TAGS\x01{tag}\x02" if key else f"TAGS\x01{tag}\x02"
            else:
                text = f"KEYS\x01{key}\x02"
            if len(text) <= _SURELY_FIT and "\x01" not in key and "\x02" not in key:
                try:
                    return EncodedMessage(self, self.topic, body, text.encode(), key.encode())
                except UnicodeEncodeError:
                    pass
        return self._encoded()

    def _encoded(self) -> EncodedMessage:
        topic, body, key, tag = self.topic, self.body, self.key, self.tag
        if type(topic) is not str:
            topic = check_topic(topic)
        if type(body) is not bytes:
            body = plain_body(body)
        if type(key) is not str:
            key = optional_text(key, "key")
        if type(tag) is not str:
            tag = optional_text(tag, "tag")
        if tag and self.checks_tag:
            check_tag(tag)
        if not 0 < len(body) <= BODY_BYTES_MAX:
            check_size(topic, len(body), has_key=bool(key))
        delay = self._delay()
        given = self.properties
        properties = _plain_properties(given) if given is not None else []
        raw = _encoded_properties(topic, key, tag, delay, properties)
        return EncodedMessage(self, topic, body, raw, key.encode(), bool(delay))

    def _delay(self) -> str:
        """The property with the time of delivery; empty without one. Raises InvalidMessage."""
        if self.delay_level is NO_LEVEL and self.delay is NO_DELAY and self.deliver_at is None:
            return ""
        level = plain_int(self.delay_level, "delay_level")
        delay = plain_number(self.delay, "delay")
        at_ms = self._deliver_at_ms()
        if bool(level) + bool(delay) + bool(at_ms) > 1:
            raise InvalidMessage(
                f"delay_level={level}, delay={delay:g}, deliver_at={self.deliver_at} for "
                f"{self.topic}: set only one of them"
            )
        if not 0 <= level <= LEVEL_MAX:
            raise InvalidMessage(f"delay_level {level}: must be 0 to {LEVEL_MAX}")
        if not 0 <= delay < _DELAY_S_END:
            raise InvalidMessage(
                f"delay={shown(self.delay)} for {self.topic}: must be seconds from now"
            )
        if level:
            return f"{record.DELAY}\x01{level}\x02"
        if delay:
            return f"{record.TIMER_DELAY_MS}\x01{round(delay * 1000)}\x02"
        return f"{record.TIMER_DELIVER_MS}\x01{at_ms}\x02" if at_ms else ""

    def _deliver_at_ms(self) -> int:
        """Milliseconds since 1970; 0 without a time of delivery."""
        at: object = self.deliver_at
        if at is None:
            return 0
        if isinstance(at, datetime):
            if at.utcoffset() is None:
                raise InvalidMessage(
                    f"deliver_at={at} for {self.topic}: a datetime needs a time zone"
                )
            return max(1, round(at.timestamp() * 1000))
        if is_int(at) and 0 <= (at_ms := plain_int(at, "deliver_at")) < _TIME_MS_END:
            return at_ms
        raise InvalidMessage(
            f"deliver_at={shown(at)} for {self.topic}: must be a datetime or milliseconds since "
            "1970"
        )


class Copy(Message, gc=False):
    """A message that another client has sent, with its tag as it is."""

    checks_tag: ClassVar[bool] = False


class EncodedMessage(msgspec.Struct, frozen=True, gc=False):
    """A message as it was when it was passed.

    message: the caller's object, which may have changed since.
    properties: as stored in the record, except the client's message id. key: in UTF-8; empty if
    there is none.
    """

    message: Message
    topic: str
    body: bytes
    properties: bytes = b""
    key: bytes = b""
    is_delayed: bool = False

    def as_sent(self) -> Message:
        """The caller's object, or a copy of what was sent if that has changed since."""
        try:
            if self.message.encoded() == self:
                return self.message
        except InvalidMessage:
            pass
        own = record.decode_properties(self.properties)
        return Message(
            self.topic,
            self.body,
            own.pop(record.KEYS, ""),
            own.pop(record.TAGS, ""),
            delay_level=int(own.pop(record.DELAY, 0)),
            delay=int(own.pop(record.TIMER_DELAY_MS, 0)) / 1000,
            deliver_at=int(own.pop(record.TIMER_DELIVER_MS, 0)) or None,
            properties=own,
        )


def encoded(message: Message) -> EncodedMessage:
    """``message.encoded()``; raises InvalidMessage also for what is no Message."""
    try:
        return message.encoded()
    except AttributeError as error:
        raise no_message(message, error) from None


def no_message(value: object, error: Exception) -> InvalidMessage:
    """The error for a value that is no Message; raises ``error`` if it is one."""
    if isinstance(value, Message):
        raise error
    return InvalidMessage(
        f"{shown(value)} is {kind_of(value)}, not a Message: create one with the body as bytes"
    )


def check_size(topic: str, body_bytes: int, *, has_key: bool) -> None:
    """Raise InvalidMessage for a body of a size that brokers reject."""
    if not body_bytes and not has_key:
        raise InvalidMessage(
            f"a body of 0 bytes for {topic}: only a message with a key may have none; it "
            "deletes the key from a table"
        )
    if body_bytes > BODY_BYTES_MAX:
        raise InvalidMessage(
            f"a body of {body_bytes} bytes for {topic}: brokers accept at most "
            f"{BODY_BYTES_MAX} bytes; store larger data elsewhere and send a reference to it"
        )


def _plain_properties(given: object) -> list[tuple[str, str]]:
    """Names and values of a message's own properties. Raises InvalidMessage."""
    if type(given) is not dict and not isinstance(given, Mapping):
        raise InvalidMessage(f"properties={shown(given)} is {kind_of(given)}: it must be a dict")
    if not given:
        return []
    plain = []
    for name, value in given.items():
        text = name if type(name) is str else plain_text(name, "a property's name")
        if text in record.SYSTEM_PROPERTIES:
            raise InvalidMessage(
                f"property {text} is reserved for clients and brokers: rename it, or use "
                "key=, tag=, delay= or delay_level="
            )
        if not isinstance(value, str):
            raise InvalidMessage(
                f"property {shown(text)} = {shown(value)} is {kind_of(value)}: the value must be a "
                "str"
            )
        if not (text and value):
            raise InvalidMessage(
                f"property {shown(text)} = {shown(value)}: neither name nor value may be empty"
            )
        plain.append((text, str.__str__(value)))
    return plain


def _encoded_properties(
    topic: str, key: str, tag: str, delay: str, properties: list[tuple[str, str]]
) -> bytes:
    text = f"{record.KEYS}\x01{key}\x02" if key else ""
    if tag:
        text += f"{record.TAGS}\x01{tag}\x02"
    text += delay
    if properties:
        text += "".join([f"{name}\x01{value}\x02" for name, value in properties])
    count = bool(key) + bool(tag) + bool(delay) + len(properties)
    try:
        raw = text.encode()
    except UnicodeEncodeError:
        raw = b""
    if not raw or text.count("\x01") != count or text.count("\x02") != count:
        _check_texts(topic, key, tag, properties)
    if len(raw) > PROPERTIES_BYTES_MAX:
        raise InvalidMessage(
            f"properties of {len(raw)} bytes for {topic}: at most {PROPERTIES_BYTES_MAX} fit; put "
            "large values into the body"
        )
    return raw


def _check_texts(topic: str, key: str, tag: str, properties: list[tuple[str, str]]) -> None:
    """Raise InvalidMessage for the first text that cannot be stored."""
    texts = [("key", key), ("tag", tag)]
    for name, value in properties:
        texts += [("a property's name", name), (f"property {shown(name)}", value)]
    for what, text in texts:
        encoded_text(text, what)
        if "\x01" in text or "\x02" in text:
            raise InvalidMessage(
                f"{what}={shown(text)} of a message for {topic} contains byte 1 or 2, which "
                "separate properties; encode it"
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
        self._store_host, offset = message_ids.decode_offset_message_id(first)
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
        return message_ids.encode_offset_message_id(self._store_host, int(self._offsets[index]))


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
        """The body, decompressed. Raises CodecMissing, BodyTooLarge."""
        body = self._body
        if body is None:
            stored, batch = self.stored, self._batch
            limits = BODY_LIMITS if batch is None else batch.limits
            body = decompress(stored.stored_body, stored.sys_flag, limits.body_bytes_max)
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
            decompress_each(bodies, zip(others, flags, strict=True), *self.limits)
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
        is_other = (checksums(bodies) != columns.body_crc) | (columns.sys_flag & COMPRESSED)
        return bodies, is_other.nonzero()[0].tolist()


def _short(value: str | bytes) -> str:
    """A value's repr, cut after 40 characters or bytes."""
    cut = len(value) > _SHOWN_MAX
    return f"{value[:_SHOWN_MAX]!r}... ({len(value)})" if cut else repr(value)


def _values_of(properties: list[bytes], name: str) -> list[str]:
    """One property of each message; empty where a message lacks it."""
    key = name.encode()
    return [record.property_text(record.property_value(raw, key)) for raw in properties]


def check_topic(topic: str) -> str:
    """The plain name of a topic. Raises InvalidMessage unless it is a valid one."""
    if not isinstance(topic, str):
        raise InvalidMessage(f"{shown(topic)} is not a valid topic name: it must be a str")
    if not _TOPIC.fullmatch(topic) and not _RETRY_TOPIC.fullmatch(topic):
        raise InvalidMessage(
            f"{topic!r} is not a valid topic name: use 1 to 127 letters, digits, and any of % | _ -"
        )
    return str.__str__(topic)


def check_queue(queue: MessageQueue) -> MessageQueue:
    """The queue itself. Raises ConfigurationError for what is none."""
    if isinstance(queue, MessageQueue):
        return queue
    raise ConfigurationError(
        f"queue={shown(queue)} is {kind_of(queue)}: give a MessageQueue, such as one of "
        "client.queues(topic)"
    )


def takes_batches(topic: str) -> bool:
    """Whether brokers accept batches for ``topic``: not for retry and dead-letter topics."""
    return not topic.startswith(GROUP_PREFIXES)


def check_group(group: str) -> str:
    """The plain name of a group. Raises ConfigurationError unless it is a valid one."""
    if not isinstance(group, str):
        raise ConfigurationError(f"group={shown(group)} is {kind_of(group)}: it must be a str")
    if not _GROUP.fullmatch(group):
        hint = f" (the first argument is the group: write nameserver={group!r})"
        raise ConfigurationError(
            f"{group!r} is not a valid group name: use 1 to 120 letters, digits, and any of % | _ -"
            + (hint if ":" in group else "")
        )
    return str.__str__(group)
