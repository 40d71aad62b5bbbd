"""Blocking clients: the async clients behind plain ``with`` blocks and plain calls.

Each client runs its async counterpart on an event loop in a thread of its own; a call passes the
work to that thread and waits for the result. A call therefore costs some 50 µs more than in async
code: where speed matters, send and read many messages per call (``send_many``,
``pipeline().send_all``, ``batches``, ``receive_many``). Methods, arguments and errors are those of
the async counterpart, without ``await``.

Several threads may use a client. What is still open when the program ends is closed then.
"""

from __future__ import annotations

import time
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
    Unpack,
    overload,
)

import anyio

from headrace.admin.client import Admin as AsyncAdmin
from headrace.blocking_base import Blocking, awaited, calling_thread, like, on_loop
from headrace.config import check_limits, check_plain_callback
from headrace.consumer.popping import PoppedShare
from headrace.consumer.pull import PullConsumer as AsyncPullConsumer
from headrace.consumer.push import Consumer as AsyncConsumer
from headrace.consumer.simple import SimpleConsumer as AsyncSimpleConsumer
from headrace.errors import ClientClosed, InvalidValue
from headrace.producer.pipeline import Pipeline as AsyncPipeline
from headrace.producer.producer import Producer as AsyncProducer
from headrace.producer.transaction import Transaction as AsyncTransaction
from headrace.received import MessageBatch, ReceivedMessage
from headrace.table.client import Table as AsyncTable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Sequence

    from headrace.config import ConnectOptions
    from headrace.messages import Message, SendResult
    from headrace.popped import Leases, PoppedMessage
    from headrace.producer.producer import OnResult
    from headrace.received import Returns
    from headrace.table.client import Change, Changes
    from headrace.typed import Topic, Typed
    from headrace_protocol.bodies import MessageQueue

Client_co = TypeVar("Client_co", covariant=True)
Result = TypeVar("Result")
Value = TypeVar("Value")
P = ParamSpec("P")
Item = TypeVar("Item", ReceivedMessage, MessageBatch)
Received = TypeVar("Received", bound=ReceivedMessage)

_MESSAGES_PER_CALL = 1000


class _OfProducer(Blocking[Client_co]):
    """A block within that of a producer; runs on the producer's event loop."""

    def __init__(self, client: Client_co, producer: Producer) -> None:
        super().__init__(client)
        self._producer = producer

    def __enter__(self) -> Self:
        portal = self._producer._open_portal()
        self._check_thread(portal)
        self._enter_client(portal)
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

    send = awaited(AsyncPipeline.send)
    flush = awaited(AsyncPipeline.flush)

    def send_all(self, messages: Iterable[Message]) -> None:
        """Send many messages, a thousand per call to the event loop."""
        remaining = iter(messages)
        while chunk := list(islice(remaining, _MESSAGES_PER_CALL)):
            self._call(self._client.send_all, chunk)


class Transaction(_OfProducer[AsyncTransaction]):
    """See ``headrace.producer.transaction.Transaction``; runs on its producer's event loop."""

    send = awaited(AsyncTransaction.send)


class Producer(Blocking[AsyncProducer]):
    """See ``headrace.Producer``."""

    @like(AsyncProducer)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(AsyncProducer(*args, **kwargs))

    @property
    def group(self) -> str:
        """Name under which brokers know this kind of producer."""
        return self._client.group

    send = awaited(AsyncProducer.send)
    send_many = awaited(AsyncProducer.send_many)
    send_oneway = awaited(AsyncProducer.send_oneway)
    request = awaited(AsyncProducer.request)

    @property
    def late_replies(self) -> int:
        """See ``headrace.Producer.late_replies``."""
        return self._client.late_replies

    recall = awaited(AsyncProducer.recall)
    queues = awaited(AsyncProducer.queues)
    _pipeline = on_loop(AsyncProducer.pipeline)
    _transaction = on_loop(AsyncProducer.transaction)

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


class PullConsumer(Blocking[AsyncPullConsumer]):
    """See ``headrace.PullConsumer``."""

    @like(AsyncPullConsumer)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(AsyncPullConsumer(*args, **kwargs))

    @property
    def group(self) -> str | None:
        """The group whose progress ``committed`` reads and ``commit`` stores."""
        return self._client.group

    queues = awaited(AsyncPullConsumer.queues)
    missing = awaited(AsyncPullConsumer.missing)
    assign = awaited(AsyncPullConsumer.assign)
    seek = on_loop(AsyncPullConsumer.seek)
    seek_to = awaited(AsyncPullConsumer.seek_to)
    position = on_loop(AsyncPullConsumer.position)
    failures = on_loop(AsyncPullConsumer.failures)
    receive_many = awaited(AsyncPullConsumer.receive_many)
    commit = awaited(AsyncPullConsumer.commit)
    committed = awaited(AsyncPullConsumer.committed)
    min_offset = awaited(AsyncPullConsumer.min_offset)
    max_offset = awaited(AsyncPullConsumer.max_offset)
    offset_at = awaited(AsyncPullConsumer.offset_at)


class _Consumer(AsyncConsumer):
    # Each call is a separate task, but all those of a thread act for it.
    _current_user = calling_thread.get


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

    def reply(self, message: ReceivedMessage, body: bytes) -> _Done:
        self._client._call(self._returns.reply, message, body)
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
        from headrace.processing import process_each

        return process_each(items, tracing, self.group)

    return iterate


def _values(messages: Iterable[Received], typed: Typed) -> Iterator[tuple[Any, Received]]:
    """Values with their messages, less those that are none."""
    for message in messages:
        try:
            value = typed.read(message)
        except InvalidValue as error:
            typed.settle(error, message)
        else:
            yield value, message


class Consumer(Blocking[AsyncConsumer]):
    """See ``headrace.Consumer``; iterate over it with ``for``.

    on_assigned, on_revoked: plain functions, called in a thread, so they may call this client.
    """

    @like(AsyncConsumer)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_plain_callback("on_bad", kwargs.get("on_bad"))
        for name in ("on_assigned", "on_revoked"):
            if callback := kwargs.get(name):
                check_plain_callback(name, callback)
                kwargs[name] = partial(anyio.to_thread.run_sync, callback)
        client = _Consumer(*args, **kwargs)
        super().__init__(client)
        if client._inbox.returns is not None:
            client._inbox.returns = _BlockingReturns(client._inbox.returns, self)
        if isinstance(client._assignment, PoppedShare):
            polls = client._assignment.polls
            polls.given = _BlockingLeases(polls.given, self)

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

    failures = on_loop(AsyncConsumer.failures)
    pause = on_loop(AsyncConsumer.pause)
    resume = on_loop(AsyncConsumer.resume)
    seek = on_loop(AsyncConsumer.seek)
    commit = awaited(AsyncConsumer.commit)
    receive = awaited(AsyncConsumer.receive)
    _messages = on_loop(AsyncConsumer._messages)
    _batches = on_loop(AsyncConsumer._batches)

    @_in_spans
    def __iter__(self) -> Iterator[ReceivedMessage]:
        messages = self._messages()
        for _ in self._steps(messages.wait_for_some):
            yield from messages.take_ready()

    def values(self) -> Iterator[tuple[Any, ReceivedMessage]]:
        """See ``headrace.Consumer.values``; ``on_bad`` is called in this thread."""
        return _values(self, self._client._typed)

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


class _BlockingLeases:
    """Settles messages by calls that block."""

    def __init__(self, leases: Leases, client: Blocking[Any]) -> None:
        self._leases = leases
        self._client = client

    def ack(self, message: PoppedMessage) -> _Done:
        return self._done(self._leases.ack, message)

    def extend(self, message: PoppedMessage, seconds: float) -> _Done:
        return self._done(self._leases.extend, message, seconds)

    def retry(self, message: PoppedMessage, after: float | None) -> _Done:
        return self._done(self._leases.retry, message, after)

    def reject(self, message: PoppedMessage) -> _Done:
        return self._done(self._leases.reject, message)

    def reply(self, message: PoppedMessage, body: bytes) -> _Done:
        return self._done(self._leases.reply, message, body)

    def _done(
        self, function: Callable[P, Awaitable[None]], *args: P.args, **kwargs: P.kwargs
    ) -> _Done:
        self._client._call(function, *args, **kwargs)
        return _Done()


class SimpleConsumer(Blocking[AsyncSimpleConsumer]):
    """See ``headrace.SimpleConsumer``."""

    @like(AsyncSimpleConsumer)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_plain_callback("on_bad", kwargs.get("on_bad"))
        client = AsyncSimpleConsumer(*args, **kwargs)
        super().__init__(client)
        client._polls.given = _BlockingLeases(client._polls.given, self)

    @property
    def group(self) -> str:
        """The group that this consumer is a member of."""
        return self._client.group

    receive = awaited(AsyncSimpleConsumer.receive)
    ack = awaited(AsyncSimpleConsumer.ack)

    def receive_values(
        self,
        *,
        max: int = 32,  # noqa: A002 - as ``receive``
        wait: float = 20,
        invisible: float = 30,
    ) -> list[tuple[Any, PoppedMessage]]:
        """See ``headrace.SimpleConsumer.receive_values``; calls ``on_bad`` in this thread."""
        messages = self.receive(max=max, wait=wait, invisible=invisible)
        return [*_values(messages, self._client._typed)]


class Table(Blocking[AsyncTable[Value]], Generic[Value]):
    """See ``headrace.Table``."""

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
        **how: Unpack[ConnectOptions],
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


class Admin(Blocking[AsyncAdmin]):
    """See ``headrace.Admin``."""

    @like(AsyncAdmin)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(AsyncAdmin(*args, **kwargs))

    cluster = awaited(AsyncAdmin.cluster)
    departed_brokers = awaited(AsyncAdmin.departed_brokers)
    forget_broker = awaited(AsyncAdmin.forget_broker)
    runtime_info = awaited(AsyncAdmin.runtime_info)
    broker_config = awaited(AsyncAdmin.broker_config)
    update_broker_config = awaited(AsyncAdmin.update_broker_config)
    create_topic = awaited(AsyncAdmin.create_topic)
    alter_topic = awaited(AsyncAdmin.alter_topic)
    require_everywhere = awaited(AsyncAdmin.require_everywhere)
    compact_topic = awaited(AsyncAdmin.compact_topic)
    rebuild_topic = awaited(AsyncAdmin.rebuild_topic)
    purge_topic = awaited(AsyncAdmin.purge_topic)
    delete_topic = awaited(AsyncAdmin.delete_topic)
    topics = awaited(AsyncAdmin.topics)
    topic = awaited(AsyncAdmin.topic)
    topic_totals = awaited(AsyncAdmin.topic_totals)
    topic_stats = awaited(AsyncAdmin.topic_stats)
    is_static = awaited(AsyncAdmin.is_static)
    static_topics = awaited(AsyncAdmin.static_topics)
    becomes_static = awaited(AsyncAdmin.becomes_static)
    read_static_topic = awaited(AsyncAdmin.read_static_topic)
    static_leaders = awaited(AsyncAdmin.static_leaders)
    create_static_topic = awaited(AsyncAdmin.create_static_topic)
    remap_static_topic = awaited(AsyncAdmin.remap_static_topic)
    rebalance_static_topic = awaited(AsyncAdmin.rebalance_static_topic)
    repair_static_topic = awaited(AsyncAdmin.repair_static_topic)
    queue_parts = awaited(AsyncAdmin.queue_parts)
    logic_queues = awaited(AsyncAdmin.logic_queues)
    create_group = awaited(AsyncAdmin.create_group)
    delete_group = awaited(AsyncAdmin.delete_group)
    groups = awaited(AsyncAdmin.groups)
    group = awaited(AsyncAdmin.group)
    topic_groups = awaited(AsyncAdmin.topic_groups)
    lag = awaited(AsyncAdmin.lag)
    reset_offsets = awaited(AsyncAdmin.reset_offsets)
    reset_queue = awaited(AsyncAdmin.reset_queue)
    clone_offsets = awaited(AsyncAdmin.clone_offsets)
    members = awaited(AsyncAdmin.members)
    running_info = awaited(AsyncAdmin.running_info)
    member_reports = awaited(AsyncAdmin.member_reports)
    group_queues = awaited(AsyncAdmin.group_queues)
    timers = awaited(AsyncAdmin.timers)
    timer_counts = awaited(AsyncAdmin.timer_counts)
    cancel_timer = awaited(AsyncAdmin.cancel_timer)
    tier_status = awaited(AsyncAdmin.tier_status)
    tier_resume = awaited(AsyncAdmin.tier_resume)
    tier_forget = awaited(AsyncAdmin.tier_forget)
    set_quota = awaited(AsyncAdmin.set_quota)
    quotas = awaited(AsyncAdmin.quotas)
    transactions = awaited(AsyncAdmin.transactions)
    discarded_transactions = awaited(AsyncAdmin.discarded_transactions)
    resume_transaction = awaited(AsyncAdmin.resume_transaction)
    query_by_key = awaited(AsyncAdmin.query_by_key)
    query_by_id = awaited(AsyncAdmin.query_by_id)
    queued = awaited(AsyncAdmin.queued)
    trace = awaited(AsyncAdmin.trace)
    resend = awaited(AsyncAdmin.resend)
    message = awaited(AsyncAdmin.message)
    keepers = awaited(AsyncAdmin.keepers)
    users = awaited(AsyncAdmin.users)
    create_user = awaited(AsyncAdmin.create_user)
    update_user = awaited(AsyncAdmin.update_user)
    delete_user = awaited(AsyncAdmin.delete_user)
    rules = awaited(AsyncAdmin.rules)
    set_rules = awaited(AsyncAdmin.set_rules)
    remove_rules = awaited(AsyncAdmin.remove_rules)
