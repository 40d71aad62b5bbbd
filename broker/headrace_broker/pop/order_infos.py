"""The batches that orderly POPs have taken, as Apache's broker has them: consumerOrderInfo.json.

The log of pops is the truth for this broker; the file is for another one that opens the store
later. It has a mark of ours, which that one drops: a start adopts the file where it has none.
Source: docs/store-format.md "consumerOrderInfo.json"; tests/broker/pop/test_order_infos.py.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import structlog
import trio

from headrace_broker.inner.saving import save_at_intervals
from headrace_broker.persistence import load_table
from headrace_broker.pop.pop_queue import Attempt, OrderedBatch, Taken
from headrace_protocol import fastjson
from headrace_protocol.bounds import NAME_CHARS_MAX
from headrace_protocol.headers import Int64

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_broker.core import Tables
    from headrace_broker.pop.pops import Pops
    from headrace_broker.store.files.config_file import ConfigFile

log = structlog.get_logger("headrace.broker")

FILE_NAME: Final = "consumerOrderInfo.json"
_TABLE: Final = "table"
_MARK: Final = "headrace"
_SAVE_S: Final = 5.0
# Bits of cm.
_MESSAGES_MAX: Final = 64
_INT32_MAX: Final = 2**31 - 1
# Sums of two are int64s too.
_NUMBER_MAX: Final = 2**62

_Fields = dict[str, Any]
_Number = Annotated[int, msgspec.Meta(ge=0, le=_NUMBER_MAX)]
_Times = Annotated[int, msgspec.Meta(ge=0, le=_INT32_MAX)]
_Offsets = Annotated[list[Int64], msgspec.Meta(max_length=_MESSAGES_MAX)]


class _Info(msgspec.Struct):
    """An entry.

    o: the first offset, and the distances of the others from it. cm: bits of what is acked.
    ot, oc: by offset, the time that it becomes visible at, and its earlier attempts.
    """

    popTime: _Number  # noqa: N815 - spelled as in the file
    o: _Offsets
    i: Int64 | None = None
    ot: dict[Int64, _Number] | None = None
    oc: dict[Int64, _Times] | None = None
    cm: Int64 = 0
    a: str | None = None


class OrderInfos:
    """The file; ``adopt`` comes first."""

    def __init__(self, file: ConfigFile, tables: Tables, pops: Pops) -> None:
        self._file = file
        self._topics, _, _, self._offsets = tables
        self._pops = pops
        self._others: _Fields = {}
        # Entries as another broker wrote them, by group, topic and queue.
        self._entries: dict[tuple[str, str, int], _Fields] = {}
        self._saved_changes = 0

    # -- reading -----------------------------------------------------------------------------------

    def adopt(self) -> bool:
        """Take over what another broker wrote, if it did; returns whether it did.

        ``save`` follows: what is adopted once must not be adopted again.

        Raises StoreFormatError for a file that can't be read.
        """
        fields = load_table(self._file, _parse)
        if fields is None:
            return False
        table = fields.pop(_TABLE)
        is_ours = fields.pop(_MARK, False)
        self._others = fields
        for name, queues in table.items():
            topic, _, group = name.partition("@")
            for queue_id, entry in queues.items():
                self._entries[group, topic, queue_id] = entry
                if not is_ours:
                    self._adopt(group, topic, queue_id, entry)
        if is_ours or not table:
            return False
        self._pops.ordered_changes += 1
        return True

    def _adopt(self, group: str, topic: str, queue_id: int, entry: _Fields) -> None:
        try:
            info = msgspec.convert(entry, _Info, strict=False)
            offsets = _offsets(info)
        except (ValueError, msgspec.MsgspecError) as error:
            log.error(
                "entry of consumerOrderInfo.json is malformed; ignoring it",
                group=group,
                topic=topic,
                queue_id=queue_id,
                reason=str(error),
            )
            return
        is_named = 0 <= queue_id <= _INT32_MAX and len(group) <= NAME_CHARS_MAX
        if offsets and is_named and self._topics.get(topic) is not None:
            self._take(group, topic, queue_id, info, offsets)

    def _take(self, group: str, topic: str, queue_id: int, info: _Info, offsets: list[int]) -> None:
        queue = self._pops.find(group, topic, queue_id)
        if queue is None:
            committed = self._offsets.query(group, topic, queue_id)
            first = offsets[0] if committed is None else committed
            queue = self._pops.open(group, topic, queue_id, first)
        acked = info.cm & ((1 << len(offsets)) - 1)
        batch = queue.batch
        if batch is not None and batch.pop_time == info.popTime:
            self._pops.settle(batch, acked & batch.bits)
            return
        if batch is not None:
            self._pops.give_back(batch)
        if queue.has_out:
            return  # it is out without an order
        made_at = self._topics.incarnations.created_at(topic)
        invisible_ms = min(max(info.i or 0, 0), _NUMBER_MAX)
        taken = Taken(queue, offsets, made_at, info.popTime, invisible_ms)
        batch = OrderedBatch(taken, _attempt(info, offsets), acked)
        if batch.is_done:
            return
        self._pops.take_in_order(batch)
        if queue.next_offset <= offsets[-1]:
            self._pops.move(queue, offsets[-1] + 1)

    # -- writing -----------------------------------------------------------------------------------

    def save(self) -> None:
        """Write the file if it is not as things are. Raises OSError; the next save repeats it."""
        if (write := self._start_save()) is not None:
            write()

    async def run(self) -> None:
        """Write the file when it has changed, until cancelled."""
        await save_at_intervals("orderly pops", self.save_in_thread, lambda: _SAVE_S)

    async def save_in_thread(self) -> None:
        """Like ``save``, in a thread."""
        if (write := self._start_save()) is not None:
            await trio.to_thread.run_sync(write)

    def _start_save(self) -> Callable[[], None] | None:
        if self._pops.ordered_changes == self._saved_changes:
            return None
        before, self._saved_changes = self._saved_changes, self._pops.ordered_changes
        table: dict[str, dict[int, _Fields]] = {}
        for queue in self._pops:
            if (batch := queue.batch) is not None:
                group, topic, queue_id = queue.name
                entry = self._entries.get(queue.name, {}) | _entry(batch)
                table.setdefault(f"{topic}@{group}", {})[queue_id] = entry
        text = fastjson.dumps({**self._others, _TABLE: table, _MARK: True}, pretty=True)

        def write() -> None:
            try:
                self._file.save(text)
            except OSError:
                self._saved_changes = before
                raise

        return write


def _parse(text: bytes) -> _Fields:
    """Raises ValueError."""
    fields = msgspec.convert(fastjson.loads(text), _Fields)
    table = fields.get(_TABLE) or {}
    fields[_TABLE] = msgspec.convert(table, dict[str, dict[int, _Fields]], strict=False)
    return fields


def _offsets(info: _Info) -> list[int]:
    """Raises ValueError for what no broker writes."""
    if not info.o:
        return []
    first, *distances = info.o
    offsets = [first, *(first + distance for distance in distances)]
    is_ascending = all(left < right for left, right in pairwise(offsets))
    if not is_ascending or first < 0 or offsets[-1] > _NUMBER_MAX:
        raise ValueError(f"{info} is no batch")
    return offsets


def _attempt(info: _Info, offsets: list[int]) -> Attempt:
    """What an entry says of the POP, and of the messages of its batch."""
    is_short = info.a is not None and len(info.a) <= NAME_CHARS_MAX
    counts, visible_ms = info.oc or {}, info.ot or {}
    return Attempt(
        info.a if is_short else None,
        {offset: counts[offset] for offset in offsets if offset in counts},
        {offset: visible_ms[offset] for offset in offsets if offset in visible_ms},
    )


def _entry(batch: OrderedBatch) -> _Fields:
    first, *others = batch.offsets
    return {
        "popTime": batch.pop_time,
        "i": batch.invisible_ms,
        "o": [first, *(offset - first for offset in others)],
        "ot": dict(batch.visible_ms) or None,
        # A batch that was given back has counts of -1 here, so that its next POP counts none.
        "oc": {offset: max(times, 0) for offset, times in batch.counts.items()} or None,
        "l": batch.pop_time,
        "cm": batch.settled,
        "a": batch.attempt_id,
    }
