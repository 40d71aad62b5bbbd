"""Blocking clients: the async clients behind plain ``with`` blocks and plain calls.

Each client runs its async counterpart on an event loop in a thread of its own; a call passes the
work to that thread and waits for the result. A call therefore costs some 50 µs more than in async
code: where speed matters, send and read many messages per call (``send_many``,
``pipeline().send_all``, ``batches``, ``receive_many``). Methods, arguments and errors are those of
the async counterpart, without ``await``.

Several threads may use a client. What is still open when the program ends is closed then.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from concurrent.futures import CancelledError
from contextlib import ExitStack
from contextvars import ContextVar
from functools import partial, wraps
from itertools import islice
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Self,
    TypeVar,
    cast,
    overload,
)

import anyio

from headrace.admin.client import Admin as AsyncAdmin
from headrace.config import check_limits, check_plain_callback
from headrace.consumer.pull import PullConsumer as AsyncPullConsumer
from headrace.consumer.push import Consumer as AsyncConsumer
from headrace.errors import ClientClosed, ConfigurationError, OpenedBeforeFork
from headrace.messages import MessageBatch, ReceivedMessage
from headrace.producer.pipeline import Pipeline as AsyncPipeline
from headrace.producer.producer import Producer as AsyncProducer
from headrace.producer.transaction import Transaction as AsyncTransaction
from headrace.table.client import Table as AsyncTable
from headrace.threads import LoopThread, runs_here

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Sequence
    from types import TracebackType

    from anyio.from_thread import BlockingPortal

    from headrace.messages import Message, Returns, SendResult
    from headrace.producer.producer import OnResult
    from headrace.table.client import Change, Changes
    from headrace_protocol.bodies import MessageQueue

Client = TypeVar("Client")
# A method of a base of the client serves the blocking one, too.
Client_co = TypeVar("Client_co", covariant=True)
Result = TypeVar("Result")
Value = TypeVar("Value")
P = ParamSpec("P")
Item = TypeVar("Item", ReceivedMessage, MessageBatch)

_log = logging.getLogger("headrace.client")

_MESSAGES_PER_CALL = 1000

# The open clients, in the order of their opening.
_open: dict[_Blocking[Any], None] = {}
_calling_thread: ContextVar[object] = ContextVar("calling_thread")


class _Blocking(Generic[Client_co]):
    """Wrapper of an async client; every method blocks until the result is there."""

    # The error by which a client is left that is still open at the program's end.
    _left_open: BaseException | None = SystemExit()

    def __init__(self, client: Client_co) -> None:
        self._client = client
        self._stack = ExitStack()
        self._portal: BlockingPortal | None = None
        self._is_leaving = False
        self._is_of_parent = False

    def __enter__(self) -> Self:
        if self._portal is not None:
            raise ConfigurationError("this client is already open; use it in one block at a time")
        self._check_process()
        loop = LoopThread()
        self._stack.callback(loop.stop)
        self._enter_client(loop.portal)
        return self

    def _enter_client(self, portal: BlockingPortal) -> None:
        client: Any = self._client
        _calling_thread.set(threading.current_thread())
        self._portal = portal
        try:
            self._stack.enter_context(portal.wrap_async_context_manager(client))
        except BaseException:
            self._portal = None
            self._stack.close()
            raise
        _open[self] = None

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._portal is None or self._is_leaving:
            return
        self._check_thread(self._portal)
        self._is_leaving = True
        _open.pop(self, None)
        try:
            # Callbacks in other threads call the client meanwhile.
            self._stack.__exit__(error_type, error, traceback)
        finally:
            self._portal, self._is_leaving = None, False

    def start(self) -> Self:
        """Open the client, as entering its ``with`` block does, until ``stop``."""
        return self.__enter__()

    def stop(self) -> None:
        """Close the client, as leaving its block does; does nothing if it is closed.

        Called in another thread, it also ends the ``for`` loops over the client.
        """
        self._leave()

    def _leave(self, error: BaseException | None = None) -> None:
        self.__exit__(type(error) if error else None, error, None)

    def _abandon(self) -> None:
        """Make the copy of an open client in a forked child harmless: its loop has no thread."""
        self._is_of_parent = True
        self._portal, self._stack = None, ExitStack()

    def _check_process(self) -> None:
        if self._is_of_parent:
            raise OpenedBeforeFork(type(self).__name__)

    def _check_thread(self, portal: BlockingPortal) -> None:
        """Raise ConfigurationError in the thread of the client's event loop."""
        if runs_here(portal):
            raise ConfigurationError(
                f"this {type(self).__name__} is called by a function that runs in its event loop's "
                "thread, such as on_result, and would wait for itself: do it in another thread"
            )

    def _call(
        self, function: Callable[P, Awaitable[Result]], *args: P.args, **kwargs: P.kwargs
    ) -> Result:
        """Run an async function on the event loop."""
        portal = self._open_portal()
        _calling_thread.set(threading.current_thread())
        try:
            future = portal.start_task_soon(partial(function, *args, **kwargs))
        except RuntimeError:
            self._check_thread(portal)
            raise self._closed() from None  # another thread is closing the client
        try:
            return future.result()
        except (CancelledError, ClientClosed):
            raise self._closed() from None
        except BaseException:
            # A signal handler raised: without this, leaving the block would wait for the call.
            future.cancel()
            raise

    def _open_portal(self) -> BlockingPortal:
        if self._portal is None:
            self._check_process()
            raise self._closed()
        return self._portal

    def _closed(self) -> ClientClosed:
        return ClientClosed(type(self).__name__, "with")

    def _steps(self, step: Callable[[], Awaitable[Result]]) -> Iterator[Result]:
        """Results of an async function, until there are no more or the client is closed."""
        while True:
            try:
                result = self._call(step)
            except (StopAsyncIteration, ClientClosed):
                return
            yield result


def _close_all() -> None:
    """Close what the program has left open, while its event loops still run."""
    for client in reversed(list(_open)):
        _log.warning(
            "a blocking %s was still open when the program ended; use it in a `with` block",
            type(client).__name__,
        )
        try:
            client._leave(client._left_open)
        except Exception:  # noqa: BLE001 - the others are still to be closed
            _log.exception("closing it failed")


def _abandon_all() -> None:
    for client in list(_open):
        client._abandon()
    _open.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_abandon_all)


# The decorators below give each blocking method the signature and the docstring of the async one.


def _like(
    client: Callable[P, Client],
) -> Callable[[Callable[..., None]], Callable[Concatenate[_Blocking[Client], P], None]]:
    """Decorate an ``__init__`` that passes its arguments to ``client``."""

    def decorate(
        function: Callable[..., None],
    ) -> Callable[Concatenate[_Blocking[Client], P], None]:
        return wraps(cast("Any", client).__init__)(function)

    return decorate


def _blocking(
    method: Callable[Concatenate[Client, P], Awaitable[Result]],
) -> Callable[Concatenate[_Blocking[Client], P], Result]:
    """The blocking method for an async one."""

    @wraps(method)
    def call(self: _Blocking[Client], /, *args: P.args, **kwargs: P.kwargs) -> Result:
        return self._call(partial(method, self._client), *args, **kwargs)

    return call


def _on_loop(
    method: Callable[Concatenate[Client, P], Result],
) -> Callable[Concatenate[_Blocking[Client], P], Result]:
    """The blocking method for one that does not wait, but belongs to the event loop."""

    @wraps(method)
    async def run(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        return method(client, *args, **kwargs)

    return _blocking(run)


class _OfProducer(_Blocking[Client_co]):
    """A block within that of a producer; runs on the producer's event loop."""

    def __init__(self, client: Client_co, producer: Producer) -> None:
        super().__init__(client)
        self._producer = producer

    def __enter__(self) -> Self:
        self._enter_client(self._producer._open_portal())
        return self

    def _call(
        self, function: Callable[P, Awaitable[Result]], *args: P.args, **kwargs: P.kwargs
    ) -> Result:
        self._producer._open_portal()
        return super()._call(function, *args, **kwargs)

    def _closed(self) -> ClientClosed:
        return ClientClosed(f"producer.{type(self).__name__.lower()}", "with")


class Pipeline(_OfProducer[AsyncPipeline]):
    """See ``headrace.producer.pipeline.Pipeline``; runs on its producer's event loop."""

    # At the program's end, what was accepted is still sent.
    _left_open = None

    send = _blocking(AsyncPipeline.send)
    flush = _blocking(AsyncPipeline.flush)

    def send_all(self, messages: Iterable[Message]) -> None:
        """Send many messages, a thousand per call to the event loop."""
        remaining = iter(messages)
        while chunk := list(islice(remaining, _MESSAGES_PER_CALL)):
            self._call(self._client.send_all, chunk)


class Transaction(_OfProducer[AsyncTransaction]):
    """See ``headrace.producer.transaction.Transaction``; runs on its producer's event loop."""

    send = _blocking(AsyncTransaction.send)


class Producer(_Blocking[AsyncProducer]):
    """See ``headrace.Producer``."""

    @_like(AsyncProducer)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(AsyncProducer(*args, **kwargs))

    @property
    def group(self) -> str:
        """Name under which brokers know this kind of producer."""
        return self._client.group

    send = _blocking(AsyncProducer.send)
    send_many = _blocking(AsyncProducer.send_many)
    send_oneway = _blocking(AsyncProducer.send_oneway)
    recall = _blocking(AsyncProducer.recall)
    queues = _blocking(AsyncProducer.queues)
    _pipeline = _on_loop(AsyncProducer.pipeline)
    _transaction = _on_loop(AsyncProducer.transaction)

    def transaction(self, topic: str) -> Transaction:
        """See ``headrace.Producer.transaction``."""
        return Transaction(self._transaction(topic), self)

    def pipeline(
        self,
        *,
        max_in_flight: int = 10_000,
        max_bytes: int = 16 * 1024 * 1024,
        on_result: OnResult | None = None,
    ) -> Pipeline:
        """See ``headrace.Producer.pipeline``; ``on_result`` is called in the loop's thread."""
        client = self._pipeline(
            max_in_flight=max_in_flight, max_bytes=max_bytes, on_result=on_result
        )
        return Pipeline(client, self)


class PullConsumer(_Blocking[AsyncPullConsumer]):
    """See ``headrace.PullConsumer``."""

    @_like(AsyncPullConsumer)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(AsyncPullConsumer(*args, **kwargs))

    @property
    def group(self) -> str | None:
        """The group whose progress ``committed`` reads and ``commit`` stores."""
        return self._client.group

    queues = _blocking(AsyncPullConsumer.queues)
    missing = _blocking(AsyncPullConsumer.missing)
    assign = _blocking(AsyncPullConsumer.assign)
    seek = _on_loop(AsyncPullConsumer.seek)
    seek_to = _blocking(AsyncPullConsumer.seek_to)
    position = _on_loop(AsyncPullConsumer.position)
    failures = _on_loop(AsyncPullConsumer.failures)
    receive_many = _blocking(AsyncPullConsumer.receive_many)
    commit = _blocking(AsyncPullConsumer.commit)
    committed = _blocking(AsyncPullConsumer.committed)
    min_offset = _blocking(AsyncPullConsumer.min_offset)
    max_offset = _blocking(AsyncPullConsumer.max_offset)
    offset_at = _blocking(AsyncPullConsumer.offset_at)


class _Consumer(AsyncConsumer):
    # Each call is a separate task, but all those of a thread act for it.
    _current_user = _calling_thread.get


class _Done:
    """The outcome of a call that has blocked until it was done; nobody needs to await it."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()


class _BlockingReturns:
    """Returns messages by calls that block."""

    def __init__(self, returns: Returns, client: Consumer) -> None:
        self._returns = returns
        self._client = client

    def retry(self, message: ReceivedMessage, after: float | None) -> _Done:
        self._client._call(self._returns.retry, message, after)
        return _Done()

    def reject(self, message: ReceivedMessage) -> _Done:
        self._client._call(self._returns.reject, message)
        return _Done()


def _in_spans(
    method: Callable[Concatenate[Consumer, P], Iterator[Item]],
) -> Callable[Concatenate[Consumer, P], Iterator[Item]]:
    """Give each item that a consumer's iterator yields a span, if the program traces."""

    @wraps(method)
    def iterate(self: Consumer, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[Item]:
        items = method(self, *args, **kwargs)
        tracing = self._client._instance.tracing
        if tracing is None:
            return items
        from headrace.spans import process_each

        return process_each(items, tracing, self.group)

    return iterate


class Consumer(_Blocking[AsyncConsumer]):
    """See ``headrace.Consumer``; iterate over it with ``for``.

    on_assigned, on_revoked: plain functions, called in a thread, so they may call this client.
    """

    @_like(AsyncConsumer)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for name in ("on_assigned", "on_revoked"):
            if callback := kwargs.get(name):
                check_plain_callback(name, callback)
                kwargs[name] = partial(anyio.to_thread.run_sync, callback)
        client = _Consumer(*args, **kwargs)
        super().__init__(client)
        assert client._inbox.returns is not None
        client._inbox.returns = _BlockingReturns(client._inbox.returns, self)

    @property
    def group(self) -> str:
        """The group that this consumer is a member of."""
        return self._client.group

    @property
    def assignment(self) -> list[MessageQueue]:
        """The queues assigned to this member now."""
        return self._client.assignment

    def stop(self) -> None:
        """Close the consumer, and end the ``for`` loops over it.

        A loop in another thread ends when it asks for the next message, which counts its current
        one as processed; this waits up to 5 s for that. The current message of this thread counts
        as processed.
        """
        if self._portal is not None:
            self._call(self._client._end_loops)
        self._leave(self._closed())

    def _abandon(self) -> None:
        super()._abandon()
        self._client._inbox.put_back_all()

    failures = _on_loop(AsyncConsumer.failures)
    pause = _on_loop(AsyncConsumer.pause)
    resume = _on_loop(AsyncConsumer.resume)
    seek = _on_loop(AsyncConsumer.seek)
    commit = _blocking(AsyncConsumer.commit)
    receive = _blocking(AsyncConsumer.receive)
    _messages = _on_loop(AsyncConsumer._messages)
    _batches = _on_loop(AsyncConsumer._batches)

    @_in_spans
    def __iter__(self) -> Iterator[ReceivedMessage]:
        messages = self._messages()
        for _ in self._steps(messages.wait_for_some):
            yield from messages.take_ready()

    @_in_spans
    def until(self, timeout_ms: float) -> Iterator[ReceivedMessage]:
        """Iterate over messages for ``timeout_ms``, counted from the first ``next``.

        The last message counts as processed, as in a loop that is left by ``break``.
        """
        check_limits(0, timeout_ms=timeout_ms)
        messages = self._messages()
        deadline_s = time.monotonic() + timeout_ms / 1000

        async def wait_for_some() -> None:
            messages.until = anyio.current_time() + deadline_s - time.monotonic()
            await messages.wait_for_some()

        for _ in self._steps(wait_for_some):
            for message in messages.take_ready():
                yield message
                if time.monotonic() >= deadline_s:
                    return

    @_in_spans
    def batches(self, *, max_messages: int | None = None) -> Iterator[MessageBatch]:
        """See ``headrace.Consumer.batches``."""
        return self._steps(self._batches(max_messages).__anext__)


class Table(_Blocking[AsyncTable[Value]], Generic[Value]):
    """See ``headrace.Table``."""

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
    ) -> None: ...

    def __init__(self, topic: str, **options: Any) -> None:
        super().__init__(AsyncTable(topic, **options))

    def get(self, key: str) -> Value | None:
        """See ``headrace.Table.get``."""
        return self._call(self._client.get, key)

    def get_many(self, keys: Iterable[str]) -> dict[str, Value]:
        """See ``headrace.Table.get_many``."""
        return self._call(self._client.get_many, keys)

    def put(self, key: str, value: Value) -> SendResult:
        """See ``headrace.Table.put``."""
        return self._call(self._client.put, key, value)

    def delete(self, key: str) -> SendResult:
        """See ``headrace.Table.delete``."""
        return self._call(self._client.delete, key)

    def synced(self) -> None:
        """See ``headrace.Table.synced``."""
        self._call(self._client.synced)

    @property
    def _copy(self) -> AsyncTable[Value]:
        """The table whose local copy any thread of this process may read."""
        self._check_process()
        return self._client

    def __getitem__(self, key: str) -> Value:
        return self._copy[key]

    def __contains__(self, key: object) -> bool:
        return key in self._copy

    def __len__(self) -> int:
        return len(self._copy)

    def __iter__(self) -> Iterator[str]:
        return iter(self._copy)

    def items(self) -> Iterator[tuple[str, Value]]:
        """See ``headrace.Table.items``."""
        return self._copy.items()

    def changes(self) -> Iterator[Change[Value]]:
        """See ``headrace.Table.changes``."""

        async def begin() -> Changes[Value]:
            return self._client.changes()

        return self._steps(self._call(begin).__anext__)


class Admin(_Blocking[AsyncAdmin]):
    """See ``headrace.Admin``."""

    @_like(AsyncAdmin)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(AsyncAdmin(*args, **kwargs))

    cluster = _blocking(AsyncAdmin.cluster)
    departed_brokers = _blocking(AsyncAdmin.departed_brokers)
    forget_broker = _blocking(AsyncAdmin.forget_broker)
    runtime_info = _blocking(AsyncAdmin.runtime_info)
    broker_config = _blocking(AsyncAdmin.broker_config)
    update_broker_config = _blocking(AsyncAdmin.update_broker_config)
    create_topic = _blocking(AsyncAdmin.create_topic)
    alter_topic = _blocking(AsyncAdmin.alter_topic)
    require_everywhere = _blocking(AsyncAdmin.require_everywhere)
    compact_topic = _blocking(AsyncAdmin.compact_topic)
    rebuild_topic = _blocking(AsyncAdmin.rebuild_topic)
    purge_topic = _blocking(AsyncAdmin.purge_topic)
    delete_topic = _blocking(AsyncAdmin.delete_topic)
    topics = _blocking(AsyncAdmin.topics)
    topic = _blocking(AsyncAdmin.topic)
    topic_totals = _blocking(AsyncAdmin.topic_totals)
    topic_stats = _blocking(AsyncAdmin.topic_stats)
    is_static = _blocking(AsyncAdmin.is_static)
    static_topics = _blocking(AsyncAdmin.static_topics)
    becomes_static = _blocking(AsyncAdmin.becomes_static)
    read_static_topic = _blocking(AsyncAdmin.read_static_topic)
    static_leaders = _blocking(AsyncAdmin.static_leaders)
    create_static_topic = _blocking(AsyncAdmin.create_static_topic)
    remap_static_topic = _blocking(AsyncAdmin.remap_static_topic)
    rebalance_static_topic = _blocking(AsyncAdmin.rebalance_static_topic)
    repair_static_topic = _blocking(AsyncAdmin.repair_static_topic)
    queue_parts = _blocking(AsyncAdmin.queue_parts)
    logic_queues = _blocking(AsyncAdmin.logic_queues)
    create_group = _blocking(AsyncAdmin.create_group)
    delete_group = _blocking(AsyncAdmin.delete_group)
    groups = _blocking(AsyncAdmin.groups)
    group = _blocking(AsyncAdmin.group)
    topic_groups = _blocking(AsyncAdmin.topic_groups)
    lag = _blocking(AsyncAdmin.lag)
    reset_offsets = _blocking(AsyncAdmin.reset_offsets)
    reset_queue = _blocking(AsyncAdmin.reset_queue)
    clone_offsets = _blocking(AsyncAdmin.clone_offsets)
    members = _blocking(AsyncAdmin.members)
    running_info = _blocking(AsyncAdmin.running_info)
    group_queues = _blocking(AsyncAdmin.group_queues)
    timers = _blocking(AsyncAdmin.timers)
    timer_counts = _blocking(AsyncAdmin.timer_counts)
    cancel_timer = _blocking(AsyncAdmin.cancel_timer)
    tier_status = _blocking(AsyncAdmin.tier_status)
    tier_resume = _blocking(AsyncAdmin.tier_resume)
    tier_forget = _blocking(AsyncAdmin.tier_forget)
    transactions = _blocking(AsyncAdmin.transactions)
    discarded_transactions = _blocking(AsyncAdmin.discarded_transactions)
    resume_transaction = _blocking(AsyncAdmin.resume_transaction)
    query_by_key = _blocking(AsyncAdmin.query_by_key)
    query_by_id = _blocking(AsyncAdmin.query_by_id)
    message = _blocking(AsyncAdmin.message)
