"""ACK_MESSAGE (200051), BATCH_ACK_MESSAGE (200151), CHANGE_MESSAGE_INVISIBLETIME (200053).

Source: docs/protocol.md "POP"; tests/broker/pop/test_acks.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_broker.pop.pop_queue import OrderedBatch, Origin
from headrace_broker.queue_directory import Use
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.pop.batch_ack import BatchAckBody, bitset
from headrace_protocol.pop.handle import Handle, TopicKind, parse
from headrace_protocol.pop.headers import (
    AckMessageHeader,
    ChangeInvisibleTimeHeader,
    ChangeInvisibleTimeResponseHeader,
)
from headrace_protocol.serving import Reply
from headrace_protocol.system_topics import RETRY_PREFIX

if TYPE_CHECKING:
    from headrace_broker.config import BrokerConfig
    from headrace_broker.pop.pop_queue import Checkpoint
    from headrace_broker.pop.pops import Pops
    from headrace_broker.pop.progress import PopProgress
    from headrace_broker.queue_directory import QueueDirectory
    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.topics.table import TopicTable
    from headrace_protocol.pop.batch_ack import BatchAck
    from headrace_protocol.serving import Request, RequestFunction


class AckProcessor:
    """Serves what members say about messages that are out. acked: a count since the start."""

    def __init__(
        self,
        config: BrokerConfig,
        store: MessageStore,
        topics: TopicTable,
        directory: QueueDirectory,
        pops: Pops,
        progress: PopProgress,
    ) -> None:
        self._config = config
        self._store = store
        self._topics = topics
        self._directory = directory
        self._pops = pops
        self._progress = progress
        self.acked = 0

    def functions(self) -> dict[int, RequestFunction]:
        """The function that serves each code."""
        return {
            RequestCode.ACK_MESSAGE: self.ack,
            RequestCode.BATCH_ACK_MESSAGE: self.ack_batch,
            RequestCode.CHANGE_MESSAGE_INVISIBLETIME: self.change,
        }

    def ack(self, request: Request) -> Reply | None:
        """ACK_MESSAGE: settle a message; no effect on one that is not out."""
        header = request.header(AckMessageHeader)
        self._progress.check()
        checkpoint = self._named(header)
        if checkpoint is not None and (bit := checkpoint.bit(header.offset)):
            self._settle(checkpoint, bit)
        return self._progress.reply(request, Reply())

    def ack_batch(self, request: Request) -> Reply | None:
        """BATCH_ACK_MESSAGE: all acks, or none if anything is wrong with one."""
        body = BatchAckBody.decode(request.body)
        body.check()
        self._progress.check()
        for checkpoint, bits in [self._acked(ack) for ack in body.acks]:
            # The same message may be in the body twice.
            if checkpoint is not None and (bits := bits & checkpoint.bits):
                self._settle(checkpoint, bits)
        return self._progress.reply(request, Reply())

    def change(self, request: Request) -> Reply | None:
        """CHANGE_MESSAGE_INVISIBLETIME: a message that is out gets another time and handle."""
        header = request.header(ChangeInvisibleTimeHeader)
        self._progress.check()
        check_invisible_time(self._config, header.invisible_time)
        checkpoint = self._named(header)
        if checkpoint is None or not checkpoint.bit(header.offset):
            raise RequestError(
                ResponseCode.NO_MESSAGE,
                f"message {header.offset} of {header.topic} queue {header.queue_id} is no longer "
                f"out for group {header.consumer_group}: it was acknowledged, or its time is over",
            )
        changed = self._changed(checkpoint, header)
        return self._progress.reply(request, Reply(changed))

    def _changed(
        self, checkpoint: Checkpoint, header: ChangeInvisibleTimeHeader
    ) -> ChangeInvisibleTimeResponseHeader:
        now_ms = self._store.clock.now_ms()
        if isinstance(checkpoint, OrderedBatch):
            visible_ms = now_ms + header.invisible_time
            self._pops.delay(checkpoint, header.offset, visible_ms)
            # Its handle keeps the time of the POP, which names the batch.
            return ChangeInvisibleTimeResponseHeader(
                pop_time=checkpoint.pop_time,
                invisible_time=visible_ms - checkpoint.pop_time,
                revive_qid=checkpoint.revive_qid,
            )
        changed = self._pops.extend(
            checkpoint,
            header.offset,
            now_ms,
            header.invisible_time,
            Origin.SUSPENDED if header.suspend else Origin.EXTENDED,
        )
        return ChangeInvisibleTimeResponseHeader(
            pop_time=changed.pop_time,
            invisible_time=changed.invisible_ms,
            revive_qid=changed.revive_qid,
        )

    def _settle(self, checkpoint: Checkpoint, bits: int) -> None:
        self.acked += bits.bit_count()
        if isinstance(checkpoint, OrderedBatch):
            self._pops.settle_in_order(checkpoint, bits)
        else:
            self._pops.settle(checkpoint, bits)

    # -- names -------------------------------------------------------------------------------------

    def _named(self, header: AckMessageHeader) -> Checkpoint | None:
        """The checkpoint that a handle names; None if none of its messages is out.

        Raises RequestError for what no message of the group can have.
        """
        handle = parse(header.extra_info)
        topic = real_topic(header.topic, header.consumer_group, handle)
        if handle.queue_id != header.queue_id or handle.queue_offset not in {None, header.offset}:
            raise _illegal(
                f"the handle is of message {handle.queue_offset} in queue {handle.queue_id}, "
                f"not of {header.offset} in queue {header.queue_id}"
            )
        self._check(topic, header.queue_id, header.offset, header.offset)
        return self._find(header.consumer_group, topic, handle)

    def _acked(self, ack: BatchAck) -> tuple[Checkpoint | None, int]:
        """A checkpoint, and the bits of its messages that an ack names. Raises RequestError."""
        handle = ack.handle(self._config.broker_name)
        topic = real_topic(ack.topic, ack.consumer_group, handle)
        named, start = bitset(ack.bits), ack.start_offset
        if not named:
            return None, 0
        first, last = (named & -named).bit_length() - 1, named.bit_length() - 1
        self._check(topic, ack.queue_id, start + first, start + last)
        checkpoint = self._find(ack.consumer_group, topic, handle)
        if checkpoint is None:
            return None, 0
        # A forged handle of a batch may claim to begin behind it.
        out = ((offset - start, bit) for offset, bit in checkpoint.out() if offset >= start)
        return checkpoint, sum(bit for place, bit in out if named >> place & 1)

    def _check(self, topic: str, queue_id: int, first: int, last: int) -> None:
        """Raise RequestError unless a queue has, or had, messages at these offsets."""
        config = self._topics.expect(topic)
        if not 0 <= queue_id < config.read_queue_nums:
            raise _illegal(
                f"queueId{queue_id} is illegal, topic:[{topic}] "
                f"topicConfig.readQueueNums:[{config.read_queue_nums}]"
            )
        place = self._directory.find(topic, queue_id, Use.INSPECT)
        low, high = place.source.known_range() if place is not None else (0, 0)
        if first < low or last > high:
            raise RequestError(
                ResponseCode.NO_MESSAGE,
                f"offset is illegal, key:{topic}@{queue_id}, commit:{first} to {last}, "
                f"store:{low}~{high}",
            )

    def _find(self, group: str, topic: str, handle: Handle) -> Checkpoint | None:
        if handle.broker_name != self._config.broker_name:
            raise _illegal(
                f"the handle is of broker {handle.broker_name}, this is {self._config.broker_name}"
            )
        queue = self._pops.find(group, topic, handle.queue_id)
        if queue is None:
            return None
        if handle.is_orderly:
            # Handles of messages that got another time begin at these.
            batch = queue.batch
            return batch if batch is not None and batch.pop_time == handle.pop_time else None
        return queue.get((handle.start_offset, handle.pop_time))


def real_topic(topic: str, group: str, handle: Handle) -> str:
    """The topic that has a message; clients name that one, or the one that they popped."""
    if handle.kind is TopicKind.NORMAL or topic.startswith(RETRY_PREFIX):
        return topic
    return handle.topic(topic, group)


def check_invisible_time(config: BrokerConfig, invisible_ms: int) -> None:
    """Raise RequestError for a time that no timer of a broker may have."""
    max_ms = config.timer_max_delay_sec * 1000
    if not 0 <= invisible_ms <= max_ms:
        raise RequestError(
            ResponseCode.INVALID_PARAMETER,
            f"invisibleTime {invisible_ms}: expected 0 to {max_ms} ms (timerMaxDelaySec)",
        )


def _illegal(remark: str) -> RequestError:
    return RequestError(ResponseCode.MESSAGE_ILLEGAL, remark)
