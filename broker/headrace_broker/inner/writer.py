"""Appends messages that the broker writes itself, as many in one turn as are due."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, Final, NamedTuple

import trio

from headrace_broker.store.errors import RecordTooLarge, StoreBusy, StoreNotWritable
from headrace_protocol.message_ids import decode_host

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_broker.inner.waiting import WaitingQueue
    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.store.store_queue import StoreQueue
    from headrace_daemon.host_log import HostLog
    from headrace_protocol.columns import Buffer

_SLICE_S: Final = 0.002
# Between two tries while the store refuses appends; it looks for room as often.
RETRY_S: Final = 1.0
_PUBLISH_LOOK_S: Final = 0.01


class InnerMessage(NamedTuple):
    """One record to append; the fields from ``body`` on are those of ``PlainMessage``, then others.

    topic, queue_id: where it goes; the queue is looked up when it is appended.
    on_appended: called then.
    """

    topic: str
    queue_id: int
    body: Buffer
    properties: bytes
    tags_code: int
    flag: int
    sys_flag: int
    born_timestamp: int
    reconsume_times: int
    born_host: bytes
    prepared_transaction_offset: int = 0
    on_appended: Callable[[], None] | None = None

    @property
    def client(self) -> str:
        """The client that sent the message first, "host:port"."""
        host, port = decode_host(self.born_host)
        return f"{host}:{port}"


class DeliverLater(Exception):
    """Another broker can't take a message now."""


# Delivers a message to another broker; returns why that refuses it, "" if it has it. Raises
# DeliverLater.
Deliver = Callable[[InnerMessage], Awaitable[str]]
# Where a message of a topic and queue goes: a queue of this broker, or another broker.
FindTarget = Callable[[str, int], int | Deliver]
# What is stored here instead of a message that another broker refuses, and why it does.
Redirect = Callable[[InnerMessage, str], InnerMessage]


class InnerWriter:
    """The one way into the log for services; it waits where a client would be refused.

    on_stored: called for each record with its topic, 1, and the bytes of its body.
    find_target: where a message goes; set once, before the first.
    """

    find_target: FindTarget

    def __init__(
        self,
        store: MessageStore,
        on_stored: Callable[[str, int, int], None],
        host_log: HostLog,
        redirect: Redirect,
    ) -> None:
        self._store = store
        self._write_path = store.write_path
        self._on_stored = on_stored
        self._host_log = host_log
        self._redirect = redirect

    async def append(
        self, messages: Sequence[InnerMessage], note: Callable[[int, int], None]
    ) -> None:
        """Append all messages in order, in slices of 2 ms, and publish them.

        note: called with the number of each message and its physical offset as soon as it is
        appended. From then on the record reaches the log even if this call is cancelled, so a
        caller that repeats itself leaves it out. The offset is -1 for a message that is too large
        to be stored, which is logged, and for one that another broker has stored.

        While the disk is full, a taker is behind or another broker away, this waits and retries.
        """
        done = 0
        while done < len(messages):
            message = messages[done]
            target = self.find_target(message.topic, message.queue_id)
            try:
                if not isinstance(target, int):
                    reason = await target(message)
                    if reason:
                        await self.append([self._redirect(message, reason)], lambda *_: None)
                    note(done, -1)
                    done += 1
                    continue
                if self._write_path.pressure():
                    await self._write_path.wait_for_room()
                done = self._append_slice(messages, done, note)
            except (StoreBusy, StoreNotWritable, DeliverLater):
                await trio.sleep(RETRY_S)
            else:
                await trio.lowlevel.checkpoint()

    def _append_slice(
        self,
        messages: Sequence[InnerMessage],
        start: int,
        note: Callable[[int, int], None],
    ) -> int:
        """Append from number ``start`` on for 2 ms; returns the number of the next message.

        Raises StoreBusy, StoreNotWritable when not even the first can be appended.
        """
        self._write_path.begin()
        end_s = perf_counter() + _SLICE_S
        done = start
        queues: dict[tuple[str, int], StoreQueue] = {}
        try:
            while done < len(messages) and (done == start or perf_counter() < end_s):
                message = messages[done]
                name = message.topic, message.queue_id
                queue = queues.get(name)
                if queue is None:
                    queue_id = self.find_target(*name)
                    if not isinstance(queue_id, int):
                        break
                    queue = queues[name] = self._store.queue(message.topic, queue_id)
                physical_offset = self._append_one(message, queue)
                done += 1
                note(done - 1, physical_offset)
        except (StoreBusy, StoreNotWritable):
            if done == start:
                raise
        finally:
            # What can't be written now stays pending, and a later commit writes it.
            with suppress(StoreNotWritable):
                self._write_path.publish()
        return done

    def _append_one(self, message: InnerMessage, queue: StoreQueue) -> int:
        """Append a message; its physical offset, -1 if it is too large."""
        try:
            return self._append_to(queue, message)
        except RecordTooLarge as error:
            self._host_log.error(
                message.client, "message can't be stored", topic=message.topic, reason=str(error)
            )
            return -1

    def append_now(self, message: InnerMessage) -> int:
        """Append a message for this broker in the current turn; returns its physical offset.

        Raises StoreError.
        """
        queue_id = self.find_target(message.topic, message.queue_id)
        assert isinstance(queue_id, int)
        return self._append_to(self._store.queue(message.topic, queue_id), message)

    def _append_to(self, queue: StoreQueue, message: InnerMessage) -> int:
        physical_offset = self._write_path.append(
            (queue, *message[2:9]), message.born_host, message.prepared_transaction_offset
        )
        self._on_stored(message.topic, 1, len(message.body))
        if message.on_appended is not None:
            message.on_appended()
        return physical_offset

    async def published(self, *queues: WaitingQueue) -> None:
        """Wait until all messages that these queues have now can be read."""
        ends = [queue.appended_end for queue in queues]
        while any(queue.end < end for queue, end in zip(queues, ends, strict=True)):
            try:
                await self._write_path.wait_confirmed()
                self._write_path.publish()
            except StoreNotWritable:
                await trio.sleep(RETRY_S)
            else:
                await trio.sleep(_PUBLISH_LOOK_S)
