"""Staged writes: blocks kept aside until their micro-batch is decided, then appended exactly once.

"Batch" in this folder is a micro-batch. Requests are served on the loop, and await what a thread
does with files. ``run`` applies decided batches one after the other.
Source: docs/protocol.md "Staged writes".
"""

from __future__ import annotations

import math
import secrets
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np
import structlog
import trio

from headrace_broker.host_budget import HostBudget
from headrace_broker.staging.blocks import StagedBlock, StagedRecords, read_blocks
from headrace_broker.staging.known import KnownQueries
from headrace_broker.staging.query import BLOCKS_SUFFIX, Attempt, Event, Phase, Query
from headrace_broker.staging.queues import Settlements
from headrace_broker.staging.state import QueryState
from headrace_broker.store.errors import StoreError
from headrace_broker.store.files.filesystem import make_private
from headrace_broker.store.recovery import NOTHING, Scan
from headrace_daemon.slices import in_slices
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import Lane, RequestError
from headrace_protocol.message import BORN_HOST_V6, STORE_HOST_V6
from headrace_protocol.serving import run_at_once
from headrace_protocol.waiting import Until, fetch, take_break

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator
    from pathlib import Path

    from headrace_broker.host_budget import Host
    from headrace_broker.staging.queues import Places, Queues
    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.store.store_queue import StoreQueue
    from headrace_broker.store.upkeep import StartSoon
    from headrace_protocol.columns import Buffer, RecordColumns
    from headrace_protocol.headers import StageSealHeader, StageSendHeader
    from headrace_protocol.serving import RunLong
    from headrace_protocol.staging import Decision, StagedAttempt
    from headrace_protocol.waiting import Run

Result = TypeVar("Result")

log = structlog.get_logger("headrace.broker")

FOLDER = "staged"
STAGED_WRITES: Final = Lane("staged writes", threads=4, outlives_client=True)
_EXPIRY_INTERVAL_S = 60.0
# Flushed while more blocks arrive, so that the seal has less to wait for.
_FLUSH_BYTES = 16 * 1024 * 1024
# A hop to a thread costs about as much as a block.
_BLOCKS_AT_ONCE = 4
# Renames per slice, half a millisecond.
_VOIDED_AT_ONCE = 32
# Looked at per slice, a quarter of a millisecond.
_QUERIES_AT_ONCE = 128
# Memory of each, measured by tests/abuse/test_kept_for_hosts.py.
_QUERY_BYTES = 4096
_ATTEMPT_BYTES = 2048
_DECIDED_BYTES = 512
_TAG_BITS = 62


class Staging:
    """The staged writes of all queries at one broker.

    on_stored: called after an append with the topic, message count and body bytes.
    """

    def __init__(
        self,
        store: MessageStore,
        broker_name: str,
        reserved_ms: int,
        on_stored: Callable[[str, int, int], None],
        queues: Queues,
        budget: HostBudget | None = None,
        start_soon: StartSoon = trio.Nursery.start_soon,
        run_long: RunLong = run_at_once,
    ) -> None:
        """Does not touch the disk.

        reserved_ms: age at which attempts without a decision are removed.
        start_soon: starts a loop; each of the loops can restart after an error.
        run_long: runs work in slices.
        """
        self._budget = budget or HostBudget()
        self.broker_name = broker_name
        self._store = store
        self._files = store.fs
        self._root = store.root / FOLDER
        self._known = KnownQueries(store.root, store.fs)
        self._reserved_ms = reserved_ms
        self._on_stored = on_stored
        self._queues = queues
        self._settlements = Settlements(self._pending_for, self._resume, run_long)
        self._queries: dict[str, Query] = {}
        # The number of records in the log by the tag of their query's pending decision.
        self._tagged: Counter[int] = Counter()
        self._tags = np.empty(0, np.int64)
        self.scan = Scan(self.scan_from, self._count_tagged)
        self._to_apply: deque[Query] = deque()
        self._apply_requested = trio.Event()
        self._to_flush: deque[tuple[Query, Attempt]] = deque()
        self._flush_requested = trio.Event()
        self._start_soon = start_soon

    # -- start -------------------------------------------------------------------------------------

    def scan_from(self) -> int:
        """Read each query's state; return the offset from which the log may hold pending records.

        Raises OSError, StoreFormatError.
        """
        known = self._known.load()
        for query_id in sorted(known.union(folder.name for folder in self._root.glob("*"))):
            query = self._queries[query_id] = self._new(query_id)
            query.load(is_known=query_id in known)
        pending = [query.state for query in self._queries.values() if query.state.pending]
        self._tags = np.array([state.tag for state in pending], np.int64)
        return min((state.from_offset for state in pending), default=NOTHING)

    def _count_tagged(self, records: RecordColumns) -> None:
        """Count the records that carry the tag of a pending decision."""
        tags = records.prepared_transaction_offset
        is_ours = records.sys_flag & (BORN_HOST_V6 | STORE_HOST_V6) == 0
        self._tagged.update(tags[is_ours & np.isin(tags, self._tags)].tolist())

    def load(self) -> None:
        """Find batches that a killed broker had begun to apply, for ``run`` to resume.

        After the scan of the log, and before anything is appended. Raises OSError.
        """
        for query in self._queries.values():
            if query.phase is Phase.DAMAGED:
                log.error("rejecting the staged writes of a query", reason=str(query.problem))
            else:
                self._recover(query)
        self._known.add(*(name for name, query in self._queries.items() if query.has_state))

    def _recover(self, query: Query) -> None:
        query.remove_void()
        if query.state.pending is None:
            return
        self._lower_from_offset(query)
        query.applied_records = self._tagged[query.state.tag]
        if query.applied_records:
            log.info("resuming a staged batch", query=query.folder.name)
            self._start_applying(query)

    def _lower_from_offset(self, query: Query) -> None:
        # After a power cut took the end of the log, new records may lie before from_offset.
        log_end = self._store.commit_log.max_offset
        if query.state.from_offset > log_end:
            state = query.state
            query.decide(QueryState(state.applied_batch_id, state.decision, state.tag, log_end))
            query.save()

    # -- staging -----------------------------------------------------------------------------------

    async def stage(self, header: StageSendHeader, body: Buffer, sys_flag: int, host: Host) -> None:
        """Keep a checked block; ignore one that is there already. Raises RequestError."""
        query = self._query(header.query_id)
        attempt = await self._attempt(query, header) or self._begin(query, header, host)
        if header.block_number < attempt.block_count:
            return  # sent again because its answer was lost
        if header.block_number > attempt.block_count:
            raise _rejected(
                f"block {header.block_number} of attempt {header.attempt}: this broker has "
                f"{attempt.block_count} of them, so some were lost; begin another attempt"
            )
        block = StagedBlock(header.topic, header.queue_id, header.count, sys_flag, body)
        try:
            make_private(query.folder)
            attempt.append(block, self._files)
        except OSError as error:
            if not attempt.block_count:
                self._drop_attempt(query, header.batch_id, header.attempt)
            raise self._unavailable(error) from error
        if attempt.file_bytes - attempt.flushed_bytes >= _FLUSH_BYTES:
            attempt.flushed_bytes = attempt.file_bytes
            self._to_flush.append((query, attempt))
            self._flush_requested.set()

    async def seal(self, header: StageSealHeader) -> Attempt:
        """An attempt, once it is completely on disk. Raises RequestError."""
        while True:
            query = self._query(header.query_id)
            attempt = await self._attempt(query, header)
            if attempt is None:
                raise self._unknown_attempt(header.attempt)
            if attempt.block_count != header.block_count:
                raise _rejected(
                    f"attempt {header.attempt} has {attempt.block_count} blocks at this broker, "
                    f"not {header.block_count}; begin another attempt"
                )
            if attempt.is_on_disk:
                return attempt
            await self._in_thread(partial(self._sync, query, attempt))

    def _sync(self, query: Query, attempt: Attempt) -> None:
        try:
            query.sync_folder()
            attempt.sync(self._files)
        except OSError:
            # Its pages may be gone, so a retry would prove nothing.
            query.void([attempt.path])
            raise

    async def _attempt(
        self, query: Query, header: StageSendHeader | StageSealHeader
    ) -> Attempt | None:
        """An attempt, or None if it is unknown."""
        key = header.batch_id, header.attempt
        if key not in query.attempts and query.path(*key).exists():
            self._queries[header.query_id] = query
            await self._in_thread(partial(query.recover_attempt, *key))
        return query.attempts.get(key)

    def _begin(self, query: Query, header: StageSendHeader, host: Host) -> Attempt:
        if header.block_number:
            raise self._unknown_attempt(header.attempt)
        query_id, key = header.query_id, (header.batch_id, header.attempt)
        self._register(query, host)
        self._budget.keep(host, (query_id, *key), _ATTEMPT_BYTES)
        attempt = query.attempts[key] = Attempt(query.path(*key))
        return attempt

    def _unknown_attempt(self, name: str) -> RequestError:
        return _rejected(
            f"attempt {name} is not known to broker {self.broker_name}: it was discarded, or "
            "lost in a crash of the machine; begin another attempt"
        )

    # -- deciding ----------------------------------------------------------------------------------

    async def state(self, query_id: str) -> QueryState:
        """The state of a query, once it is on disk. Raises RequestError."""
        return (await self._saved(query_id)).state

    async def decide(
        self, query_id: str, decision: Decision, replaces: str | None, host: Host
    ) -> Decision:
        """The decision that holds, on disk: the first for its batch, or that of a later batch.

        replaces: id of the decision that this one replaces. Raises RequestError.
        """
        while True:
            query = await self._saved(query_id)
            held = query.state.decision
            if held is not None and not _may_replace(query, held, decision, replaces):
                return held
            self._check_complete(query, decision)
            if (unread := self._unread(query, decision)) is not None:
                await self._in_thread(partial(query.recover_attempt, *unread))
                continue
            self._check_led(query, decision)
            self._register(query, host)
            self._budget.keep(host, ("decision", query_id), _decision_bytes(decision))
            applied = query.state.applied_batch_id
            tag = secrets.randbits(_TAG_BITS) + 1
            query.decide(QueryState(applied, decision, tag, self._store.commit_log.max_offset))

    def _unread(self, query: Query, decision: Decision) -> tuple[int, str] | None:
        """An attempt from before a restart, whose queues may have moved; None without one."""
        if self._queues.can_move():
            for staged in decision.part(self.broker_name):
                if (decision.batch_id, staged.attempt) not in query.attempts:
                    return decision.batch_id, staged.attempt
        return None

    def _check_led(self, query: Query, decision: Decision) -> None:
        """Reject a decision for queues that have moved, or are about to."""
        if not self._queues.can_move():
            return
        for staged in decision.part(self.broker_name):
            for topic, queue_id in query.attempts[decision.batch_id, staged.attempt].queues:
                is_closing = (topic, queue_id) in self._settlements.closing
                if is_closing or self._queues.has_moved(topic, queue_id):
                    raise _rejected(
                        f"queue {queue_id} of topic {topic} has moved from broker "
                        f"{self.broker_name} since attempt {staged.attempt} was staged; write the "
                        "batch again"
                    )

    def _check_complete(self, query: Query, decision: Decision) -> None:
        for staged in decision.part(self.broker_name):
            if not query.is_complete(decision.batch_id, staged):
                raise _rejected(
                    f"attempt {staged.attempt} of batch {decision.batch_id} is not at broker "
                    f"{self.broker_name} as it was sealed: it was discarded, or expired; write "
                    "the batch again"
                )

    async def commit(self, query_id: str, batch_id: int, decision_id: str) -> bool:
        """Append the decided records; return once they are in the log and on disk.

        Returns whether they were before. Raises RequestError; a later commit then resumes.
        """
        query = await self._saved(query_id)
        upto = query.state.applied_batch_id
        if upto >= batch_id:
            await self._remove_sliced(
                query, await self._in_thread(partial(query.paths_up_to, upto))
            )
            return True
        held = query.state.decision
        if held is None or (held.batch_id, held.decision_id) != (batch_id, decision_id):
            raise _rejected(
                f"broker {self.broker_name} holds another decision for batch {batch_id} of query "
                f"{query_id}: ask for its state and follow that decision"
            )
        problem = await Until("the records of a batch", partial(self._apply_for, query))
        if problem is not None:
            raise RequestError(
                ResponseCode.SERVICE_NOT_AVAILABLE,
                f"the batch is decided, but can't be completed now: {problem}; commit it again",
            )
        return False

    def _apply_for(self, query: Query, run: Run) -> None:
        query.waiters.append(run.resume)
        self._start_applying(query)

    async def abort(self, query_id: str, batch_id: int, attempts: Iterable[str]) -> None:
        """Remove attempts, except those that the pending decision names. Raises RequestError."""
        query = self._query(query_id)
        await self._remove_sliced(query, (query.path(batch_id, name) for name in attempts))

    async def _remove_sliced(self, query: Query, paths: Iterable[Path]) -> None:
        has_voided = False
        remaining = iter(paths)
        while some := list(islice(remaining, _VOIDED_AT_ONCE)):
            has_voided |= query.void(some)
            await take_break()
        if has_voided:
            await self._in_thread(query.remove_void)

    async def forget(self, query_id: str) -> None:
        """Remove the state of a query that won't come back. Raises RequestError."""
        while True:
            query = await self._saved(query_id)
            if query.state.pending:
                raise _rejected(
                    f"query {query_id} has a pending batch {query.state.pending.batch_id}: commit "
                    "it"
                )
            if query_id not in self._known:
                break
            await self._in_thread(partial(self._known.drop, query_id))
        self._drop(query)
        try:
            query.forget()
        except OSError as error:
            raise self._unavailable(error) from error

    # -- queues that move --------------------------------------------------------------------------

    def settle(
        self, topic: str, queue_ids: Iterable[int], then: Callable[[Exception | None], None]
    ) -> None:
        """Call back once the batches decided for queues of a topic are in the log.

        No other is decided for them until ``moved``. The error is a PendingBatch.
        """
        places = frozenset((topic, queue_id) for queue_id in queue_ids)
        self._settlements.begin(places, then)

    def moved(self, topic: str, queue_ids: Iterable[int]) -> None:
        """End what ``settle`` began."""
        self._settlements.end(frozenset((topic, queue_id) for queue_id in queue_ids))

    def _resume(self, query: Query) -> None:
        """Apply a pending batch that no other broker has a part of.

        Others may lack their part of a decision, which then may still be replaced.
        """
        pending = query.state.pending
        is_ours_alone = pending is not None and set(pending.attempts) == {self.broker_name}
        if is_ours_alone and query.phase is Phase.DECIDED:
            self._start_applying(query)

    def _pending_for(self, places: Places) -> Iterator[Query | None]:
        # A later decision is not for these queues, which are closing.
        for number, query in enumerate(list(self._queries.values()), 1):
            pending = query.state.pending
            if pending is not None and self._is_for(query, pending, places):
                yield query
            if not number % _QUERIES_AT_ONCE:
                yield None

    def _is_for(self, query: Query, pending: Decision, places: Places) -> bool:
        for staged in pending.part(self.broker_name):
            attempt = query.attempts.get((pending.batch_id, staged.attempt))
            # The blocks of an attempt from before a restart may be for any queue.
            if attempt is None or attempt.queues & places:
                return True
        return False

    # -- shared helpers ----------------------------------------------------------------------------

    def _new(self, query_id: str) -> Query:
        return Query(self._root / query_id, self._files, self._drop_attempt, self._known)

    def _register(self, query: Query, host: Host) -> None:
        """Keep a query that now has state, and count it for ``host``. Raises RequestError."""
        query_id = query.folder.name
        if query_id not in self._queries:
            self._budget.keep(host, ("query", query_id), _QUERY_BYTES)
            self._queries[query_id] = query

    def _drop(self, query: Query) -> None:
        query_id = query.folder.name
        self._queries.pop(query_id, None)
        self._budget.drop(("query", query_id))
        self._budget.drop(("decision", query_id))

    def _drop_attempt(self, query: Query, batch_id: int, name: str) -> None:
        query.attempts.pop((batch_id, name), None)
        self._budget.drop((query.folder.name, batch_id, name))

    def _query(self, query_id: str) -> Query:
        """A query; one without state is not kept. Raises RequestError."""
        query = self._queries.get(query_id) or self._new(query_id)
        if query.phase is Phase.DAMAGED:
            raise RequestError(ResponseCode.SYSTEM_ERROR, str(query.problem))
        return query

    async def _saved(self, query_id: str) -> Query:
        """A query whose state is on disk. Raises RequestError."""
        while not (query := self._query(query_id)).is_saved:
            await self._in_thread(query.save)
        return query

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        """The result of work on files. Raises RequestError."""
        try:
            return await fetch(work, STAGED_WRITES)
        except OSError as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: OSError) -> RequestError:
        return RequestError(
            ResponseCode.SERVICE_NOT_AVAILABLE,
            f"staged writes can't be kept: {error.strerror or error} "
            f"({error.filename or self._root}); free space or repair the disk, then write again",
        )

    # -- applying ----------------------------------------------------------------------------------

    def _start_applying(self, query: Query) -> None:
        if query.phase is not Phase.APPLYING:
            query.apply(Event.APPLY)
            self._to_apply.append(query)
            self._apply_requested.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Apply decisions and remove expired attempts, until cancelled."""
        async with trio.open_nursery() as nursery:
            self._start_soon(nursery, self._run_expiry)
            self._start_soon(nursery, self._run_flush)
            self._start_soon(nursery, self._settlements.run)
            self._start_soon(nursery, self._run_applying)
            task_status.started()

    async def _run_applying(self) -> None:
        while True:
            while self._to_apply:
                await self._apply_and_report(self._to_apply.popleft())
            await self._apply_requested.wait()
            self._apply_requested = trio.Event()

    async def _apply_and_report(self, query: Query) -> None:
        try:
            applied = await self._apply(query)
        except (StoreError, OSError) as error:
            log.error(
                "staged batch stopped, will resume at its next commit",
                query=query.folder.name,
                reason=str(error),
            )
            _stop(query, error)
        except Exception as error:
            _stop(query, error)
            raise
        else:
            _call_back(query, None)
            await self._remove_applied(query, applied)

    async def _apply(self, query: Query) -> list[Path]:
        """Append the records that are not in the log yet, in the order of the decision.

        Returns the files that nobody needs then.
        """
        decision = query.state.pending
        assert decision is not None
        to_skip = query.applied_records
        for staged in decision.part(self.broker_name):
            if to_skip >= staged.record_count:
                to_skip -= staged.record_count
            else:
                await self._append_attempt(query, decision, staged, to_skip)
                to_skip = 0
        await self._store.flusher.wait_flushed()  # the staged blocks go next
        return await self._finish(query, decision)

    async def _append_attempt(
        self, query: Query, decision: Decision, staged: StagedAttempt, to_skip: int
    ) -> None:
        path = query.path(decision.batch_id, staged.attempt)
        blocks = _after(to_skip, read_blocks(path))
        # A pipeline: some blocks are appended while the thread makes records of the next and reads
        # those after them.
        with ThreadPoolExecutor(1) as thread:
            records: list[StagedRecords] = []
            read = await trio.to_thread.run_sync(thread.submit(_next_of, blocks).result)
            while records or read:
                wanted = [
                    (self._queues.queue(block.topic, block.queue_id), block) for block in read
                ]
                coming = thread.submit(_make_and_read, wanted, query.state.tag, blocks)
                for each in records:
                    await self._append(query, each)
                    await trio.lowlevel.checkpoint()
                records, read = await trio.to_thread.run_sync(coming.result)

    async def _append(self, query: Query, records: StagedRecords) -> None:
        store, block = self._store, records.block

        def make_records() -> StagedRecords:
            queue = self._queues.queue(block.topic, block.queue_id)
            is_recreated = queue is not records.queue
            return StagedRecords(queue, block, query.state.tag) if is_recreated else records

        def note(_queue_offset: int, _physical_offset: int) -> None:
            query.applied_records += block.record_count
            self._on_stored(block.topic, block.record_count, records.body_bytes)

        await store.write_path.append_block(make_records, note)
        if store.commit_log.max_offset - store.commit_log.flushed_offset >= _FLUSH_BYTES:
            store.flusher.request_flush()

    async def _finish(self, query: Query, decision: Decision) -> list[Path]:
        """Save that the batch is in the log; returns its files and those of older ones."""
        held = query.state
        done = QueryState(decision.batch_id, decision, held.tag, held.from_offset)

        def save() -> list[Path]:
            query.write(done)
            return query.paths_up_to(done.applied_batch_id)

        # Once the commit is answered, other attempts may begin, which their writers still need.
        applied = await trio.to_thread.run_sync(save)
        query.finish(done)
        return applied

    async def _remove_applied(self, query: Query, paths: list[Path]) -> None:
        """Remove the files of applied batches. Nobody waits for this."""
        try:
            await self._remove(query, paths)
        except OSError as error:
            log.error("applied staged blocks not removed", reason=str(error))

    async def _remove(self, query: Query, paths: Iterable[Path]) -> None:
        """Remove attempts, and the query's folder if it is empty then. Raises OSError."""
        has_voided = False
        remaining = iter(paths)
        while some := list(islice(remaining, _VOIDED_AT_ONCE)):
            has_voided |= query.void(some)
            await trio.lowlevel.checkpoint()
        if has_voided:
            await trio.to_thread.run_sync(query.remove_void)
            query.remove_folder()

    async def _run_flush(self) -> None:
        """Flush what is staged, so that little is left for the seal."""
        while True:
            await self._flush_requested.wait()
            self._flush_requested = trio.Event()
            while self._to_flush:
                query, attempt = self._to_flush.popleft()
                try:
                    await trio.to_thread.run_sync(attempt.flush, self._files)
                except FileNotFoundError:  # discarded, or already in the log
                    continue
                except OSError as error:
                    log.error("staged blocks lost", reason=str(error))
                    query.void([attempt.path])

    # -- expiry ------------------------------------------------------------------------------------

    async def _run_expiry(self) -> None:
        while True:
            try:
                await self.expire()
            except OSError as error:
                log.error("expired staged blocks not removed, retrying", reason=str(error))
            await trio.sleep(_EXPIRY_INTERVAL_S)

    async def expire(self) -> None:
        """Remove attempts that got no decision in time. Raises OSError."""
        before_ms = self._store.clock.now_ms() - self._reserved_ms
        for path in await trio.to_thread.run_sync(self._expired_paths, before_ms):
            query = self._queries.get(path.parent.name) or self._new(path.parent.name)
            if query.phase is Phase.DAMAGED:
                await trio.lowlevel.checkpoint()
            else:
                await self._remove(query, [path])
        await in_slices(self._drop_idle())

    def _drop_idle(self) -> Generator[None, None, None]:
        for number, query_id in enumerate(list(self._queries), 1):
            query = self._queries.get(query_id)
            if query is not None and query.is_idle:
                self._drop(query)
            if not number % _QUERIES_AT_ONCE:
                yield

    def _expired_paths(self, before_ms: int) -> list[Path]:
        paths = self._root.glob(f"*/*{BLOCKS_SUFFIX}")
        return [path for path in paths if _modified_ms(path) < before_ms]


def _stop(query: Query, problem: Exception) -> None:
    """Suspend a batch until the next commit."""
    query.apply(Event.STOP)
    _call_back(query, problem)


def _call_back(query: Query, problem: Exception | None) -> None:
    """Call the waiters for a batch with None, or the error that stopped it."""
    waiters, query.waiters = query.waiters, []
    for on_done in waiters:
        on_done(problem)


def _modified_ms(path: Path) -> float:
    try:
        return path.stat().st_mtime * 1000
    except FileNotFoundError:  # applied or discarded meanwhile
        return math.inf


def _after(to_skip: int, blocks: Iterator[StagedBlock]) -> Iterator[StagedBlock]:
    """The blocks without their first ``to_skip`` records."""
    for block in blocks:
        if to_skip >= block.record_count:
            to_skip -= block.record_count
        else:
            yield block.without(to_skip)
            to_skip = 0


def _next_of(blocks: Iterator[StagedBlock]) -> list[StagedBlock]:
    """The next few blocks, none at the end. Raises OSError, CorruptStage."""
    return list(islice(blocks, _BLOCKS_AT_ONCE))


def _make_and_read(
    wanted: list[tuple[StoreQueue, StagedBlock]], tag: int, blocks: Iterator[StagedBlock]
) -> tuple[list[StagedRecords], list[StagedBlock]]:
    """Blocks as records of their queues, and the next few blocks. Raises like ``_next_of``."""
    return [StagedRecords(queue, block, tag) for queue, block in wanted], _next_of(blocks)


def _may_replace(query: Query, held: Decision, new: Decision, replaces: str | None) -> bool:
    """Whether a new decision may replace the one that holds."""
    if query.phase is Phase.APPLYING or query.applied_records:
        return False
    if new.batch_id > held.batch_id:
        return True
    is_same_batch = new.batch_id == held.batch_id > query.state.applied_batch_id
    return is_same_batch and replaces == held.decision_id != new.decision_id


def _decision_bytes(decision: Decision) -> int:
    """Estimated memory of a decision."""
    chars = len(decision.decision_id) + sum(map(len, decision.attempts))
    attempts = sum(map(len, decision.attempts.values()))
    return 4 * chars + _DECIDED_BYTES * (1 + len(decision.attempts) + attempts)


def _rejected(remark: str) -> RequestError:
    return RequestError(ResponseCode.ILLEGAL_OPERATION, remark)
