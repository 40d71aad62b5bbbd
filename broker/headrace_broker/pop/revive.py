"""Messages that were not acknowledged in time become visible again, or end as dead letters.

Each is stored once more, in the retry topic of its group and topic. The log of pops names that
record's end before the record is written, and a start believes it as far as the CommitLog goes. So
a kill at any moment leaves a message either out or stored again, never both.
"""

from __future__ import annotations

import math
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog
import trio

from headrace_broker.inner.waiting import when_ready
from headrace_broker.inner.writer import RETRY_S, InnerMessage
from headrace_broker.persistence import save_ended
from headrace_broker.pop.pop_log import PopsNotWritable
from headrace_broker.pop.pop_queue import OrderedBatch, Origin
from headrace_broker.pop.recovery import SOURCE
from headrace_broker.queue_directory import Use
from headrace_broker.store.errors import RecordTooLarge, StoreBusy, StoreError, StoreNotWritable
from headrace_broker.store.log.record_checksum import without_checksum
from headrace_broker.store.store_source import GetStatus
from headrace_protocol.errors import CorruptRecord, RequestError
from headrace_protocol.inner_batch import unwrap_messages
from headrace_protocol.java_hash import tags_code_of
from headrace_protocol.message import (
    INNER_BATCH,
    ORIGIN_MESSAGE_ID,
    RETRY_TOPIC,
    decode_records,
    with_properties,
)
from headrace_protocol.pop.handle import (
    FIRST_POP_PROPERTY,
    HANDLE_PROPERTY,
    TopicKind,
    original_topic,
)
from headrace_protocol.system_topics import DLQ_PREFIX, RETRY_PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_broker.config import BrokerConfig
    from headrace_broker.consumer.long_polling import LongPolling
    from headrace_broker.core import Tables
    from headrace_broker.inner.writer import InnerWriter
    from headrace_broker.pop.pop_queue import Checkpoint, PopQueue
    from headrace_broker.pop.pops import Pops
    from headrace_broker.pop.progress import PopProgress
    from headrace_broker.pop.threshold import Threshold
    from headrace_broker.queue_directory import QueueDirectory
    from headrace_broker.store.message_store import MessageStore
    from headrace_protocol.bodies import TopicConfig
    from headrace_protocol.message import StoredMessage

log = structlog.get_logger("headrace.broker")

# Pauses after failures, the peer's.
_MINUTES: Final = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30, 60, 120)
_PAUSES_S: Final = (10, 20, 30, *(60 * minutes for minutes in _MINUTES))
# The wall clock may jump.
_LOOK_S: Final = 1.0
_TIMES_MAX: Final = 2**31 - 1


class _Again(NamedTuple):
    """A message to be stored, and the bit of the one that is out.

    Apache's broker hands out the record of a batch queue as one message. What it holds is stored
    singly, and the last of it stands for the whole: a kill before that repeats it.
    """

    bit: int
    message: InnerMessage
    is_last: bool


class Revive:
    """Stores again what is due. revived, buried: counts since the start. given_up: never stored."""

    def __init__(
        self,
        config: BrokerConfig,
        store: MessageStore,
        tables: Tables,
        directory: QueueDirectory,
        writer: InnerWriter,
        pops: Pops,
        progress: PopProgress,
        long_polling: LongPolling,
        threshold: Threshold,
    ) -> None:
        self._config = config
        self._store = store
        self._topics, _, self._groups, _ = tables
        self._directory = directory
        self._writer = writer
        self._pops = pops
        self._progress = progress
        self._long_polling = long_polling
        self._threshold = threshold
        self._asked = trio.Event()
        pops.due.on_earlier = self._ask
        self.revived = self.buried = self.given_up = 0

    def _ask(self) -> None:
        self._asked.set()

    async def run(self) -> None:
        """Revive until cancelled."""
        while True:
            self._asked = trio.Event()
            await self.revive_due()
            with trio.move_on_after(self._pause_s()):
                await self._asked.wait()

    def _pause_s(self) -> float:
        due_ms = self._pops.due.next_ms
        if due_ms is None:
            return math.inf
        return min(max(due_ms - self._store.clock.now_ms(), 0) / 1000, _LOOK_S)

    async def revive_due(self) -> None:
        """Store again what is due now, and retry requests at queues that were full."""
        for queue in self._threshold.resumed():
            self._wake(queue)
        due = self._pops.due.take(self._store.clock.now_ms())
        # What a failure or a cancellation leaves is due again.
        rest = dict.fromkeys(due)
        try:
            for checkpoint in due:
                await self._revive(checkpoint)
                del rest[checkpoint]
        finally:
            for checkpoint in rest:
                if not checkpoint.is_done:
                    self._pops.due.add(checkpoint, checkpoint.due_ms)

    async def _revive(self, checkpoint: Checkpoint) -> None:
        if isinstance(checkpoint, OrderedBatch):
            # Its lock has ended: its messages come again in place.
            self._wake(checkpoint.queue)
            return
        topics_before = self._topics.change_count
        messages, problem = await self._to_store(checkpoint)
        while messages:
            try:
                self._append(checkpoint, messages)
            except (StoreBusy, StoreNotWritable, PopsNotWritable):
                await trio.sleep(RETRY_S)
            except StoreError as error:
                problem = error
                break
            else:
                await trio.lowlevel.checkpoint()
        if self._topics.change_count != topics_before:
            # Requests that wait for the topic must wait for its new retry topic too.
            self._long_polling.arrived(self._store.queues_of(checkpoint.queue.name.topic))
        if problem is not None and not checkpoint.is_done:
            self._note_failure(checkpoint, problem)

    def _wake(self, popped: PopQueue) -> None:
        """Retry the requests that wait at a queue."""
        _, topic, queue_id = popped.name
        if (queue := self._store.find_queue(topic, queue_id)) is not None:
            self._long_polling.arrived([queue])

    def _note_failure(self, checkpoint: Checkpoint, error: Exception) -> None:
        checkpoint.failures += 1
        group, topic, queue_id = checkpoint.queue.name
        where = {"group": group, "topic": topic, "queue_id": queue_id, "reason": str(error)}
        if checkpoint.failures < self._config.pop_revive_max_attempt_times:
            pause_s = _PAUSES_S[min(checkpoint.failures, len(_PAUSES_S)) - 1]
            log.warning("messages to retry not stored yet", retry_s=pause_s, **where)
            self._pops.due.add(checkpoint, self._store.clock.now_ms() + 1000 * pause_s)
            return
        offsets = [offset for offset, _ in checkpoint.out()]
        log.error("messages to retry given up", queue_offsets=offsets, **where)
        self.given_up += len(offsets)
        self._settle(checkpoint, checkpoint.bits)

    def _settle(self, checkpoint: Checkpoint, bits: int) -> None:
        self._pops.settle(checkpoint, bits)
        self._progress.end_turn()

    # -- one checkpoint ----------------------------------------------------------------------------

    async def _to_store(self, checkpoint: Checkpoint) -> tuple[list[_Again], Exception | None]:
        """What is to be stored of the messages that are out, and why the others can't be."""
        messages: list[_Again] = []
        problem: Exception | None = None
        for offset, bit in list(checkpoint.out()):
            try:
                message = await when_ready(partial(self._read, checkpoint, offset))
                if message is None:
                    self._settle(checkpoint, bit)
                    continue
                topic = await self._target(checkpoint, message)
                parts = unwrap_messages([message])
            except (RequestError, OSError, StoreError, CorruptRecord) as error:
                problem = error
            else:
                for part in parts:
                    is_last = part is parts[-1]
                    again = self._again(checkpoint, part, topic, is_last=is_last)
                    messages.append(_Again(bit, again, is_last))
        return messages, problem

    def _append(self, checkpoint: Checkpoint, messages: list[_Again]) -> None:
        """Store what is still out, and remove it from ``messages``.

        Nothing happens between the look at what is out and the write. Raises StoreBusy,
        StoreNotWritable, PopsNotWritable while the disk takes no more.
        """
        self._progress.log.check_room()
        write_path = self._store.write_path
        if write_path.pressure():
            write_path.publish()
        write_path.begin()
        try:
            while messages:
                if checkpoint.bits & messages[0].bit:
                    self._append_one(checkpoint, messages[0])
                del messages[0]
        finally:
            self._progress.end_turn()
            with suppress(StoreNotWritable):  # it stays pending, and a later commit writes it
                write_path.publish()

    def _append_one(self, checkpoint: Checkpoint, again: _Again) -> None:
        bit, message, is_last = again
        try:
            self._writer.append_now(message)
        except RecordTooLarge as error:
            log.error("message to retry can't be stored", topic=message.topic, reason=str(error))
            self.given_up += 1
            if is_last:
                self._pops.settle(checkpoint, bit)
            return
        if is_last:
            self._pops.revive(checkpoint, bit, self._store.commit_log.max_offset)
        if message.topic.startswith(RETRY_PREFIX):
            self.revived += 1
        else:
            self.buried += 1

    def _read(self, checkpoint: Checkpoint, offset: int) -> StoredMessage | None:
        """A message that is out; None if the store has it no more.

        Raises NotReady, CorruptRecord.
        """
        _, topic, queue_id = checkpoint.queue.name
        place = self._directory.find(topic, queue_id, Use.INSPECT)
        if place is None:
            return None
        result = place.source.get(offset, 1, 1, None)
        if result.status is not GetStatus.FOUND:
            return None
        (message,) = decode_records(b"".join(result.buffers))
        # A topic of the same name may have been made later.
        made_at = self._topics.incarnations.created_at(topic)
        is_it = made_at <= checkpoint.physical_offset <= message.physical_offset
        return message if is_it and message.queue_offset == offset else None

    async def _target(self, checkpoint: Checkpoint, message: StoredMessage) -> str:
        """The topic that gets a message, made if it is missing. Raises RequestError, OSError."""
        group, topic, _ = checkpoint.queue.name
        config = self._groups.get(group)
        is_last = config is not None and message.reconsume_times >= config.retry_max_times
        if is_last and checkpoint.origin is not Origin.SUSPENDED:
            return await self._made(self._topics.create_dlq_topic, DLQ_PREFIX, group)
        name = topic
        if message.sys_flag & INNER_BATCH:
            name = group  # where its pulls find it: no POP reads the retries of such a topic
        elif not topic.startswith(RETRY_PREFIX):
            is_v2 = self._config.enable_retry_topic_v2
            name = (TopicKind.RETRY_V2 if is_v2 else TopicKind.RETRY_V1).topic(topic, group)
        name = name.removeprefix(RETRY_PREFIX)
        return await self._made(self._topics.create_retry_topic, RETRY_PREFIX, name)

    async def _made(self, create: Callable[[str], TopicConfig], prefix: str, name: str) -> str:
        topic = prefix + name
        if self._topics.get(topic) is None:
            create(name)
        # Its messages would be nobody's without it.
        await self._save_topics()
        self._topics.check_deliverable(self._topics.expect(topic))
        return topic

    async def _save_topics(self) -> None:
        """Wait until topics are saved; an earlier save may have failed. Raises OSError."""
        if (problem := await save_ended(self._topics.when_saved)) is not None:
            raise OSError(f"the topic for retries is not saved: {problem}")

    def _again(
        self, checkpoint: Checkpoint, message: StoredMessage, topic: str, *, is_last: bool
    ) -> InnerMessage:
        """The message as its retry topic gets it, or that of dead letters."""
        properties = message.properties
        more = {SOURCE: b"%d" % message.physical_offset} if is_last else {}
        if FIRST_POP_PROPERTY not in properties:
            more[FIRST_POP_PROPERTY.encode()] = b"%d" % checkpoint.pop_time
        name = checkpoint.queue.name
        if topic in {DLQ_PREFIX + name.group, _retries_of_pulls(checkpoint)}:
            first = {
                RETRY_TOPIC: original_topic(name.topic, name.group),
                ORIGIN_MESSAGE_ID: message.offset_message_id,
            }
            more |= {
                key.encode(): value.encode()
                for key, value in first.items()
                if key not in properties
            }
        raw = with_properties(
            without_checksum(message.raw_properties), more, (HANDLE_PROPERTY.encode(),)
        )
        counted = checkpoint.origin is not Origin.SUSPENDED
        return InnerMessage(
            topic,
            0,
            message.stored_body,
            raw,
            tags_code_of(raw),
            message.flag,
            message.sys_flag,
            message.born_timestamp,
            min(message.reconsume_times + counted, _TIMES_MAX),
            message.born_host,
        )


def _retries_of_pulls(checkpoint: Checkpoint) -> str | None:
    """The retry topic that the group's pulls read; None if it popped the messages there."""
    topic = RETRY_PREFIX + checkpoint.queue.name.group
    return None if checkpoint.queue.name.topic == topic else topic
