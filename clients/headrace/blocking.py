"""Blocking clients: the async clients behind plain ``with`` blocks and plain calls.

Each client runs its async counterpart on an event loop in a thread of its own; a call passes the
work to that thread and waits for the result. A call therefore costs some 50 µs more than in async
code: where speed matters, send and read many messages per call (``send_many``,
``pipeline().send_all``, ``batches``, ``receive_many``). Methods, arguments and errors are those of
the async counterpart and documented there.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from inspect import isawaitable
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal

from headrace.admin.client import Admin as AsyncAdmin
from headrace.consumer.pull import PullConsumer as AsyncPullConsumer
from headrace.consumer.push import Consumer as AsyncConsumer
from headrace.errors import ClientClosed, ConfigurationError
from headrace.producer.producer import Producer as AsyncProducer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import TracebackType

    from headrace.messages import Message, MessageBatch, ReceivedMessage
    from headrace.producer.pipeline import Pipeline as AsyncPipeline

Client = TypeVar("Client")
_MESSAGES_PER_CALL = 1000


class _Blocking(Generic[Client]):
    """Wrapper of an async client; every method blocks until the result is there."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._stack = ExitStack()
        self._portal: BlockingPortal | None = None

    def __enter__(self) -> Self:
        if self._portal is not None:
            raise ConfigurationError("this client is already open; use it in one block at a time")
        portal = start_blocking_portal("trio")
        self._portal = self._stack.enter_context(portal)
        try:
            self._enter_client()
        except BaseException:
            self._portal = None
            self._stack.close()
            raise
        return self

    def _enter_client(self) -> None:
        assert self._portal is not None
        client: Any = self._client
        self._stack.enter_context(self._portal.wrap_async_context_manager(client))

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._portal = None
        self._stack.__exit__(error_type, error, traceback)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        attribute = getattr(self._client, name)
        return partial(self._call, attribute) if callable(attribute) else attribute

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a method, async or not, on the event loop."""
        if self._portal is None:
            raise ClientClosed(type(self).__name__)
        future = self._portal.start_task_soon(partial(_awaited, function, *args, **kwargs))
        try:
            return future.result()
        except BaseException:
            # A signal handler raised: without this, leaving the block would wait for the call.
            future.cancel()
            raise


async def _awaited(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = function(*args, **kwargs)
    return await result if isawaitable(result) else result


class Pipeline(_Blocking["AsyncPipeline"]):
    """See ``headrace.producer.pipeline.Pipeline``; runs on its producer's event loop."""

    def __init__(self, client: AsyncPipeline, producer: Producer) -> None:
        super().__init__(client)
        self._producer = producer

    def __enter__(self) -> Self:
        self._portal = self._producer._portal
        self._enter_client()
        return self

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._producer._portal is None:
            raise ClientClosed("Producer")
        return super()._call(function, *args, **kwargs)

    def send_all(self, messages: Iterable[Message]) -> None:
        """Send many messages, a thousand per call to the event loop."""
        remaining = iter(messages)
        while chunk := list(islice(remaining, _MESSAGES_PER_CALL)):
            self._call(self._client.send_all, chunk)


class Producer(_Blocking[AsyncProducer]):
    """See ``headrace.Producer``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(AsyncProducer(*args, **kwargs))

    def pipeline(self, **kwargs: Any) -> Pipeline:
        """See ``headrace.Producer.pipeline``; ``on_result`` is called in the loop's thread."""
        return Pipeline(self._call(self._client.pipeline, **kwargs), self)


class PullConsumer(_Blocking[AsyncPullConsumer]):
    """See ``headrace.PullConsumer``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(AsyncPullConsumer(*args, **kwargs))


class _Consumer(AsyncConsumer):
    # Each call is a separate task, but all of them act for the one calling thread.
    _single_user = True


class Consumer(_Blocking[_Consumer]):
    """See ``headrace.Consumer``; iterate over it with ``for``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(_Consumer(*args, **kwargs))

    def __iter__(self) -> Iterator[ReceivedMessage]:
        messages = self._call(self._client.__aiter__)
        while True:
            self._call(messages.wait_for_some)
            yield from messages.take_ready()

    def batches(self, **kwargs: Any) -> Iterator[MessageBatch]:
        """See ``headrace.Consumer.batches``."""
        batches = self._call(self._client.batches, **kwargs)
        while True:
            yield self._call(batches.__anext__)


class Admin(_Blocking[AsyncAdmin]):
    """See ``headrace.Admin``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(AsyncAdmin(*args, **kwargs))
