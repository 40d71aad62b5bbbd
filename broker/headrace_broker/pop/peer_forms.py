"""Messages that are out, in the form that Apache's brokers read.

A checkpoint, and later an ack of what was settled since, wait in the timers for the revive topic.
The saved offset of a group passes messages that are named so. A stop in order names all that is
out; before that, only what keeps a saved offset where it is for long.
Source: docs/store-format.md "Revive topic"; tests/broker/pop/test_peer_forms.py.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import structlog
import trio

from headrace_broker.inner.writer import InnerMessage
from headrace_broker.message_demands import SentMessage
from headrace_broker.pop.pop_log import PopsNotWritable
from headrace_broker.pop.pop_queue import Origin
from headrace_broker.store.errors import StoreBusy, StoreNotWritable
from headrace_protocol import fastjson
from headrace_protocol.errors import RequestError
from headrace_protocol.java_hash import tags_code_of
from headrace_protocol.message import TAGS, TIMER_DELIVER_MS, UNIQ_KEY
from headrace_protocol.outages import Outages
from headrace_protocol.system_topics import revive_log_topic

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from headrace_broker.config import BrokerConfig
    from headrace_broker.core import Messages
    from headrace_broker.pop.pop_queue import Checkpoint, PopQueue
    from headrace_broker.pop.pops import Pops
    from headrace_broker.pop.progress import PopProgress
    from headrace_broker.store.message_store import MessageStore

log = structlog.get_logger("headrace.broker")

# Between looks for messages that have been out for long.
_LOOK_S: Final = 5.0
_LONG_MS: Final = 30_000
# Those that are visible again soon after the next look are not worth it.
_SOON_MS: Final = 10_000
# Checkpoints reach the revive topic so long before their messages are visible.
_EARLY_MS: Final = 1000
# Checkpoints of a turn, about a millisecond; and queues between two breaks.
_AT_ONCE: Final = 16
_QUEUES_AT_ONCE: Final = 256
_INT_BITS: Final = 32
CHECKPOINT_TAG: Final = "ck"
# Of what is logged as an outage.
_NAME: Final = "the form of pops that Apache's brokers read"


class PeerForms:
    """Names what is out for Apache's brokers."""

    def __init__(
        self,
        config: BrokerConfig,
        store: MessageStore,
        messages: Messages,
        pops: Pops,
        progress: PopProgress,
    ) -> None:
        self._broker = config.broker_name
        self._topic = revive_log_topic(config.broker_cluster_name)
        self._store = store
        self._messages = messages
        self._pops = pops
        self._progress = progress
        self._outages = Outages(log.error, ended=log.warning)

    async def run(self) -> None:
        """Name what has been out for long, until cancelled."""
        while True:
            await trio.sleep(_LOOK_S)
            # What the store can't take is named at a later look.
            try:
                await self.name_old()
            except (StoreBusy, StoreNotWritable, PopsNotWritable, OSError) as error:
                self._outages.failed(_NAME, error)
            else:
                self._outages.worked(_NAME)

    async def name_old(self) -> None:
        """Name what has kept a saved offset for long.

        Raises StoreError, PopsNotWritable, OSError.
        """
        for number, queue in enumerate(list(self._pops), 1):
            while self._is_old(queue.first_unnamed):
                try:
                    self._name(islice(self._old(queue), _AT_ONCE))
                except PopsNotWritable:
                    raise
                except RequestError:  # timers are switched off
                    break
                await trio.lowlevel.checkpoint()
            if number % _QUEUES_AT_ONCE == 0:
                await trio.lowlevel.checkpoint()

    def _old(self, queue: PopQueue) -> Iterator[Checkpoint]:
        """What keeps the saved offset of a queue, if old; each is named before the next."""
        while (first := queue.first_unnamed) is not None and self._is_old(first):
            yield first

    def _is_old(self, checkpoint: Checkpoint | None) -> bool:
        if checkpoint is None or checkpoint.origin is Origin.ORDERED:
            return False
        now_ms = self._store.clock.now_ms()
        is_long = now_ms - checkpoint.out_since_ms >= _LONG_MS
        return is_long and checkpoint.due_ms - now_ms >= _SOON_MS

    def write(self) -> None:
        """Name all that is out. Raises OSError.

        What can't be named stays behind its group's saved offset.
        """
        changed = (
            each
            for queue in list(self._pops)
            for each in list(queue)
            if each.named != each.settled and each.origin is not Origin.ORDERED
        )
        try:
            while self._name(islice(changed, _AT_ONCE)):
                pass
        except (RequestError, StoreBusy, StoreNotWritable) as error:
            log.warning("pops not stored for Apache's brokers", reason=str(error))

    def _name(self, checkpoints: Iterable[Checkpoint]) -> bool:
        """Name some in a turn; returns whether there were any.

        Raises RequestError, StoreError, OSError.
        """
        self._progress.log.check_room()
        write_path = self._store.write_path
        if write_path.pressure():
            write_path.publish()
        write_path.begin()
        has_any = False
        try:
            for checkpoint in checkpoints:
                # An ack for an older checkpoint, which its brokers know by the same name.
                form = self._ack if checkpoint.is_named else self._checkpoint
                self._messages.writer.append_now(form(checkpoint))
                log_end = self._store.commit_log.max_offset
                self._pops.name_as(checkpoint, checkpoint.settled, log_end)
                has_any = True
        finally:
            self._progress.end_turn()
            with suppress(StoreNotWritable):  # it stays pending, and a later commit writes it
                write_path.publish()
        return has_any

    def _checkpoint(self, checkpoint: Checkpoint) -> InnerMessage:
        group, topic, queue_id = checkpoint.queue.name
        offsets, pop_time = checkpoint.offsets, checkpoint.pop_time
        first = offsets[0]
        body = {
            "so": first,
            "pt": pop_time,
            "it": checkpoint.invisible_ms,
            "bm": _as_int(checkpoint.settled),
            "n": len(offsets),
            "q": queue_id,
            "t": topic,
            "c": group,
            "ro": 0,
            "d": [offset - first for offset in offsets],
            "bn": self._broker,
            "sp": checkpoint.origin is Origin.SUSPENDED,
        }
        name = checkpoint_name(checkpoint, self._broker)
        return self._message(checkpoint, CHECKPOINT_TAG, name, body, checkpoint.due_ms - _EARLY_MS)

    def _ack(self, checkpoint: Checkpoint) -> InnerMessage:
        group, topic, queue_id = checkpoint.queue.name
        bits = checkpoint.settled & ~checkpoint.named
        acked = [offset for place, offset in enumerate(checkpoint.offsets) if bits >> place & 1]
        body = {
            "ao": acked[0],
            "so": checkpoint.offsets[0],
            "c": group,
            "t": topic,
            "q": queue_id,
            "pt": checkpoint.pop_time,
            "bn": self._broker,
            "aol": acked,
        }
        names = (topic, queue_id, acked, group, checkpoint.pop_time, self._broker, "bAck")
        return self._message(checkpoint, "bAck", _joined(names), body, checkpoint.due_ms)

    def _message(
        self, checkpoint: Checkpoint, tag: str, name: str, body: dict[str, Any], deliver_ms: int
    ) -> InnerMessage:
        """A message for the revive topic, now or by a timer. Raises RequestError."""
        sent = SentMessage(self._topic, checkpoint.revive_qid, [])
        sent.put(
            {
                TAGS: tag,
                UNIQ_KEY: name,
                TIMER_DELIVER_MS: str(deliver_ms),
            }
        )
        self._messages.delays.apply_for(TIMER_DELIVER_MS, sent)
        raw = sent.raw_properties
        now_ms, host = self._store.clock.now_ms(), self._store.settings.store_host
        place, text = (sent.topic, sent.queue_id), fastjson.dumps(body)
        return InnerMessage(*place, text, raw, tags_code_of(raw), 0, 0, now_ms, 0, host)


def checkpoint_name(checkpoint: Checkpoint, broker: str) -> str:
    """The UNIQ_KEY of a checkpoint in Apache's form."""
    group, topic, queue_id = checkpoint.queue.name
    first, pop_time = checkpoint.key
    return _joined((topic, queue_id, first, group, pop_time, broker, CHECKPOINT_TAG))


def _joined(names: tuple[Any, ...]) -> str:
    return "@".join(map(str, names))


def _as_int(bits: int) -> int:
    """The bits as an int of Java."""
    return bits - (1 << _INT_BITS) if bits >> (_INT_BITS - 1) else bits
