"""Reads the queues in which messages wait, in a thread: most of them are cold when they are due."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import trio

from headrace_broker.store.files.cold_files import ColdFiles
from headrace_broker.store.log.record_checksum import without_checksum
from headrace_broker.store.queues.cold_queue import ColdQueue
from headrace_broker.store.queues.queue_blocks import (
    QueueDamaged,
    QueueView,
    read_block,
    read_records,
)
from headrace_protocol.errors import NotReady

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.store.queues.queue_blocks import QueueBlock
    from headrace_protocol.columns import Array, RecordColumns

Result = TypeVar("Result")
# The numbers of the records that are wanted.
Keep = Callable[["RecordColumns"], "Array"]
# A thread that builds more objects than this keeps the interpreter from the loop.
RECORDS_AT_ONCE: Final = 256
UNITS_AT_ONCE: Final = 4096


class Waiting(NamedTuple):
    """A message that waits, as its record has it; properties are without the record's checksum."""

    queue_offset: int
    physical_offset: int
    body: bytes
    properties: bytes
    flag: int
    sys_flag: int
    born_timestamp: int
    born_host: bytes
    store_timestamp: int
    reconsume_times: int
    prepared_transaction_offset: int


class Unreadable(NamedTuple):
    """A unit whose record is damaged or gone."""

    queue_offset: int
    physical_offset: int
    reason: str


class WaitingQueue:
    """One queue of messages that wait.

    Records are read as soon as they are written: what is made of one lies behind it in the log, so
    a power cut that takes the one takes the other.
    """

    def __init__(self, store: MessageStore, topic: str, queue_id: int) -> None:
        self._store = store
        self.topic = topic
        self.queue_id = queue_id

    @property
    def end(self) -> int:
        """Queue offset just after the newest message that can be read."""
        queue = self._store.find_queue(self.topic, self.queue_id)
        return queue.consume_queue.max_offset if queue else 0

    @property
    def appended_end(self) -> int:
        """Queue offset just after the newest message, whether or not it can be read yet."""
        queue = self._store.find_queue(self.topic, self.queue_id)
        return queue.next_offset if queue else 0

    def min_offset(self) -> int:
        """Queue offset of the oldest message that is still in the log. Reads the disk."""
        return self.first_after(self._store.commit_log.min_offset)

    def unit_reader(self, queue_offset: int) -> Callable[[], int]:
        """A function for any thread: where a message is in the log, -1 if it is gone."""
        return partial(self._view().units.physical_offset, queue_offset)

    def first_after(self, physical_offset: int) -> int:
        """Queue offset of the first message at or behind a physical offset. Reads the disk."""
        queue = self._store.find_queue(self.topic, self.queue_id)
        return ColdQueue(queue.consume_queue).first_at(physical_offset) if queue else 0

    async def units(self, first: int) -> Array:
        """Units from ``first`` on, at most UNITS_AT_ONCE: shape (n,), UNIT_DTYPE.

        n is 0 at the end, and where the queue has no such unit any more. Raises OSError.
        """
        return await trio.to_thread.run_sync(self.units_now, first, UNITS_AT_ONCE)

    def units_now(self, first: int, count: int) -> Array:
        """``units``, in the caller's thread."""
        view = self._view()
        return view.units.units(first, max(min(count, view.end - first), 0))

    def gone_count(self, units: Array) -> int:
        """Number of the first units whose records are no longer in the log."""
        is_gone = units["physical_offset"] < self._store.commit_log.min_offset
        return len(units) if is_gone.all() else int(is_gone.argmin())

    async def read(self, first: int, end: int) -> list[Waiting | Unreadable]:
        """The messages from ``first`` to before ``end``, at most RECORDS_AT_ONCE of them.

        Units without a record, at the start of a queue that begins late, are left out. Raises
        OSError.
        """
        return await trio.to_thread.run_sync(self._reader(first, end))

    def read_now(
        self, first: int, end: int, keep: Keep | None = None
    ) -> list[Waiting | Unreadable]:
        """``read``, in the caller's thread. keep: which records become messages."""
        return self._reader(first, end, keep)()

    def _reader(
        self, first: int, end: int, keep: Keep | None = None
    ) -> Callable[[], list[Waiting | Unreadable]]:
        view = self._view()._replace(end=min(end, first + RECORDS_AT_ONCE))
        log = self._store.commit_log
        cold_log = ColdFiles(log.files)
        return lambda: list(_read(view, first, cold_log, log.max_offset, keep))

    def block_now(self, first: int, count: int) -> QueueBlock | None:
        """The messages from ``first`` on, at most ``count``; None at the end.

        For a thread. Raises OSError, QueueDamaged.
        """
        log, view = self._store.commit_log, self._view()
        view = view._replace(end=min(view.end, first + count))
        return read_block(view, first, ColdFiles(log.files), log.max_offset)

    async def read_each(self, units: Array, queue_offsets: Array) -> list[Waiting | Unreadable]:
        """The messages of units, which may lie anywhere in the queue. Raises OSError.

        units: at most RECORDS_AT_ONCE, in ascending order.
        """
        view, log = self._view(), self._store.commit_log
        cold_log = ColdFiles(log.files)
        return await trio.to_thread.run_sync(
            lambda: list(_read_each(view, units, queue_offsets, cold_log))
        )

    def _view(self) -> QueueView:
        queue = self._store.queue(self.topic, self.queue_id)
        units = ColdFiles(queue.consume_queue.files)
        return QueueView(self.topic, self.queue_id, units, queue.consume_queue.max_offset)


def _read(
    view: QueueView, first: int, log: ColdFiles, log_end: int, keep: Keep | None
) -> Iterator[Waiting | Unreadable]:
    while first < view.end:
        try:
            block = read_block(view, first, log, log_end)
        except QueueDamaged as error:
            if view.end - first > 1:  # so that only what is damaged is left out
                for queue_offset in range(first, view.end):
                    yield from _read(
                        view._replace(end=queue_offset + 1), queue_offset, log, log_end, keep
                    )
            else:
                yield Unreadable(first, error.physical_offset, str(error))
            return
        if block is None:
            return
        records = block.records
        yield from _waiting(records if keep is None else records.select(keep(records)))
        first = block.end


def _read_each(
    view: QueueView, units: Array, queue_offsets: Array, log: ColdFiles
) -> Iterator[Waiting | Unreadable]:
    try:
        records = read_records(view, units, queue_offsets, log)
    except QueueDamaged as error:
        if len(units) > 1:  # so that only what is damaged is left out
            for number in range(len(units)):
                one = slice(number, number + 1)
                yield from _read_each(view, units[one], queue_offsets[one], log)
        else:
            yield Unreadable(int(queue_offsets[0]), error.physical_offset, str(error))
    else:
        yield from _waiting(records)


def _waiting(records: RecordColumns) -> Iterator[Waiting]:
    data = bytes(records.data)
    hosts = [
        data[start : start + size]
        for start, size in zip(
            records.born_host_start.tolist(), records.born_host_bytes.tolist(), strict=True
        )
    ]
    return map(
        Waiting,
        records.queue_offset.tolist(),
        records.physical_offset.tolist(),
        records.stored_bodies(),
        map(without_checksum, records.properties()),
        records.flag.tolist(),
        records.sys_flag.tolist(),
        records.born_timestamp.tolist(),
        hosts,
        records.store_timestamp.tolist(),
        records.reconsume_times.tolist(),
        records.prepared_transaction_offset.tolist(),
    )


async def when_ready(read: Callable[[], Result]) -> Result:
    """The result of a read, which is repeated after each fetch that it needs; for a service.

    Raises its errors, and those of the fetches.
    """
    while True:
        try:
            return read()
        except NotReady as away:
            await trio.to_thread.run_sync(away.fetch)
