"""Messages as users write and read them."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Self, overload

import msgspec

from headrace.errors import ConfigurationError, InvalidMessage
from headrace_protocol import message as record
from headrace_protocol.bodies import MessageQueue
from headrace_protocol.codes import ResponseCode
from headrace_protocol.message import StoredMessage, decode_record

BODY_BYTES_MAX = 4 * 1024 * 1024
DELAY_LEVEL_MAX = 18
_TOPIC = re.compile(r"[%|a-zA-Z0-9_-]{1,127}")
_RETRY_TOPIC = re.compile(r"%(RETRY|DLQ)%[%|a-zA-Z0-9_-]{1,248}")
_GROUP = re.compile(r"[%|a-zA-Z0-9_-]{1,120}")
_RESERVED = frozenset(
    {record.KEYS, record.TAGS, record.DELAY, record.UNIQ_KEY, record.WAIT, record.CLUSTER}
)


class Message(msgspec.Struct):
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

    def properties_text(self, uniq_key: str) -> str:
        """All properties as they go into the record. Raises InvalidMessage."""
        text = f"{record.UNIQ_KEY}\x01{uniq_key}\x02"
        count = 1
        if self.key:
            text += f"{record.KEYS}\x01{self.key}\x02"
            count += 1
        if self.tag:
            text += f"{record.TAGS}\x01{self.tag}\x02"
            count += 1
        if self.delay_level:
            text += f"{record.DELAY}\x01{self.delay_level}\x02"
            count += 1
        if self.properties:
            text += self._user_properties()
            count += len(self.properties)
        self._check_properties(text, count)
        return text

    def _user_properties(self) -> str:
        reserved = _RESERVED & self.properties.keys()
        if reserved:
            raise InvalidMessage(
                f"property {min(reserved)} belongs to the broker; use key=, tag= or delay_level="
            )
        for name, value in self.properties.items():
            if not (name and value):
                raise InvalidMessage(f"property {name!r} = {value!r}: neither may be empty")
        return "".join([f"{name}\x01{value}\x02" for name, value in self.properties.items()])

    def _check_properties(self, text: str, count: int) -> None:
        if text.count("\x01") != count or text.count("\x02") != count:
            raise InvalidMessage(
                f"key, tag or a property of a message for {self.topic} holds the byte 1 or 2, "
                "which separate properties: encode it"
            )
        if len(text) * 4 > record.PROPERTIES_BYTES_MAX:
            property_bytes = len(text.encode())
            if property_bytes > record.PROPERTIES_BYTES_MAX:
                raise InvalidMessage(
                    f"properties of {property_bytes} bytes for {self.topic}: at most "
                    f"{record.PROPERTIES_BYTES_MAX} fit; put large things into the body"
                )


class SendResult(msgspec.Struct, frozen=True, gc=False):
    """Where a message, or a batch of ``message_count`` messages, was stored.

    queue_offset: of the (first) message.
    message_id: the client's own id (UNIQ_KEY); a batch's ids are joined by commas.
    offset_message_id: the broker's id, likewise.
    status: SUCCESS, or how durable it is not yet: FLUSH_DISK_TIMEOUT, FLUSH_SLAVE_TIMEOUT,
        SLAVE_NOT_AVAILABLE.
    """

    queue: MessageQueue
    queue_offset: int
    message_id: str
    offset_message_id: str
    status: int = ResponseCode.SUCCESS
    message_count: int = 1


class ReceivedMessage:
    """A message out of a queue, decoded when something of it is asked for.

    It is a view of the pull that brought it: keeping one keeps that pull's bytes.
    Any property but ``queue`` and ``queue_offset`` raises CorruptRecord for damaged bytes.
    """

    __slots__ = ("_record", "_stored", "queue", "queue_offset")

    def __init__(self, queue: MessageQueue, queue_offset: int, record_bytes: memoryview) -> None:
        self.queue = queue
        self.queue_offset = queue_offset
        self._record = record_bytes
        self._stored: StoredMessage | None = None

    @classmethod
    def from_stored(cls, stored: StoredMessage, broker_name: str) -> Self:
        """The message in a record that is decoded already."""
        queue = MessageQueue(topic=stored.topic, broker_name=broker_name, queue_id=stored.queue_id)
        message = cls(queue, stored.queue_offset, memoryview(b""))
        message._stored = stored
        return message

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
            self._stored = decode_record(self._record)
        return self._stored

    @property
    def body(self) -> bytes:
        """The body as it was sent."""
        return self.stored.body

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


class MessageBatch(Sequence[ReceivedMessage]):
    """What one pull brought from one queue, in order.

    queue_offset: where the pull began. next_offset: where the next one begins; with a tag filter
    there may be gaps. body_bytes: size of the records.
    """

    __slots__ = ("_messages", "body_bytes", "next_offset", "queue", "queue_offset")

    def __init__(
        self,
        queue: MessageQueue,
        queue_offset: int,
        next_offset: int,
        messages: list[ReceivedMessage],
        body_bytes: int,
    ) -> None:
        self.queue = queue
        self.queue_offset = queue_offset
        self.next_offset = next_offset
        self.body_bytes = body_bytes
        self._messages = messages

    @classmethod
    def decode(
        cls,
        queue: MessageQueue,
        queue_offset: int,
        next_offset: int,
        body: memoryview,
        offset_delta: int = 0,
    ) -> Self:
        """The records in a pull's body. Raises CorruptRecord.

        offset_delta: goes onto the queue offset of each record.
        """
        messages = _split(queue, body, offset_delta)
        return cls(queue, queue_offset, next_offset, messages, len(body))

    def keep(self, wanted: Callable[[ReceivedMessage], bool]) -> None:
        """Drop the messages that are not ``wanted``."""
        self._messages = [message for message in self._messages if wanted(message)]

    def rest(self, offset: int) -> MessageBatch:
        """What there is from ``offset`` on; itself when that is all."""
        if offset <= self.queue_offset:
            return self
        messages = [message for message in self._messages if message.queue_offset >= offset]
        return MessageBatch(self.queue, offset, self.next_offset, messages, self.body_bytes)

    def __len__(self) -> int:
        return len(self._messages)

    def __iter__(self) -> Iterator[ReceivedMessage]:
        return iter(self._messages)

    @overload
    def __getitem__(self, index: int) -> ReceivedMessage: ...
    @overload
    def __getitem__(self, index: slice) -> list[ReceivedMessage]: ...
    def __getitem__(self, index: int | slice) -> ReceivedMessage | list[ReceivedMessage]:
        return self._messages[index]


# Total size and queue offset.
_RECORD_START = struct.Struct(">i16xq")


def _split(queue: MessageQueue, body: memoryview, delta: int) -> list[ReceivedMessage]:
    """The records of a pull's body; ``delta`` goes onto each queue offset."""
    messages = []
    unpack = _RECORD_START.unpack_from
    position, end = 0, len(body)
    while position < end:
        if end - position < record.RECORD_BYTES_MIN:
            raise record.CorruptRecord(position, f"only {end - position} bytes are left")
        size, queue_offset = unpack(body, position)
        record_end = position + size
        if size < record.RECORD_BYTES_MIN or record_end > end:
            raise record.CorruptRecord(position, f"size {size}, {end - position} bytes are left")
        messages.append(ReceivedMessage(queue, queue_offset + delta, body[position:record_end]))
        position = record_end
    return messages


def check_topic(topic: str) -> None:
    """Raise InvalidMessage unless ``topic`` can be a topic's name."""
    if not _TOPIC.fullmatch(topic) and not _RETRY_TOPIC.fullmatch(topic):
        raise InvalidMessage(
            f"{topic!r} is no topic name: 1 to 127 letters, digits, and any of % | _ -"
        )


def check_group(group: str) -> None:
    """Raise ConfigurationError unless ``group`` can be a group's name."""
    if not _GROUP.fullmatch(group):
        raise ConfigurationError(
            f"{group!r} is no group name: 1 to 120 letters, digits, and any of % | _ -"
        )
