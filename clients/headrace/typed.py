"""Topics whose messages are values of a type."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar

from headrace.config import check_callback
from headrace.errors import ConfigurationError, InvalidValue
from headrace.messages import Message
from headrace.names import check_topic
from headrace.table.codec import codec
from headrace.tasks import wait_if_async
from headrace.values import plain_text, shown

if TYPE_CHECKING:
    from headrace.received import ReceivedMessage

Value = TypeVar("Value")
# Properties of a message that tell what its body is.
_TYPE, _VERSION = "type", "version"

# Handler of messages that are not values of their topic's model.
OnBad = Callable[[InvalidValue, "ReceivedMessage"], Awaitable[None] | None]


class Topic(str, Generic[Value]):
    """A topic whose messages are values of a model; usable wherever a topic's name is.

    model: a pydantic model, a msgspec struct, a dataclass, or any other type that msgspec knows.
    form: how values are stored: "json" or "msgpack".
    version: kept with each message as its property ``version``, for readers of several versions.
        The model's name is the property ``type``; a message of another type is no value.
    """

    __slots__ = ("_codec", "form", "model", "version")

    def __new__(
        cls,
        name: str,
        model: type[Value],
        *,
        form: Literal["json", "msgpack"] = "json",
        version: str = "",
    ) -> Topic[Value]:
        """Raises InvalidMessage for an invalid name, ConfigurationError for an unsuitable model."""
        topic = super().__new__(cls, check_topic(name))
        topic.model = model
        topic.form = form
        topic.version = plain_text(version, "version", ConfigurationError)
        topic._codec = codec(str(topic), model, form)
        return topic

    if TYPE_CHECKING:
        model: type[Value]
        form: Literal["json", "msgpack"]
        version: str
        _codec: Any

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (str(self), self.model, self.form, self.version)

    def message(
        self,
        value: Value,
        *,
        key: str = "",
        tag: str = "",
        properties: Mapping[str, str] = {},
        **when: Any,
    ) -> Message:
        """A message with a value. when: the message's ``delay``, ``deliver_at`` or ``delay_level``.

        Raises InvalidValue.
        """
        kind = {_TYPE: self._codec.name} | ({_VERSION: self.version} if self.version else {})
        body = self._codec.encode(key, value)
        return Message(str(self), body, key=key, tag=tag, properties={**properties, **kind}, **when)

    def read(self, message: ReceivedMessage) -> Value:
        """The value of a message. Raises InvalidValue."""
        try:
            kind = message.stored.properties.get(_TYPE, self._codec.name)
            key, body = message.key, message.body
        except ValueError as error:  # a damaged record, or a body that is too large
            raise InvalidValue(str(self), "", self._codec.name, error) from error
        if kind != self._codec.name:
            raise InvalidValue(str(self), key, self._codec.name, f"its type is {shown(kind)}")
        value: Value = self._codec.decode(key, body)
        return value


def _restored(name: str, model: type[Any], form: Any, version: str) -> Topic[Any]:
    return Topic(name, model, form=form, version=version)


class Typed(NamedTuple):
    """The typed topics of a consumer, by name.

    rejects: without ``on_bad``, whether a message that is no value goes to the dead letters at
        once, since retries would hold up others.
    """

    topics: Mapping[str, Topic[Any]]
    on_bad: OnBad | None = None
    rejects: bool = False

    @classmethod
    def of(
        cls,
        topics: Iterable[str],
        model: Any,
        on_bad: OnBad | None,
        *,
        rejects: bool = False,
    ) -> Typed:
        """model: of topics that have none. Raises ConfigurationError."""
        check_callback("on_bad", on_bad)
        found = {
            str(name): name if isinstance(name, Topic) else Topic(name, model)
            for name in topics
            if isinstance(name, Topic) or model is not None
        }
        if on_bad is not None and not found:
            raise ConfigurationError("on_bad= requires a model=, or a Topic with one")
        return cls(found, on_bad, rejects)

    def check_handles_bad(self) -> None:
        """Raise ConfigurationError if messages that are no values would have to be returned."""
        if self.topics and self.on_bad is None:
            raise ConfigurationError(
                "a broadcasting consumer with a model= requires on_bad=: it returns no messages"
            )

    def read(self, message: ReceivedMessage) -> Any:
        """The value of a message. Raises InvalidValue, ConfigurationError."""
        topic = self.topics.get(message.topic)
        if topic is None:
            raise ConfigurationError(
                f"topic {message.topic} has no model: give the consumer a model=, or a Topic"
            )
        return topic.read(message)

    def settle(self, error: InvalidValue, message: ReceivedMessage) -> Awaitable[None] | None:
        """Dispose of a message that is not a value of its model; await the result."""
        if self.on_bad is not None:
            return self.on_bad(error, message)
        return message.reject() if self.rejects else message.retry()


class ValueIterator:
    """Values with their messages, less those that are none."""

    def __init__(self, messages: AsyncIterator[ReceivedMessage], typed: Typed) -> None:
        self._messages = messages
        self._typed = typed

    def __aiter__(self) -> ValueIterator:
        return self

    async def __anext__(self) -> tuple[Any, ReceivedMessage]:
        while True:
            message = await anext(self._messages)
            try:
                return self._typed.read(message), message
            except InvalidValue as error:
                await wait_if_async(self._typed.settle(error, message))
