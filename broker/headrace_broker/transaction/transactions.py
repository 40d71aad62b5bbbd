"""Keeps half messages until their producers decide, and asks producers that do not.

What always holds:

1. The log is the truth: a start rebuilds the table of transactions from the half queue, the op
   queue and the commits in the log. The offsets of both queues are saved together, after a flush
   of all that they count: a half at or after the one offset has its op record at or after the
   other.
2. A commit precedes the op record that names its half; one turn writes both. A start that finds a
   commit without its op record writes the op record.
3. A decided half is never checked, and a check counts only once it is written to a client.
4. Nothing is lost silently: a half without a decision goes to TRANS_CHECK_MAX_TIME_TOPIC in the
   end, and an unreadable one is logged and counted.

Source: docs/protocol.md "Transactions"; tests/broker/transaction/test_transactions.py.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog
import trio

from headrace_broker.host_budget import Host
from headrace_broker.inner.saving import save_at_intervals
from headrace_broker.inner.waiting import RECORDS_AT_ONCE, Unreadable, Waiting, WaitingQueue
from headrace_broker.inner.writer import RETRY_S
from headrace_broker.store.errors import StoreError
from headrace_broker.store.recovery import NOTHING, Scan, read_log
from headrace_broker.transaction import halves
from headrace_broker.transaction.halves import (
    Decision,
    HalfDemand,
    HalfNames,
)
from headrace_broker.transaction.rebuild import Checkpoint, Decisions, open_half, rebuilt
from headrace_broker.transaction.table import HALF_BYTES, HalfTable, OpenHalf
from headrace_protocol.message import property_number
from headrace_protocol.outages import Outages
from headrace_protocol.system_topics import (
    CHECK_MAX_TIME_TOPIC,
    HALF_TOPIC,
    OP_HALF_TOPIC,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from headrace_broker.config import BrokerConfig
    from headrace_broker.host_budget import HostBudget
    from headrace_broker.inner.writer import InnerMessage, InnerWriter
    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.topics.table import TopicTable
    from headrace_broker.transaction.files import TransactionFiles
    from headrace_daemon.host_log import HostLog
    from headrace_protocol.channel import Channel
    from headrace_protocol.message import StoredMessage

log = structlog.get_logger("headrace.broker")

_SAVE_S: Final = 10.0
_UNSEEN_MAX: Final = 32_768
# Open halves of which the due ones are found in one step: less than a millisecond.
_LOOKED_AT_ONCE: Final = 1024
# Halves to check at once: their bodies are in memory meanwhile.
_HALVES_AT_ONCE: Final = 32
_BEHIND_MAX: Final = 10_000
_BEHIND_FACTOR: Final = 10
_HALVES: Final = "the queue of half messages"
_HOUR_MS: Final = 3_600_000


class Producers(NamedTuple):
    """Producers of transactions, as the broker knows them.

    channels: the connected ones of a group that may send to a topic. budget, host_log: of their
    hosts.
    """

    channels: Callable[[str, str], Sequence[Channel]]
    budget: HostBudget
    host_log: HostLog


class _Asked(NamedTuple):
    """A half to be stored again or discarded. channel: of the producer to ask, if any."""

    half: OpenHalf
    record: Waiting
    channel: Channel | None
    is_discarded: bool


class Transactions:
    """All transactions of this broker.

    discarded: number of halves that went to TRANS_CHECK_MAX_TIME_TOPIC. unreadable: number of
    halves whose record was damaged or gone.
    is_naming: whether a task writes op records, so that turns do not.
    unseen_max: new halves, decided ones included, that no look has counted for their hosts yet.
    behind_max: a half whose group has no connected producer is stored again once this many came
    after it, because a start reads the queue from the oldest open half on.
    """

    def __init__(
        self,
        config: BrokerConfig,
        store: MessageStore,
        writer: InnerWriter,
        topics: TopicTable,
        files: TransactionFiles,
        producers: Producers,
    ) -> None:
        """Reads nothing yet."""
        self._config = config
        self._store = store
        self._writer = writer
        self._topics = topics
        self._files = files
        self._producers = producers
        self._outages = Outages(log.error, ended=log.warning)
        self._halves = WaitingQueue(store, HALF_TOPIC, 0)
        self._ops = WaitingQueue(store, OP_HALF_TOPIC, 0)
        self.demand = HalfDemand(lambda: config.reject_transaction_message, self.admit)
        self.table = HalfTable(producers.budget)
        self._decisions = Decisions()
        self.scan = Scan(self.scan_from, self._decisions.take)
        self.is_naming = False
        self._must_write = trio.Event()
        self._must_look = trio.Event()
        # Physical offsets of the discarded halves that were resumed since the start: a search of
        # the index that began earlier may miss the new half.
        self._resumed: set[int] = set()
        self._to_resume: deque[tuple[InnerMessage, Callable[[], None]]] = deque()
        self._is_looking = trio.Lock()
        self._threads = trio.CapacityLimiter(1)
        self.discarded = self.unreadable = 0
        self.unseen_max, self.behind_max = _UNSEEN_MAX, _BEHIND_MAX

    # -- start and stop ----------------------------------------------------------------------------

    def scan_from(self) -> int:
        """Physical offset from which the log may hold decisions that no op record names."""
        log_offset = self._files.load().log_offset
        return NOTHING if log_offset is None else log_offset

    def load(self) -> None:
        """Rebuild the table from the store. Raises OSError."""
        saved = self._files.load()
        half, op = (
            min(max(offset, queue.min_offset()), queue.end)
            for offset, queue in ((saved.half, self._halves), (saved.op, self._ops))
        )
        checkpoint = Checkpoint(half, op, saved.log_offset)
        self.table = rebuilt(
            self._halves,
            self._ops,
            checkpoint,
            self._due_ms,
            self._producers.budget,
            self._decisions_of,
        )
        self._decisions = Decisions()
        if self.table.open:
            log.info("undecided transactions found", count=len(self.table.open))
        if self.table.to_name:
            self._must_write.set()

    def _decisions_of(self, halves: list[int]) -> dict[int, Decision]:
        if halves and self._files.load().log_offset is None:
            read_log(self._decisions.take, self._store.commit_log, min(halves))
        return self._decisions.of(halves)

    async def run(self) -> None:
        """Ask producers at intervals until cancelled."""
        while True:
            await trio.sleep(self._config.transaction_check_interval / 1000)
            try:
                await self.check()
                self._outages.worked(_HALVES, part="checks")
            except OSError as error:
                self._outages.failed(_HALVES, error, part="checks")

    async def run_looking(self) -> None:
        """Look at halves as soon as many are new, until cancelled, so that they count soon."""
        while True:
            await self._must_look.wait()
            self._must_look = trio.Event()
            try:
                await self._look()
                self._outages.worked(_HALVES, part="looks")
            except OSError as error:
                self._outages.failed(_HALVES, error, part="looks")
                await trio.sleep(RETRY_S)

    async def run_writing(self) -> None:
        """Write the op records that a turn could not write, and halves anew, until cancelled."""
        while True:
            await self._must_write.wait()
            self._must_write = trio.Event()
            self.is_naming = True
            try:
                while self.table.to_name:
                    await self._name()
            finally:
                self.is_naming = False
            while self._to_resume:
                await self._resume_first()

    async def _name(self) -> None:
        messages, counts = self._op_records(list(self.table.to_name))

        def note(number: int, _physical_offset: int) -> None:
            self.table.named(counts[number])

        await self._writer.append(messages, note)

    async def run_saving(self) -> None:
        """Save the checkpoint at intervals until cancelled."""
        await save_at_intervals("transactions", self.save, lambda: _SAVE_S)

    async def save(self) -> None:
        """Save the checkpoint, and set the consumer offsets, which are for Apache's brokers.

        Raises OSError, StoreNotWritable.
        """
        await self._look()
        files = self._files
        counts = files.counts.body(self._counts())
        await trio.to_thread.run_sync(files.counts.save, counts, limiter=self._threads)
        if not self.table.is_settled:
            return
        half, log_end = self.table.next_offset, self._store.commit_log.max_offset
        find_op = self._op_finder(half)
        await self._store.flusher.wait_flushed()
        op = await trio.to_thread.run_sync(find_op)
        checkpoint = Checkpoint(half, op, log_end)
        await trio.to_thread.run_sync(files.position.save, checkpoint, limiter=self._threads)
        files.commit(checkpoint)

    def finish(self) -> None:
        """As ``save``, after all tasks have ended. Raises OSError."""
        store, files = self._store, self._files
        files.counts.save(files.counts.body(self._counts()))
        if self.table.is_settled and store.commit_log.life.is_writable:
            half, log_end = self.table.next_offset, store.commit_log.max_offset
            op = self._op_finder(half)()
            store.flusher.flush_log_now()
            checkpoint = Checkpoint(half, op, log_end)
            files.position.save(checkpoint)
            files.commit(checkpoint)

    def _op_finder(self, half: int) -> Callable[[], int]:
        """A function for any thread: the end of the op queue when a half was stored.

        The op records of that half and of all later ones come after it.
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
        self._producers.budget.check(Host.of_address(born_host), HALF_BYTES)
        if self._halves.appended_end - self.table.seen >= self.unseen_max:
            self._must_look.set()

    def ended(self, first: int, queue_offset: int, decision: Decision) -> None:
        """Note a decision; the message of a commit is in the log already."""
        self.table.owe_names(self.table.end(first, queue_offset, decision))

    def write_ops(self) -> bool:
        """Append the op records that are due, at the end of a turn; returns whether there were any.

        ``run_writing`` appends later those that the store rejects now.
        """
        if not self.table.to_name or self.is_naming:
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
        """Op records, and the number of halves that each names."""
        bytes_max = min(self._config.transaction_op_msg_max_size, self._config.max_message_size)
        now_ms, host = self._store.clock.now_ms(), self._store.settings.store_host
        records = list(halves.ops(offsets, bytes_max, now_ms, host))
        return [message for message, _ in records], [count for _, count in records]

    # -- second chances ----------------------------------------------------------------------------

    def resume(self, physical_offset: int, half: InnerMessage, then: Callable[[], None]) -> bool:
        """Store a discarded half as a new one soon; False if that was asked for before.

        physical_offset: of the discarded half. then: called once the new one is in the log.
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
        """Check each half that is due, and discard those that are too old or were checked enough.

        Raises OSError.
        """
        await self._look()
        await self._name_superseded()
        now_ms = self._store.clock.now_ms()
        open_halves = list(self.table.open.values())
        for start in range(0, len(open_halves), _LOOKED_AT_ONCE):
            some = open_halves[start : start + _LOOKED_AT_ONCE]
            due = [half for half in some if self._is_due(half, now_ms)]
            for number in range(0, len(due), _HALVES_AT_ONCE):
                await self._check_some(due[number : number + _HALVES_AT_ONCE], now_ms)
            await trio.lowlevel.checkpoint()

    def _is_due(self, half: OpenHalf, now_ms: int) -> bool:
        """True if a half is to be checked, or has to be discarded without a check."""
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
        # Some were decided while their records were read.
        asked = [one for one in asked if self.table.open.get(one.half.first) is one.half]
        await self._discard([one for one in asked if one.is_discarded])
        await self._copy([one for one in asked if not one.is_discarded])

    def _is_behind(self, half: OpenHalf) -> bool:
        """True if a start would read many decided halves because of this one."""
        behind_max = max(self.behind_max, _BEHIND_FACTOR * len(self.table.open))
        return self._halves.end - half.newest > behind_max

    def _is_given_up(self, half: OpenHalf, now_ms: int) -> bool:
        is_asked_enough = half.times >= self._config.transaction_check_max
        return (is_asked_enough and not half.is_check_owed) or self._is_too_old(half, now_ms)

    def _is_too_old(self, half: OpenHalf, now_ms: int) -> bool:
        return now_ms - half.stored_ms > self._config.file_reserved_time * _HOUR_MS

    def _channel(self, half: OpenHalf) -> Channel | None:
        """A connected producer of the half's group, another one for each check."""
        live = [
            one
            for one in self._producers.channels(half.group, half.topic)
            if one.is_open and not one.is_slow
        ]
        return live[(half.first + half.times) % len(live)] if live else None

    async def _discard(self, asked: list[_Asked]) -> None:
        """Discard halves; later decisions about them are rejected."""
        if not asked:
            return
        self._topics.create_system_topic(CHECK_MAX_TIME_TOPIC)
        messages = [halves.discarded(one.record) for one in asked]
        copies = []
        for (half, _, _, _), message in zip(asked, messages, strict=True):
            self._producers.host_log.warning(
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
        """Store halves again, and check those whose producer is connected."""
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
            if physical_offset >= 0:  # not too large to be stored again
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
        """Send the check that is owed, unless the half was decided or all producers have left."""
        channel = self._channel(half)
        if channel is None or self.table.open.get(half.first) is not half:
            return
        names, host = HalfNames(record.properties), self._store.settings.store_host
        channel.write(halves.check(record, names, self._config.broker_name, host))
        half.is_check_owed = False

    # -- reading -----------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Enter the undecided halves that were stored since the last look. Raises OSError."""
        async with self._is_looking:
            end = self._halves.end
            unseen = self.table.unseen(end)
            for start in range(0, len(unseen), RECORDS_AT_ONCE):
                for record in await self._read(unseen[start : start + RECORDS_AT_ONCE]):
                    names = HalfNames(record.properties)
                    first = self.table.first_of(record.queue_offset, names.first_offset)
                    is_original = first == record.queue_offset
                    if is_original and self.table.is_open(first) and first not in self.table.open:
                        self.table.add(open_half(first, [(record, names)], self._due_ms))
            self.table.seen = max(self.table.seen, end)

    def _due_ms(self, record: Waiting, names: HalfNames) -> int:
        immunity_ms = max(names.immunity_ms, self._config.transaction_time_out)
        return record.store_timestamp + immunity_ms

    async def _read(self, offsets: list[int]) -> list[Waiting]:
        """The halves at these queue offsets, in order; unreadable ones are discarded.

        Raises OSError.
        """
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
        """Discard halves whose record is damaged, or was removed with its log file."""
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

    def due_ms(self, message: StoredMessage) -> int | None:
        """0 for a half whose transaction is undecided; None for any other."""
        stated = property_number(message.raw_properties, b"TRAN_PREPARED_QUEUE_OFFSET", -1)
        first = self.table.first_of(message.queue_offset, None if stated < 0 else stated)
        return 0 if self.table.is_open(first) else None

    def next_offset(self, queue_id: int) -> int | None:
        """Queue offset of the oldest undecided half; None for a queue without halves."""
        return None if queue_id else self.table.settled_offset
