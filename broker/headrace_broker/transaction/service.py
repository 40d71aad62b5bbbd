"""Keeps half messages until their producers decide, and asks those that do not.

What always holds:

1. The log is the truth: a start makes the table of transactions again from the half queue, the op
   queue and the commits in the log. The offsets of both queues are saved together, behind what is
   on disk: each half at or behind the one that is decided is named at or behind the other.
2. A commit is in the log before the op record that names its half; both go in one turn. A start
   that finds the first without the second writes the second.
3. After its decision no half is checked, and a check counts only once it was written to a client.
4. Nothing is lost in silence: what nobody decides goes to TRANS_CHECK_MAX_TIME_TOPIC, what can't be
   read is logged and counted.

Source: docs/protocol.md "Transactions"; tests/broker/test_transactions.py.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog
import trio

from headrace_broker.host_budget import Host
from headrace_broker.inner.marks import Mark
from headrace_broker.inner.saving import save_at_intervals
from headrace_broker.inner.waiting import RECORDS_AT_ONCE, Unreadable, Waiting, WaitingQueue
from headrace_broker.store.errors import StoreError
from headrace_broker.transaction import halves
from headrace_broker.transaction.halves import (
    CONSUMER_GROUP,
    Decision,
    HalfDemand,
    HalfNames,
)
from headrace_broker.transaction.rebuild import Progress, rebuilt
from headrace_broker.transaction.table import HALF_BYTES, HalfTable, OpenHalf
from headrace_protocol.system_topics import CHECK_MAX_TIME_TOPIC, HALF_TOPIC, OP_HALF_TOPIC

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from headrace_broker.config import BrokerConfig
    from headrace_broker.consumer.offsets import ConsumerOffsets
    from headrace_broker.host_budget import HostBudget
    from headrace_broker.inner.marks import Marks
    from headrace_broker.inner.writer import InnerMessage, InnerWriter
    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.topics.table import TopicTable
    from headrace_broker.transaction.metrics import TransactionMetrics
    from headrace_daemon.host_log import HostLog
    from headrace_protocol.serving import Channel

log = structlog.get_logger("headrace.broker")

_SAVE_S: Final = 10.0
# Records with their bodies are in memory while these are asked about.
_HALVES_AT_ONCE: Final = 32
# A half that nobody can be asked about is stored again when so many came after it: a start reads
# all from the oldest open one on.
_BEHIND_MAX: Final = 10_000
_BEHIND_FACTOR: Final = 10
_MARK_NAME = "transaction"
_HOUR_MS: Final = 3_600_000


class _Asked(NamedTuple):
    """A half to be stored again, or given up. channel: who is asked next."""

    half: OpenHalf
    record: Waiting
    channel: Channel | None
    is_discarded: bool


class Transactions:
    """All transactions of this broker.

    discarded: halves that went to TRANS_CHECK_MAX_TIME_TOPIC. unreadable: halves whose record was
    damaged or gone when it was needed.
    """

    def __init__(
        self,
        config: BrokerConfig,
        store: MessageStore,
        writer: InnerWriter,
        topics: TopicTable,
        offsets: ConsumerOffsets,
        marks: Marks,
        metrics: TransactionMetrics,
        channels: Callable[[str], Sequence[Channel]],
        budget: HostBudget,
        host_log: HostLog,
    ) -> None:
        """Reads nothing yet. channels: the clients that are producers of a group."""
        self._config = config
        self._store = store
        self._writer = writer
        self._topics = topics
        self._offsets = offsets
        self._marks = marks
        self._metrics = metrics
        self._channels = channels
        self._budget = budget
        self._host_log = host_log
        self._halves = WaitingQueue(store, HALF_TOPIC, 0)
        self._ops = WaitingQueue(store, OP_HALF_TOPIC, 0)
        self.demand = HalfDemand(lambda: config.reject_transaction_message, self.admit)
        self.table = HalfTable(budget)
        self._is_naming = False
        self._must_write = trio.Event()
        # Discarded halves that were resumed since the start, by physical offset: what was just
        # stored may be missing from a search that began before.
        self._resumed: set[int] = set()
        self._to_resume: deque[tuple[InnerMessage, Callable[[], None]]] = deque()
        self._is_looking = trio.Lock()
        self._threads = trio.CapacityLimiter(1)
        self.discarded = self.unreadable = 0

    # -- start and stop ----------------------------------------------------------------------------

    def load(self) -> None:
        """Make the table from what is stored. Raises OSError."""
        half, op = (self._saved(queue) for queue in (self._halves, self._ops))
        log_offset = self._marks.log_offset(_MARK_NAME, {HALF_TOPIC: half, OP_HALF_TOPIC: op})
        half, op = (
            min(max(saved, queue.min_offset()), queue.end)
            for saved, queue in ((half, self._halves), (op, self._ops))
        )
        progress = Progress(half, op, log_offset)
        self.table = rebuilt(
            self._store, self._halves, self._ops, progress, self._due_ms, self._budget
        )
        if self.table.open:
            log.info("undecided transactions found", count=len(self.table.open))
        if self.table.to_name:
            self._must_write.set()

    def _saved(self, queue: WaitingQueue) -> int:
        return self._offsets.query(CONSUMER_GROUP, queue.topic, 0) or 0

    async def run(self) -> None:
        """Ask producers at intervals until cancelled."""
        while True:
            await trio.sleep(self._config.transaction_check_interval / 1000)
            try:
                await self.check()
            except OSError as error:
                log.error("half messages can't be read, retrying", reason=str(error))

    async def run_writing(self) -> None:
        """Write the op records that a turn could not write, and halves anew, until cancelled."""
        while True:
            await self._must_write.wait()
            self._must_write = trio.Event()
            self._is_naming = True
            try:
                while self.table.to_name:
                    await self._name()
            finally:
                self._is_naming = False
            while self._to_resume:
                await self._resume_first()

    async def _name(self) -> None:
        messages, counts = self._op_records(list(self.table.to_name))

        def note(number: int, _physical_offset: int) -> None:
            self.table.named(counts[number])

        await self._writer.append(messages, note)

    async def run_saving(self) -> None:
        """Save the progress at intervals until cancelled."""
        await save_at_intervals("transactions", self.save, lambda: _SAVE_S)

    async def save(self) -> None:
        """Note the progress for the next save of consumer offsets.

        Raises OSError, StoreNotWritable.
        """
        await self._look()
        await trio.to_thread.run_sync(self._metrics.save, self._counts(), limiter=self._threads)
        if not self.table.is_settled:
            return
        half, log_end = self.table.next_offset, self._store.commit_log.max_offset
        find_op = self._op_finder(half)
        await self._store.flusher.wait_flushed()
        op = await trio.to_thread.run_sync(find_op)
        self._commit(half, op)
        await trio.to_thread.run_sync(self._mark, half, op, log_end, limiter=self._threads)

    def finish(self) -> None:
        """Note the progress when no task runs any more. Raises OSError."""
        store = self._store
        self._metrics.save(self._counts())
        if self.table.is_settled and store.commit_log.life.is_writable:
            half, log_end = self.table.next_offset, store.commit_log.max_offset
            op = self._op_finder(half)()
            store.flusher.flush_log_now()
            self._commit(half, op)
            self._mark(half, op, log_end)

    def _commit(self, half: int, op: int) -> None:
        self._offsets.commit(CONSUMER_GROUP, HALF_TOPIC, 0, half)
        self._offsets.commit(CONSUMER_GROUP, OP_HALF_TOPIC, 0, op)

    def _mark(self, half: int, op: int, log_offset: int) -> None:
        self._marks.save(_MARK_NAME, Mark({HALF_TOPIC: half, OP_HALF_TOPIC: op}, log_offset))

    def _op_finder(self, half: int) -> Callable[[], int]:
        """Finds where the op queue was when a half was stored; reads the disk.

        Each half that is stored later is decided later, too.
        """
        ops, end = self._ops, self._ops.end
        if half >= self._halves.end or not end:
            return lambda: end
        find_unit = self._halves.unit_reader(half)
        return lambda: min(ops.first_after(find_unit()), end)

    def _counts(self) -> Counter[str]:
        return Counter(half.topic for half in self.table.open.values())

    # -- decisions ---------------------------------------------------------------------------------

    def admit(self, born_host: bytes) -> None:
        """Raise RequestError if a host leaves too many halves undecided to send another one."""
        self._budget.check(Host.of_address(born_host), HALF_BYTES)

    def ended(self, first: int, queue_offset: int, decision: Decision) -> None:
        """Note a decision whose record, if it has one, is in the log."""
        self.table.owe_names(self.table.end(first, queue_offset, decision))

    def write_ops(self) -> bool:
        """Append the op records that are due, at the end of a turn; returns whether it appended.

        What the store does not take now is written later.
        """
        if not self.table.to_name or self._is_naming:
            return False
        is_written = False
        try:
            for message, count in zip(*self._op_records(list(self.table.to_name)), strict=True):
                self._writer.append_now(message)
                self.table.named(count)
                is_written = True
        except StoreError:
            self._must_write.set()
        return is_written

    def _op_records(self, offsets: list[int]) -> tuple[list[InnerMessage], list[int]]:
        """Op records, and how many of the halves each names."""
        bytes_max = min(self._config.transaction_op_msg_max_size, self._config.max_message_size)
        now_ms, host = self._store.clock.now_ms(), self._store.settings.store_host
        records = list(halves.ops(offsets, bytes_max, now_ms, host))
        return [message for message, _ in records], [count for _, count in records]

    # -- second chances ----------------------------------------------------------------------------

    def resume(self, physical_offset: int, half: InnerMessage, then: Callable[[], None]) -> bool:
        """Store a discarded half as a new one soon; False if that was asked for before.

        physical_offset: of the discarded half. then: called when the new one is in the log.
        """
        if physical_offset in self._resumed:
            return False
        self._resumed.add(physical_offset)
        self._to_resume.append((half, then))
        self._must_write.set()
        return True

    async def _resume_first(self) -> None:
        half, then = self._to_resume[0]

        def note(_number: int, _physical_offset: int) -> None:
            self._to_resume.popleft()

        await self._writer.append([half], note)
        then()

    # -- checks ------------------------------------------------------------------------------------

    async def check(self) -> None:
        """Ask about each half that is due, and discard those that were asked about too often.

        Raises OSError.
        """
        await self._look()
        await self._name_superseded()
        now_ms = self._store.clock.now_ms()
        due = [half for half in self.table.open.values() if self._is_due(half, now_ms)]
        for start in range(0, len(due), _HALVES_AT_ONCE):
            await self._check_some(due[start : start + _HALVES_AT_ONCE], now_ms)

    def _is_due(self, half: OpenHalf, now_ms: int) -> bool:
        """Whether a producer is asked about a half, which has ended its time or the broker's."""
        is_clock_behind = half.stored_ms > now_ms
        return half.due_ms <= now_ms or is_clock_behind or self._is_too_old(half, now_ms)

    async def _check_some(self, due: Iterable[OpenHalf], now_ms: int) -> None:
        asked: list[_Asked] = []
        for half in due:
            is_discarded = self._is_given_up(half, now_ms)
            channel = None if is_discarded else self._channel(half)
            if is_discarded or channel is not None or self._is_behind(half):
                records = await self._read([half.newest])
                asked += [_Asked(half, record, channel, is_discarded) for record in records]
        # Reading took a while.
        asked = [one for one in asked if self.table.open.get(one.half.first) is one.half]
        await self._discard([one for one in asked if one.is_discarded])
        await self._copy([one for one in asked if not one.is_discarded])

    def _is_behind(self, half: OpenHalf) -> bool:
        """Whether a half makes starts read many that are decided."""
        behind_max = max(_BEHIND_MAX, _BEHIND_FACTOR * len(self.table.open))
        return self._halves.end - half.newest > behind_max

    def _is_given_up(self, half: OpenHalf, now_ms: int) -> bool:
        is_asked_enough = half.times >= self._config.transaction_check_max
        return (is_asked_enough and not half.is_check_owed) or self._is_too_old(half, now_ms)

    def _is_too_old(self, half: OpenHalf, now_ms: int) -> bool:
        return now_ms - half.stored_ms > self._config.file_reserved_time * _HOUR_MS

    def _channel(self, half: OpenHalf) -> Channel | None:
        """A live producer of the half's group, another one each time."""
        live = [one for one in self._channels(half.group) if one.is_open and not one.is_slow]
        return live[(half.first + half.times) % len(live)] if live else None

    async def _discard(self, asked: list[_Asked]) -> None:
        """Give halves up: a later decision on them is refused."""
        if not asked:
            return
        self._topics.create_system_topic(CHECK_MAX_TIME_TOPIC)
        messages = [halves.discarded(one.record) for one in asked]
        copies = []
        for (half, _, _, _), message in zip(asked, messages, strict=True):
            self._host_log.warning(
                message.client,
                "transaction discarded, nobody decided it",
                group=half.group,
                topic=half.topic,
                checks=half.times,
                kept_in=CHECK_MAX_TIME_TOPIC,
            )
            copies.append(self.table.end(half.first, half.newest, Decision.DISCARD))
        self.discarded += len(asked)

        def note(number: int, _physical_offset: int) -> None:
            self.table.owe_names(copies[number])
            self._must_write.set()

        await self._writer.append(messages, note)

    async def _copy(self, asked: list[_Asked]) -> None:
        """Store halves again with one check more, and ask about them."""
        to_store = [one for one in asked if one.channel is None or not one.half.is_check_owed]
        messages = [
            halves.copy(one.record, one.half.first, one.half.times + (one.channel is not None))
            for one in to_store
        ]
        newest = {one.half.first: one.record for one in asked}

        def note(number: int, physical_offset: int) -> None:
            one = to_store[number]
            if one.channel is not None:
                one.half.times += 1
                one.half.is_check_owed = True
            if physical_offset >= 0:  # else it is too large to be stored again
                queue_offset = self._store.queue(HALF_TOPIC, 0).next_offset - 1
                self._note_copy(one.half, queue_offset, physical_offset)
                newest[one.half.first] = one.record._replace(
                    queue_offset=queue_offset,
                    physical_offset=physical_offset,
                    properties=messages[number].properties,
                    store_timestamp=self._store.commit_log.now_ms,
                )

        await self._writer.append(messages, note)
        await self._name_superseded()
        # The answers to the checks have to find the copies.
        await self._writer.published(self._halves)
        for one in asked:
            if one.half.is_check_owed:
                self._ask(one.half, newest[one.half.first])

    async def _name_superseded(self) -> None:
        offsets, self.table.superseded = self.table.superseded, []
        records, _ = self._op_records(offsets)
        await self._writer.append(list(map(halves.copied, records)), lambda _number, _at: None)

    def _note_copy(self, half: OpenHalf, queue_offset: int, physical_offset: int) -> None:
        if self.table.open.get(half.first) is half:
            self.table.copied(half, queue_offset, physical_offset)
        else:  # decided while this waited for room
            decision = self.table.decision(half.newest)
            self.table.ended([queue_offset], decision)
            self.table.owe_names([queue_offset])
            self._must_write.set()

    def _ask(self, half: OpenHalf, record: Waiting) -> None:
        """Send the check that the half owes, unless it was decided or everybody has left."""
        channel = self._channel(half)
        if channel is None or self.table.open.get(half.first) is not half:
            return
        names, host = HalfNames(record.properties), self._store.settings.store_host
        channel.write(halves.check(record, names, self._config.broker_name, host))
        half.is_check_owed = False

    # -- reading -----------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Enter the halves that came since the last look and are not decided. Raises OSError."""
        async with self._is_looking:
            end = self._halves.end
            unseen = self.table.unseen(end)
            for start in range(0, len(unseen), RECORDS_AT_ONCE):
                for record in await self._read(unseen[start : start + RECORDS_AT_ONCE]):
                    names = HalfNames(record.properties)
                    first = self.table.first_of(record.queue_offset, names.first_offset)
                    if first == record.queue_offset and self.table.is_open(first):
                        self._enter(record, names)
            self.table.seen = max(self.table.seen, end)

    def _enter(self, record: Waiting, names: HalfNames) -> None:
        if record.queue_offset in self.table.open:
            return
        self.table.add(
            OpenHalf(
                record.queue_offset,
                [record.queue_offset],
                record.physical_offset,
                Host.of_address(record.born_host),
                names.group,
                names.topic,
                names.times,
                record.store_timestamp,
                self._due_ms(record, names),
            )
        )

    def _due_ms(self, record: Waiting, names: HalfNames) -> int:
        immunity_ms = max(names.immunity_ms, self._config.transaction_time_out)
        return record.store_timestamp + immunity_ms

    async def _read(self, offsets: list[int]) -> list[Waiting]:
        """The halves at these queue offsets, in order; those that can't be read are given up."""
        records: list[Waiting] = []
        first = 0
        while first < len(offsets):
            end = first + 1
            while end < len(offsets) and offsets[end] == offsets[end - 1] + 1:
                end += 1
            items = await self._halves.read(offsets[first], offsets[end - 1] + 1)
            found = [item for item in items if not isinstance(item, Unreadable)]
            records += found
            self._lose(set(offsets[first:end]).difference(item.queue_offset for item in found))
            first = end
        return records

    def _lose(self, offsets: Iterable[int]) -> None:
        """Give up halves whose record is damaged or went with its log file."""
        for offset in sorted(offsets):
            first = self.table.first_of(offset)
            if not self.table.is_open(first):
                continue
            self.unreadable += 1
            log.error("half message can't be read", queue_offset=offset)
            self.table.owe_names(self.table.end(first, offset, Decision.DISCARD))
            self._must_write.set()

    # -- for others --------------------------------------------------------------------------------

    def runtime_info(self) -> dict[str, str]:
        """The counts, for GET_BROKER_RUNTIME_INFO."""
        return {
            "transactionsOpen": str(len(self.table.open)),
            "transactionsDiscarded": str(self.discarded),
            "transactionsUnreadable": str(self.unreadable),
        }

    def next_offset(self, queue_id: int) -> int | None:
        """Queue offset of the oldest half that is not decided; None for a queue of no halves."""
        return None if queue_id else self.table.settled_offset
