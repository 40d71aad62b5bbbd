"""Checkpoints and acks that Apache's broker left in its revive topic.

Its timers deliver a checkpoint there a second before its messages become visible, and each ack when
they do. From here on they are checkpoints like all others, which revives find.
Source: docs/store-format.md "Stores of Apache RocketMQ"; tests/broker/pop/test_peer_pops.py.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
import structlog
import trio

from headrace_broker.pop.pop_queue import Checkpoint, Origin
from headrace_broker.pop.revive_topic import unread
from headrace_broker.store.store_source import GetStatus
from headrace_protocol import fastjson
from headrace_protocol.errors import NotReady
from headrace_protocol.message import decode_records
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
_MESSAGES_MAX: Final = 64


class _Checkpoint(msgspec.Struct):
    """The body of a message tagged ``ck``. bm: bits of what is acked; d: distances from so."""

    so: int
    pt: int
    it: int
    n: int
    q: int
    t: str
    c: str
    bm: int = 0
    d: list[int] | None = None


class _Ack(msgspec.Struct):
    """The body of one tagged ``ack`` or ``bAck``."""

    so: int
    pt: int
    q: int
    t: str
    c: str
    ao: int = -1
    aol: list[int] = []


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
        self.unreadable = 0

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            await self.read_all()
            await trio.sleep(_LOOK_S)

    async def read_all(self) -> None:
        """Read what nobody has read."""
        for queue_id in unread(self._store, self._offsets, self._cluster):
            while await self._read_some(queue_id):
                await trio.lowlevel.checkpoint()

    async def _read_some(self, queue_id: int) -> bool:
        """Read some messages of a queue; returns whether there were any."""
        queue = self._store.find_queue(self._topic, queue_id)
        if queue is None:
            return False
        first = self._offsets.query(REVIVE_GROUP, self._topic, queue_id) or 0
        get = partial(self._store.source(queue).get, first, _AT_ONCE, _BYTES_AT_ONCE, None)
        while True:
            try:
                result = get()
                break
            except NotReady as away:
                await trio.to_thread.run_sync(away.fetch)
        if result.next_offset == first:
            return False
        if result.status is GetStatus.FOUND:
            for message in decode_records(b"".join(result.buffers)):
                self._take(message)
        # Together with what it counts: both are saved in this order.
        self._progress.write_out()
        self._offsets.settle(REVIVE_GROUP, self._topic, queue_id, result.next_offset)
        return True

    def _take(self, message: StoredMessage) -> None:
        try:
            if message.tags == "ck":
                self._adopt(fastjson.decode(message.body, _Checkpoint))
            else:
                self._ack(fastjson.decode(message.body, _Ack))
        except (ValueError, msgspec.MsgspecError) as error:
            self.unreadable += 1
            log.error(
                "message of the revive topic is malformed; ignoring it",
                queue_id=message.queue_id,
                queue_offset=message.queue_offset,
                reason=str(error),
            )

    def _adopt(self, found: _Checkpoint) -> None:
        """Raises ValueError for what no broker writes."""
        if not 0 < found.n <= _MESSAGES_MAX or min(found.so, found.pt, found.it, found.q) < 0:
            raise ValueError(f"{found} is no checkpoint")
        distances = found.d or range(found.n)
        offsets = sorted(found.so + distance for distance in distances)
        if self._topics.get(found.t) is None or not offsets:
            return  # the topic was deleted
        queue = self._pops.find(found.c, found.t, found.q)
        if queue is None:
            committed = self._offsets.query(found.c, found.t, found.q)
            first = offsets[-1] + 1 if committed is None else committed
            queue = self._pops.open(found.c, found.t, found.q, first)
        if queue.get((offsets[0], found.pt)) is not None:
            return
        made_at = self._topics.incarnations.created_at(found.t)
        settled = found.bm & ((1 << len(offsets)) - 1)
        checkpoint = Checkpoint(
            queue, offsets, made_at, found.pt, found.it, 0, Origin.EXTENDED, settled
        )
        if not checkpoint.is_done:
            now_ms = self._store.clock.now_ms()
            self._pops.adopt(checkpoint, max(checkpoint.due_ms, now_ms) + _ACK_MS)

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
