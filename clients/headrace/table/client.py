"""Table: a topic as a map from each key to its newest value."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Generic, Self, TypeVar, Unpack, overload

import msgspec

from headrace.config import check_limits
from headrace.errors import ConfigurationError, TableNotLoaded
from headrace.instance import ClientInstance
from headrace.lifecycle import Startable
from headrace.messages import Message, SendResult, encoded
from headrace.names import check_topic
from headrace.producer.block import DEFAULT_COMPRESSION
from headrace.producer.producer import DELIVERY_TIMEOUT_MS
from headrace.producer.sender import Sender
from headrace.table.codec import codec
from headrace.table.entries import DELETED, Entries, Waiting
from headrace.table.follow import Follower
from headrace.table.remote import KeyLookup
from headrace.telemetry import ended
from headrace.typed import Topic
from headrace.values import encoded_text, plain_text
from headrace_protocol.message import DELETE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from headrace.config import ConnectOptions
    from headrace.table.codec import Codec
    from headrace_protocol.drivers.aio import Connect
    from headrace_protocol.message import StoredMessage

Value = TypeVar("Value")

_GROUP = "headrace_table"


class Change(msgspec.Struct, Generic[Value], frozen=True):
    """A key's new value.

    value: None if the key was deleted.
    timestamp_ms: time at which the broker stored it, in milliseconds since 1970.
    """

    key: str
    value: Value | None
    timestamp_ms: int

    @property
    def is_deletion(self) -> bool:
        """True if the key was deleted."""
        return self.value is None


class Changes(Generic[Value]):
    """Iterator over the changes of a table. ``__anext__`` raises InvalidValue and can continue."""

    def __init__(self, waiting: Waiting, codec: Codec[Value]) -> None:
        self._waiting = waiting
        self._codec = codec

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Change[Value]:
        key, (body, timestamp_ms, _) = await self._waiting.next()
        value = None if body == DELETED else self._codec.decode(key, body)
        return Change(key, value, timestamp_ms)


class Table(Startable, Generic[Value]):
    """The newest value of every key of a topic; use it in an ``async with`` block.

    topic: a compacted topic keeps the newest values for ever. Of another, values expire with its
        messages.
    model: type of the values: bytes by default; str for text; or a type whose values are stored as
        JSON: a pydantic model, a dataclass, a msgspec struct, dict, ...
    local: keep a copy of the whole table here, loaded at the start and kept up to date. Without
        it each ``get`` asks a broker, which must be headrace's, and the topic must be compacted.
    allow_partial: read what there is while a broker with a part of the topic is away, with a
        warning in the log. Without it, what needs that part waits for ``delivery_timeout_ms``, and
        then raises PartialAnswer.
    timeout_ms, delivery_timeout_ms: as in ``Producer``; lookups at brokers use them, too.

    Keys go to queues as with ``Producer``. Messages without a key are ignored.
    """

    @overload
    def __init__(
        self,
        topic: Topic[Value],
        *,
        local: bool = ...,
        allow_partial: bool = ...,
        nameserver: str | Sequence[str] | None = ...,
        timeout_ms: float = ...,
        delivery_timeout_ms: float = ...,
        connect: Connect | None = ...,
        **how: Unpack[ConnectOptions],
    ) -> None: ...

    @overload
    def __init__(
        self: Table[bytes],
        topic: str,
        *,
        local: bool = ...,
        allow_partial: bool = ...,
        nameserver: str | Sequence[str] | None = ...,
        timeout_ms: float = ...,
        delivery_timeout_ms: float = ...,
        connect: Connect | None = ...,
        **how: Unpack[ConnectOptions],
    ) -> None: ...

    @overload
    def __init__(
        self,
        topic: str,
        *,
        model: type[Value],
        local: bool = ...,
        allow_partial: bool = ...,
        nameserver: str | Sequence[str] | None = ...,
        timeout_ms: float = ...,
        delivery_timeout_ms: float = ...,
        connect: Connect | None = ...,
        **how: Unpack[ConnectOptions],
    ) -> None: ...

    def __init__(
        self,
        topic: str,
        *,
        model: type[Value] | None = None,
        local: bool = True,
        allow_partial: bool = False,
        nameserver: str | Sequence[str] | None = None,
        timeout_ms: float = 3000,
        delivery_timeout_ms: float = DELIVERY_TIMEOUT_MS,
        connect: Connect | None = None,
        **how: Unpack[ConnectOptions],
    ) -> None:
        check_limits(timeout_ms=timeout_ms)
        check_limits(0, delivery_timeout_ms=delivery_timeout_ms)
        self.topic = check_topic(topic)
        typed = topic if isinstance(topic, Topic) and model is None else None
        self._codec: Codec[Value] = (
            codec(self.topic, typed.model, typed.form) if typed else codec(self.topic, model)
        )
        self._is_local = local
        self._timeout_ms = timeout_ms
        self._allow_partial = allow_partial
        self._delivery_timeout_s = delivery_timeout_ms / 1000
        self._instance = ClientInstance(nameserver, connect=connect, how=how, producer_group=_GROUP)
        self._sender = Sender(
            self._instance,
            _GROUP,
            timeout_ms=timeout_ms,
            delivery_timeout_ms=delivery_timeout_ms,
            compression=DEFAULT_COMPRESSION,
        )
        self._begin()

    def _begin(self) -> None:
        self._entries = Entries()
        self._lookup = KeyLookup(
            self._instance, self.topic, self._timeout_ms, allow_partial=self._allow_partial
        )
        self._follower: Follower | None = None

    async def __aenter__(self) -> Self:
        self._begin()
        tasks = await self._instance.start()
        try:
            if self._is_local:
                self._follower = Follower(
                    self._instance,
                    self.topic,
                    self._entries,
                    self._delivery_timeout_s,
                    allow_partial=self._allow_partial,
                )
                retries = self._sender.retries(self.topic)
                await retries.run(partial(self._follower.start, tasks))
            else:
                await self._instance.route(self.topic)
        except BaseException:
            await self._instance.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._instance.stop()

    # -- reading -----------------------------------------------------------------------------------

    async def get(self, key: str) -> Value | None:
        """The value of a key, None without one. Waits for a local copy that is still loading.

        Raises InvalidValue, KeyLookupUnsupported, PartialAnswer, and the errors of a broker that is
        asked or followed.
        """
        return (await self.get_many([key])).get(key)

    async def get_many(self, keys: Iterable[str]) -> dict[str, Value]:
        """The values of the keys that have one; from brokers in one round trip. See ``get``."""
        self._instance.check_open("Table")
        wanted = {key: _plain_key(key) for key in keys}
        values = await self._values(list(wanted.values()))
        return {key: values[plain] for key, plain in wanted.items() if plain in values}

    async def _values(self, keys: list[str]) -> dict[str, Value]:
        if self._follower is None:
            return await self._remote_values(keys)
        await self._follower.loaded()
        bodies = ((key, self._entries.get(key)) for key in keys)
        return {key: self._codec.decode(key, body) for key, body in bodies if body is not None}

    async def _remote_values(self, keys: list[str]) -> dict[str, Value]:
        retries = self._sender.retries(self.topic)
        found = await retries.run(partial(self._lookup.find, keys))
        bodies = {key: _body(message) for key, message in found.items()}
        return {key: self._codec.decode(key, body) for key, body in bodies.items() if body}

    def __getitem__(self, key: str) -> Value:
        """The value of a key in the loaded local copy.

        Raises KeyError, InvalidValue, and TableNotLoaded before ``synced``.
        """
        body = self._copy().get(_plain_key(key))
        if body is None:
            raise KeyError(key)
        return self._codec.decode(key, body)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._copy().get(str.__str__(key)) is not None

    def __len__(self) -> int:
        return len(self._copy())

    def __iter__(self) -> Iterator[str]:
        return (key for key, _ in self._copy().items())

    def items(self) -> Iterator[tuple[str, Value]]:
        """Keys and values of the loaded local copy. Raises TableNotLoaded, InvalidValue."""
        return ((key, self._codec.decode(key, body)) for key, body in self._copy().items())

    def _copy(self) -> Entries:
        if not self._following().is_loaded:
            raise TableNotLoaded(self.topic)
        return self._entries

    def _following(self) -> Follower:
        # Any thread may read the copy.
        self._instance.check_started("Table")
        if self._follower is None:
            raise ConfigurationError(
                f"table {self.topic} has no local copy: use get, or open it with local=True"
            )
        return self._follower

    # -- following ---------------------------------------------------------------------------------

    def changes(self) -> Changes[Value]:
        """The changes of the local copy from now on, while it loads also the values that it loads.

        Changes of one queue come in order. A loop that is slower than the writers gets only the
        newest change of each key.
        """
        self._instance.check_open("Table")
        self._following()
        waiting = Waiting()
        self._entries.waiting.add(waiting)
        return Changes(waiting, self._codec)

    async def synced(self) -> None:
        """Wait until the local copy has all messages that are in the topic now."""
        self._instance.check_open("Table")
        await self._following().synced()

    # -- writing -----------------------------------------------------------------------------------

    async def put(self, key: str, value: Value) -> SendResult:
        """Set a key's value; when it returns, reads of this table see it.

        Raises InvalidValue, InvalidMessage, and the errors of ``Producer.send``; and CopyBehind if
        the value is stored, but the local copy can't read it.
        """
        return await self._send(Message(self.topic, self._codec.encode(key, value), key))

    async def delete(self, key: str) -> SendResult:
        """Delete a key; when it returns, reads of this table see that. Raises as ``put``."""
        return await self._send(Message(self.topic, b"", key))

    async def _send(self, message: Message) -> SendResult:
        self._instance.check_open("Table")
        if not _plain_key(message.key).strip():
            raise ConfigurationError(f"table {self.topic}: key {message.key!r} is blank")
        whole = encoded(message)
        sender = self._sender
        outgoing, span = sender.encode(whole)
        sent = sender.send(self.topic, sender.by_key(whole.key), outgoing)
        result = await ended(span, sent)
        self._lookup.note_written(result)
        if self._follower:
            await self._follower.applied(result)
        return result


def _plain_key(key: object) -> str:
    """A key as a plain text that UTF-8 can hold. Raises ConfigurationError."""
    text = plain_text(key, "key", ConfigurationError)
    encoded_text(text, "key", ConfigurationError)
    return text


def _body(message: StoredMessage) -> bytes | Exception:
    """The body of a record; DELETED for a delete marker."""
    if message.properties.get(DELETE) == "true":
        return DELETED
    try:
        return message.body
    except ValueError as error:
        return error
