"""The batches that orderly POPs have taken, as Apache's broker has them: consumerOrderInfo.json.

The log of pops is the truth for this broker; the file is for another one that opens the store
later. It has a mark of ours, which that one drops: a start adopts the file where it has none.
Source: docs/store-format.md "consumerOrderInfo.json"; tests/broker/pop/test_order_infos.py.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import msgspec
import structlog
import trio

from headrace_broker.persistence import load_table
from headrace_broker.pop.pop_queue import Attempt, OrderedBatch, Taken
from headrace_protocol import fastjson
from headrace_protocol.bounds import NAME_CHARS_MAX
from headrace_protocol.outages import Outages

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

_Fields = dict[str, Any]


class _Info(msgspec.Struct):
    """An entry.

    o: the first offset, and the distances of the others from it. cm: bits of what is acked.
    ot, oc: by offset, the time that it becomes visible at, and its earlier attempts.
    """

    popTime: int  # noqa: N815 - spelled as in the file
    o: list[int]
    i: int | None = None
    ot: dict[int, int] | None = None
    oc: dict[int, int] | None = None
    cm: int = 0
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
        self._outages = Outages(log.error, ended=log.warning)

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
        if offsets and queue_id >= 0 and self._topics.get(topic) is not None:
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
        taken = Taken(queue, offsets, made_at, info.popTime, max(info.i or 0, 0))
        is_short = info.a is not None and len(info.a) <= NAME_CHARS_MAX
        attempt = Attempt(info.a if is_short else None, info.oc, info.ot)
        batch = OrderedBatch(taken, attempt, acked)
        if batch.is_done:
            return
        self._pops.take_in_order(batch)
        if queue.next_offset <= offsets[-1]:
            self._pops.move(queue, offsets[-1] + 1)

    # -- writing -----------------------------------------------------------------------------------

    def save(self) -> None:
        """Write the file if it is not as things are. Raises OSError."""
        if (write := self._start_save()) is not None:
            write()

    async def run(self) -> None:
        """Write the file when it has changed, until cancelled."""
        while True:
            await trio.sleep(_SAVE_S)
            await self.save_in_thread()

    async def save_in_thread(self) -> None:
        """Like ``save``, but a failure is logged and the next call tries again."""
        changes = self._saved_changes
        if (write := self._start_save()) is None:
            return
        name = f"the folder of {self._file.path}"
        try:
            await trio.to_thread.run_sync(write)
            self._outages.worked(name)
        except OSError as error:
            self._saved_changes = changes
            self._outages.failed(name, error)

    def _start_save(self) -> Callable[[], None] | None:
        if self._pops.ordered_changes == self._saved_changes:
            return None
        self._saved_changes = self._pops.ordered_changes
        table: dict[str, dict[int, _Fields]] = {}
        for queue in self._pops:
            if (batch := queue.batch) is not None:
                group, topic, queue_id = queue.name
                entry = self._entries.get(queue.name, {}) | _entry(batch)
                table.setdefault(f"{topic}@{group}", {})[queue_id] = entry
        text = fastjson.dumps({**self._others, _TABLE: table, _MARK: True}, pretty=True)
        return lambda: self._file.save(text)


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
    if len(offsets) > _MESSAGES_MAX or not is_ascending or min(first, info.popTime) < 0:
        raise ValueError(f"{info} is no batch")
    return offsets


def _entry(batch: OrderedBatch) -> _Fields:
    first, *others = batch.offsets
    return {
        "popTime": batch.pop_time,
        "i": batch.invisible_ms,
        "o": [first, *(offset - first for offset in others)],
        "ot": dict(batch.visible_ms) or None,
        "oc": dict(batch.counts) or None,
        "l": batch.pop_time,
        "cm": batch.settled,
        "a": batch.attempt_id,
    }
