"""Checkpoints and acks that Apache's broker left in its revive topic.

Its timers deliver a checkpoint there a second before its messages become visible, and each ack when
they do. From here on they are checkpoints like all others, which revives find. Those that this
broker wrote are known already.
Source: docs/store-format.md "Revive topic"; tests/broker/pop/test_peer_pops.py.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import structlog
import trio

from headrace_broker.inner.waiting import when_ready
from headrace_broker.pop.peer_forms import CHECKPOINT_TAG
from headrace_broker.pop.pop_queue import Checkpoint, Origin
from headrace_broker.pop.revive_topic import next_unread, unread
from headrace_broker.store.errors import StoreError
from headrace_broker.store.store_source import GetStatus
from headrace_protocol import fastjson
from headrace_protocol.bounds import NAME_CHARS_MAX
from headrace_protocol.errors import CorruptRecord
from headrace_protocol.headers import Int64  # noqa: TC001 - msgspec reads annotations
from headrace_protocol.message import decode_records
from headrace_protocol.outages import Outages
from headrace_protocol.system_topics import REVIVE_GROUP, revive_log_topic

if TYPE_CHECKING:
    from headrace_broker.core import Tables
    from headrace_broker.pop.pops import Pops
    from headrace_broker.pop.progress import PopProgress
    from headrace_broker.store.message_store import MessageStore
    from headrace_protocol.message import StoredMessage

log = structlog.get_logger("headrace.broker")

_LOOK_S: Final = 1.0
_AT_ONCE: Final = 64
_BYTES_AT_ONCE: Final = 256 * 1024
# An ack is delivered by a timer, which is exact to a second or so.
_ACK_MS: Final = 3000
# Time for messages that are due to be stored again.
_REVIVE_MS: Final = 1000
_MESSAGES_MAX: Final = 64

# Their sums are int64s too.
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Int32 = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=_MESSAGES_MAX)]
_Distances = Annotated[list[_Int32], msgspec.Meta(max_length=_MESSAGES_MAX)]
_Offsets = Annotated[list[_Number], msgspec.Meta(max_length=_MESSAGES_MAX)]


class _Checkpoint(msgspec.Struct):
    """The body of a message tagged ``ck``.

    so: the offset at which the POP began; d: distances from there, ascending, of its n messages;
    None if they are neighbours from there on. bm: bits of what is acked. sp: given back.
    """

    so: _Number
    pt: _Number
    it: _Number
    n: _Count
    q: _Int32
    t: _Name
    c: _Name
    bm: Int64 = 0
    d: _Distances | None = None
    sp: bool = False


class _Ack(msgspec.Struct):
    """The body of one tagged ``ack`` or ``bAck``."""

    so: _Number
    pt: _Number
    q: _Int32
    t: _Name
    c: _Name
    ao: Int64 = -1
    aol: _Offsets = []


class PeerPops:
    """Reads the revive topic. unreadable: number of its messages that say nothing."""

    def __init__(
        self,
        store: MessageStore,
        tables: Tables,
        cluster: str,
        pops: Pops,
        progress: PopProgress,
    ) -> None:
        self._store = store
        self._topics, _, _, self._offsets = tables
        self._cluster = cluster
        self._topic = revive_log_topic(cluster)
        self._pops = pops
        self._progress = progress
        self._outages = Outages(log.error, ended=log.warning)
        self.unreadable = 0

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            await self.read_all()
            await trio.sleep(_LOOK_S)

    async def read_all(self) -> None:
        """Read what nobody has read. What fails is logged, and read later."""
        for queue_id in unread(self._store, self._offsets, self._cluster):
            name = f"queue {queue_id} of {self._topic}"
            try:
                while await self._read_some(queue_id, _AT_ONCE):
                    await trio.lowlevel.checkpoint()
            except (OSError, StoreError) as error:
                self._outages.failed(name, error)
            else:
                self._outages.worked(name)

    async def _read_some(self, queue_id: int, count_max: int) -> bool:
        """Read some messages of a queue; returns whether there were any.

        Raises OSError, StoreError.
        """
        queue = self._store.find_queue(self._topic, queue_id)
        if queue is None:
            return False
        first = self._next_offset(queue_id)
        get = self._store.source(queue).get
        result = await when_ready(partial(get, first, count_max, _BYTES_AT_ONCE, None))
        next_offset = result.next_offset
        if result.status is GetStatus.FOUND:
            try:
                messages = decode_records(b"".join(result.buffers))
            except CorruptRecord as error:
                if count_max > 1:
                    return await self._read_some(queue_id, 1)
                messages = []
                self._note_unreadable(queue_id, first, error)
            for message in messages:
                if not self._take(message):
                    next_offset = message.queue_offset
                    break
        if next_offset == first:
            return False
        # With what it counts, so that a kill separates neither from the other.
        self._move(queue_id, next_offset)
        self._progress.write_out()
        return next_offset == result.next_offset

    def _next_offset(self, queue_id: int) -> int:
        queue = self._pops.find(REVIVE_GROUP, self._topic, queue_id)
        if queue is not None:
            return queue.next_offset
        return next_unread(self._offsets, self._topic, queue_id)

    def _move(self, queue_id: int, next_offset: int) -> None:
        queue = self._pops.find(REVIVE_GROUP, self._topic, queue_id)
        if queue is None:
            self._pops.open(REVIVE_GROUP, self._topic, queue_id, next_offset)
        else:
            self._pops.move(queue, next_offset)

    def _take(self, message: StoredMessage) -> bool:
        """Learn from a message; False if that must wait."""
        try:
            if message.tags == CHECKPOINT_TAG:
                return self._adopt(fastjson.decode(message.body, _Checkpoint), message)
            self._ack(fastjson.decode(message.body, _Ack))
        except (ValueError, msgspec.MsgspecError) as error:
            self._note_unreadable(message.queue_id, message.queue_offset, error)
        return True

    def _note_unreadable(self, queue_id: int, queue_offset: int, error: Exception) -> None:
        self.unreadable += 1
        log.error(
            "message of the revive topic is malformed; ignoring it",
            queue_id=queue_id,
            queue_offset=queue_offset,
            reason=str(error),
        )

    def _adopt(self, found: _Checkpoint, message: StoredMessage) -> bool:
        """Take over what was popped; False if that must wait.

        Raises ValueError for what no broker writes.
        """
        offsets, settled = _messages(found)
        made_at = self._topics.incarnations.created_at(found.t)
        # A timer of this broker names the place where the checkpoint waited.
        waited_at = message.prepared_transaction_offset or message.physical_offset
        if self._topics.get(found.t) is None or waited_at < made_at:
            return True  # the topic was deleted
        queue = self._pops.find(found.c, found.t, found.q)
        if queue is None:
            committed = self._offsets.query(found.c, found.t, found.q)
            first = offsets[-1] + 1 if committed is None else committed
            queue = self._pops.open(found.c, found.t, found.q, first)
        known = queue.get((offsets[0], found.pt))
        now_ms = self._store.clock.now_ms()
        if known is not None:
            return self._end_name(known, now_ms)
        origin = Origin.SUSPENDED if found.sp else Origin.EXTENDED
        checkpoint = Checkpoint(
            queue, offsets, made_at, found.pt, found.it, message.queue_id, origin, settled
        )
        if not checkpoint.is_done:
            self._pops.adopt(checkpoint, max(checkpoint.due_ms, now_ms) + _ACK_MS)
        return True

    def _end_name(self, known: Checkpoint, now_ms: int) -> bool:
        """Forget that a checkpoint of this broker is named here; False while it must stay so.

        It is named until its messages are stored again, so that the group's saved offset need not
        go back.
        """
        if not known.is_done and now_ms < known.due_ms + _REVIVE_MS:
            return not known.is_named
        if known.is_named:
            self._pops.unname(known)
        return True

    def _ack(self, found: _Ack) -> None:
        queue = self._pops.find(found.c, found.t, found.q)
        checkpoint = queue.get((found.so, found.pt)) if queue is not None else None
        if checkpoint is None:
            return
        bits = 0
        for offset in found.aol or [found.ao]:
            bits |= checkpoint.bit(offset)
        if bits:
            self._pops.settle(checkpoint, bits)


def _messages(found: _Checkpoint) -> tuple[list[int], int]:
    """The offsets of a checkpoint, and a bit for each that is out no more.

    Raises ValueError for distances that no broker writes.
    """
    distances = found.d or list(range(found.n))
    if len(distances) != found.n or any(left >= right for left, right in pairwise(distances)):
        raise ValueError(f"{found} has no ascending distance for each message")
    acked = found.bm & ((1 << found.n) - 1)
    if distances[0]:
        # Its name is where its POP began, though a filter has passed the message there.
        distances, acked = [0, *distances], acked << 1 | 1
    return [found.so + distance for distance in distances], acked
