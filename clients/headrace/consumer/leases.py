"""Ends of messages that are out: acks, which share requests, and all others."""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

import anyio

from headrace.delays import LEVELS_S
from headrace.errors import BrokerError, ClientClosed, ConfigurationError, HeadraceError
from headrace.replies import reply
from headrace.sent_back import DEAD_LETTERS, send_back
from headrace.settlement import Settlement
from headrace.tasks import gather
from headrace.values import plain_number
from headrace_protocol.codes import RequestCode
from headrace_protocol.pop.batch_ack import BatchAck, BatchAckBody
from headrace_protocol.pop.headers import (
    AckMessageHeader,
    ChangeInvisibleTimeHeader,
    ChangeInvisibleTimeResponseHeader,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from anyio.abc import TaskGroup

    from headrace.instance import ClientInstance
    from headrace.popped import PoppedMessage
    from headrace_protocol.pop.handle import Handle

LONGEST_S: Final = 43_200.0
_ACKS_MAX: Final = 1024
# Messages that this client took, but nobody has seen, come again at once.
_GIVEN_BACK_MS: Final = 1000
# The delay after the first delivery is that of level 3, as in RocketMQ's other retries.
_FIRST_LEVEL: Final = 2


class _Batch:
    """Acks for one broker that leave together.

    outcomes: by message, its error or None; without one the client was closed before the answer.
    """

    def __init__(self, client: str) -> None:
        self._client = client
        self.messages: dict[int, PoppedMessage] = {}
        self.outcomes: dict[int, HeadraceError | None] = {}
        self.done = anyio.Event()

    def error_of(self, message: PoppedMessage) -> HeadraceError | None:
        """The error of a message once ``done`` is set."""
        return self.outcomes.get(id(message), ClientClosed(self._client))


class MemberLeases:
    """Settles the messages of one member of a group; see PoppedMessage.

    Acks leave at once if none of that broker is under way, or else together when it is answered.
    client: name of the consumer's class, for errors.
    """

    def __init__(self, instance: ClientInstance, group: str, client: str) -> None:
        self.client = client
        self._instance = instance
        self._group = group
        self._tasks: TaskGroup | None = None
        self._waiting: dict[str, _Batch] = {}
        self._sending: set[str] = set()
        self._under_way: dict[_Batch, None] = {}

    def open(self, tasks: TaskGroup) -> None:
        """Begin to send acks, in tasks of the client."""
        self._tasks = tasks

    async def close(self) -> None:
        """Wait until all acks are answered; if cancelled, those that wait fail."""
        try:
            while batches := [*self._under_way, *self._waiting.values()]:
                await batches[0].done.wait()
        finally:
            for batch in self._waiting.values():
                batch.done.set()
            self._waiting.clear()

    @contextmanager
    def _settling(self, how: str, messages: Sequence[PoppedMessage]) -> Iterator[None]:
        """Have the block observed as an end, or a longer time, of messages."""
        tracing = self._instance.tracing
        if tracing is None:
            yield
            return
        started_ns, error = time.time_ns(), None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            tracing.settled(Settlement(how, messages, self._group, started_ns, error))

    def _returned(self, message: PoppedMessage) -> None:
        if self._instance.traces:
            self._instance.traces.returned(message)
        _end_processing([message])

    # -- acks --------------------------------------------------------------------------------------

    async def ack(self, message: PoppedMessage) -> None:
        """See ``PoppedMessage.ack``."""
        await self.ack_all([message])

    async def ack_all(self, messages: Sequence[PoppedMessage]) -> None:
        """Acknowledge messages. Raises the error of the first that failed."""
        self._instance.check_open(self.client)
        with self._settling("ack", messages):
            await self._acked(messages)
        _end_processing(messages)

    async def _acked(self, messages: Sequence[PoppedMessage]) -> None:
        batches = {name: self._join(name, part) for name, part in by_broker(messages).items()}
        for batch in batches.values():
            await batch.done.wait()
        for message in messages:
            if error := batches[message.queue.broker_name].error_of(message):
                raise error

    def _join(self, broker_name: str, messages: list[PoppedMessage]) -> _Batch:
        batch = self._waiting.setdefault(broker_name, _Batch(self.client))
        batch.messages |= {id(message): message for message in messages}
        if broker_name not in self._sending:
            assert self._tasks is not None
            self._sending.add(broker_name)
            self._tasks.start_soon(self._send_waiting, broker_name)
        return batch

    async def _send_waiting(self, broker_name: str) -> None:
        try:
            while batch := self._waiting.pop(broker_name, None):
                self._under_way[batch] = None
                try:
                    await self._send(broker_name, batch)
                finally:
                    del self._under_way[batch]
                    batch.done.set()
        finally:
            self._sending.discard(broker_name)

    async def _send(self, broker_name: str, batch: _Batch) -> None:
        messages = [*batch.messages.values()]
        for start in range(0, len(messages), _ACKS_MAX):
            part = messages[start : start + _ACKS_MAX]
            outcomes = await self._outcomes(broker_name, part)
            batch.outcomes |= zip(map(id, part), outcomes, strict=True)

    async def _outcomes(
        self, broker_name: str, messages: list[PoppedMessage]
    ) -> list[HeadraceError | None]:
        """The error of each message, after one request if the broker takes all of them."""
        if len(messages) > 1:
            try:
                await self._ack_together(broker_name, messages)
            except BrokerError:
                # It does not say which one it rejects, or knows no batches.
                pass
            except HeadraceError as error:
                return [error] * len(messages)
            else:
                return [None] * len(messages)
        return await gather(self._ack_alone, messages)

    async def _ack_together(self, broker_name: str, messages: list[PoppedMessage]) -> None:
        alike: defaultdict[tuple[str, Handle], list[int]] = defaultdict(list)
        for message in messages:
            handle = _handle(message)
            alike[message.topic, handle._replace(queue_offset=None)].append(message.queue_offset)
        acks = [
            BatchAck.of(topic, self._group, handle, offsets)
            for (topic, handle), offsets in alike.items()
        ]
        body = BatchAckBody(acks=acks, broker_name=broker_name).encode(strict=True)
        address = await self._instance.broker_address(messages[0].topic, broker_name)
        response = await self._instance.request(address, RequestCode.BATCH_ACK_MESSAGE, None, body)
        response.expect()

    async def _ack_alone(self, message: PoppedMessage) -> None:
        header = AckMessageHeader(
            topic=message.queue.topic,
            queue_id=message.queue.queue_id,
            bname=message.queue.broker_name,
            consumer_group=self._group,
            extra_info=_handle(message).text(),
            offset=message.queue_offset,
        )
        address = await self._instance.broker_address(message.topic, message.queue.broker_name)
        response = await self._instance.request(address, RequestCode.ACK_MESSAGE, header)
        response.expect()

    # -- others ------------------------------------------------------------------------------------

    async def extend(self, message: PoppedMessage, seconds: float) -> None:
        """See ``PoppedMessage.extend``."""
        self._instance.check_open(self.client)
        invisible_ms = milliseconds("seconds", seconds)
        with self._settling("extend", [message]):
            await self._change(message, invisible_ms)

    async def retry(self, message: PoppedMessage, after: float | None) -> None:
        """See ``PoppedMessage.retry``."""
        self._instance.check_open(self.client)
        if after is None:
            level = min(_FIRST_LEVEL + max(0, message.reconsume_times), len(LEVELS_S) - 1)
            after = LEVELS_S[level]
        invisible_ms = milliseconds("after", after)
        with self._settling("retry", [message]):
            await self._change(message, invisible_ms)
        self._returned(message)

    async def reject(self, message: PoppedMessage) -> None:
        """See ``PoppedMessage.reject``."""
        self._instance.check_open(self.client)
        with self._settling("reject", [message]):
            broker_name = message.queue.broker_name
            address = await self._instance.broker_address(message.topic, broker_name)
            await send_back(self._instance, address, self._group, message, DEAD_LETTERS)
            await self._acked([message])
        self._returned(message)

    async def reply(self, message: PoppedMessage, body: bytes) -> None:
        """See ``PoppedMessage.reply``."""
        self._instance.check_open(self.client)
        await reply(self._instance, self._group, message, body)

    async def try_ack(self, messages: Sequence[PoppedMessage]) -> None:
        """Acknowledge messages that nobody asked for; if that fails they come again."""
        with suppress(HeadraceError):
            await self._acked(messages)

    async def give_back(self, messages: Sequence[PoppedMessage]) -> None:
        """Return messages that nobody has seen, as far as their brokers answer."""

        async def give_back(message: PoppedMessage) -> None:
            await self._change(message, _GIVEN_BACK_MS, suspend=True)

        await gather(give_back, messages)

    async def _change(
        self, message: PoppedMessage, invisible_ms: int, *, suspend: bool = False
    ) -> None:
        handle, queue = _handle(message), message.queue
        header = ChangeInvisibleTimeHeader(
            topic=queue.topic,
            queue_id=queue.queue_id,
            bname=queue.broker_name,
            consumer_group=self._group,
            extra_info=handle.text(),
            offset=message.queue_offset,
            invisible_time=invisible_ms,
            suspend=suspend or None,
        )
        address = await self._instance.broker_address(message.topic, queue.broker_name)
        response = await self._instance.request(
            address, RequestCode.CHANGE_MESSAGE_INVISIBLETIME, header
        )
        changed = response.expect().header(ChangeInvisibleTimeResponseHeader)
        message.handle = handle._replace(
            start_offset=message.queue_offset,
            pop_time=changed.pop_time,
            invisible_time=changed.invisible_time,
            revive_queue_id=changed.revive_qid,
        )


def by_broker(messages: Iterable[PoppedMessage]) -> dict[str, list[PoppedMessage]]:
    """The messages of each broker."""
    brokers: dict[str, list[PoppedMessage]] = {}
    for message in messages:
        brokers.setdefault(message.queue.broker_name, []).append(message)
    return brokers


def _end_processing(messages: Sequence[PoppedMessage]) -> None:
    for message in messages:
        if message.processing is not None:
            message.processing.end()


def _handle(message: PoppedMessage) -> Handle:
    assert message.handle is not None
    return message.handle


def milliseconds(name: str, seconds: float) -> int:
    """A time for which messages are out. Raises ConfigurationError."""
    plain = plain_number(seconds, name, ConfigurationError)
    if not 0 < plain <= LONGEST_S:
        raise ConfigurationError(
            f"{name}={plain:g}: must be more than 0, and at most {LONGEST_S:g} seconds"
        )
    return max(1, round(plain * 1000))
