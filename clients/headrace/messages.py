"""Messages to send, and the results of sending."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar, overload

import msgspec

from headrace.delays import LEVEL_MAX
from headrace.errors import InvalidMessage
from headrace.names import check_topic
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
from headrace_protocol import message as record
from headrace_protocol import message_ids
from headrace_protocol.bodies import MessageQueue  # noqa: TC001 - msgspec reads annotations
from headrace_protocol.codes import ResponseCode

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
    """The queue and offsets of the messages of one request, which are stored consecutively.

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
