"""Staged writes: blocks are kept aside until their batch is decided, then appended exactly once.

What is asked is answered on the loop; what waits for the disk raises NotReady with a function for
a thread and is asked again after it. Decided batches are applied by ``run``, one after the other.
Source: docs/protocol.md "Staged writes".
"""

from __future__ import annotations

import math
import secrets
import struct
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final

import structlog
import trio

from headrace_broker.host_budget import HostBudget
from headrace_broker.staging.blocks import StagedBlock, StagedRecords, read_blocks
from headrace_broker.staging.query import BLOCKS_SUFFIX, Attempt, Event, Phase, Query
from headrace_broker.staging.state import QueryState
from headrace_broker.store.errors import StoreError
from headrace_broker.store.files.filesystem import make_private
from headrace_broker.store.write.confirmation import wait_for
from headrace_protocol.codes import ResponseCode
from headrace_protocol.columns import HEAD_PLACES
from headrace_protocol.errors import Lane, NotReady, RequestError
from headrace_protocol.message import BORN_HOST_V6, STORE_HOST_V6, SYS_FLAG_AT

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator
    from pathlib import Path

    from headrace_broker.host_budget import Host
    from headrace_broker.store.log.commit_log import CommitLog
    from headrace_broker.store.message_store import MessageStore, StartSoon
    from headrace_broker.store.store_queue import StoreQueue
    from headrace_protocol.columns import Buffer
    from headrace_protocol.headers import StageSealHeader, StageSendHeader
    from headrace_protocol.staging import Decision, StagedAttempt

log = structlog.get_logger("headrace.broker")

FOLDER = "staged"
STAGED_WRITES: Final = Lane("staged writes", threads=4, outlives_client=True)
_EXPIRE_LOOK_S = 60.0
# What is on its way to the disk while more comes need not be waited for at the end.
_FLUSH_BYTES = 16 * 1024 * 1024
# A hop to a thread costs about as much as a block.
_BLOCKS_AT_ONCE = 4
# Renames per slice, half a millisecond.
_VOIDED_AT_ONCE = 32
# Memory of one of each. Measured by tests/abuse/test_kept_memory.py.
_QUERY_BYTES = 4096
_ATTEMPT_BYTES = 2048
_DECIDED_BYTES = 512
_TAG_BITS = 62
_TAG = struct.Struct(">q")
_TAG_AT = HEAD_PLACES["prepared_transaction_offset"][1]
_INT = struct.Struct(">i")


class Staging:
    """All queries' staged writes at one broker.

    on_stored: told of what was appended: topic, messages, bytes of their bodies.
    """

    def __init__(
        self,
        store: MessageStore,
        broker_name: str,
        reserved_ms: int,
        on_stored: Callable[[str, int, int], None],
        budget: HostBudget | None = None,
        start_soon: StartSoon = trio.Nursery.start_soon,
    ) -> None:
        """Touches nothing on disk.

        reserved_ms: age at which what nobody decided on is removed.
        start_soon: starts a loop; each of them can restart after an error.
        """
        self._budget = budget or HostBudget()
        self.broker_name = broker_name
        self._store = store
        self._files = store.fs
        self._root = store.root / FOLDER
        self._reserved_ms = reserved_ms
        self._on_stored = on_stored
        self._queries: dict[str, Query] = {}
        self._jobs: deque[Query] = deque()
        self._asked = trio.Event()
        self._to_flush: deque[tuple[Query, Attempt]] = deque()
        self._flush_asked = trio.Event()
        self._start_soon = start_soon

    # -- start -------------------------------------------------------------------------------------

    def load(self) -> None:
        """Read where each query stands, after the store was loaded; before anything is appended.

        A batch that a killed broker had begun to apply goes on once ``run`` does. Raises OSError.
        """
        for folder in sorted(self._root.glob("*")):
            query = self._queries[folder.name] = self._new(folder.name)
            query.load()
            if query.phase is Phase.DAMAGED:
                log.error("staged writes of a query are refused", reason=str(query.problem))
            else:
                self._take_up(query)

    def _take_up(self, query: Query) -> None:
        query.remove_void()
        if query.state.undone is None:
            return
        self._lower_start(query)
        query.applied_records = count_tagged(
            self._store.commit_log, query.state.tag, query.state.from_offset
        )
        if query.applied_records:
            log.info("going on with a staged batch", query=query.folder.name)
            self._start_applying(query)

    def _lower_start(self, query: Query) -> None:
        # A power cut took the end of the log: the next records begin before the noted place.
        log_end = self._store.commit_log.max_offset
        if query.state.from_offset > log_end:
            state = query.state
            query.decide(QueryState(state.applied_batch_id, state.decision, state.tag, log_end))
            query.save()

    # -- staging -----------------------------------------------------------------------------------

    def stage(self, header: StageSendHeader, body: Buffer, sys_flag: int, host: Host) -> None:
        """Keep a block, which was checked; nothing if it is there already. Raises RequestError."""
        query = self._query(header.query_id)
        attempt = self._attempt(query, header) or self._begin(query, header, host)
        if header.block_number < attempt.block_count:
            return  # sent again: the answer was lost
        if header.block_number > attempt.block_count:
            raise _refused(
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
            self._flush_asked.set()

    def seal(self, header: StageSealHeader) -> Attempt:
        """An attempt that is wholly on disk. Raises RequestError, NotReady."""
        query = self._query(header.query_id)
        attempt = self._attempt(query, header)
        if attempt is None:
            raise self._unknown_attempt(header.attempt)
        if attempt.block_count != header.block_count:
            raise _refused(
                f"attempt {header.attempt} has {attempt.block_count} blocks at this broker, not "
                f"{header.block_count}; begin another attempt"
            )
        if not attempt.is_on_disk:
            raise self._later(query, partial(self._sync, query, attempt))
        return attempt

    def _sync(self, query: Query, attempt: Attempt) -> None:
        try:
            query.sync_folder()
            attempt.sync(self._files)
        except OSError:
            # Its pages may be gone, so trying again would prove nothing.
            query.void([attempt.path])
            raise

    def _attempt(self, query: Query, header: StageSendHeader | StageSealHeader) -> Attempt | None:
        """A known attempt, else None. Raises NotReady."""
        key = header.batch_id, header.attempt
        attempt = query.attempts.get(key)
        if attempt is None and query.path(*key).exists():
            self._queries[header.query_id] = query
            raise self._later(query, partial(query.recover_attempt, *key))
        return attempt

    def _begin(self, query: Query, header: StageSendHeader, host: Host) -> Attempt:
        if header.block_number:
            raise self._unknown_attempt(header.attempt)
        query_id, key = header.query_id, (header.batch_id, header.attempt)
        self._register(query, host)
        self._budget.keep(host, (query_id, *key), _ATTEMPT_BYTES)
        attempt = query.attempts[key] = Attempt(query.path(*key))
        return attempt

    def _unknown_attempt(self, name: str) -> RequestError:
        return _refused(
            f"attempt {name} is not known to broker {self.broker_name}: it was given up, or lost "
            "with the machine; begin another attempt"
        )

    # -- deciding ----------------------------------------------------------------------------------

    def state(self, query_id: str) -> QueryState:
        """Where a query stands. Raises RequestError, NotReady."""
        return self._saved(self._query(query_id)).state

    def decide(
        self, query_id: str, decision: Decision, replaces: str | None, host: Host
    ) -> Decision:
        """The decision that holds, on disk: the first one for its batch, or of a later batch.

        replaces: id of one that ``decision`` takes the place of. Raises RequestError, NotReady.
        """
        query = self._saved(self._query(query_id))
        held = query.state.decision
        if held is None or _gives_way(query, held, decision, replaces):
            self._check_complete(query, decision)
            self._register(query, host)
            self._budget.keep(host, ("decision", query_id), _decision_bytes(decision))
            applied = query.state.applied_batch_id
            tag = secrets.randbits(_TAG_BITS) + 1
            query.decide(QueryState(applied, decision, tag, self._store.commit_log.max_offset))
            raise self._later(query, query.save)
        return held

    def _check_complete(self, query: Query, decision: Decision) -> None:
        for staged in decision.part(self.broker_name):
            if not query.is_complete(decision.batch_id, staged):
                raise _refused(
                    f"attempt {staged.attempt} of batch {decision.batch_id} is not at broker "
                    f"{self.broker_name} as it was sealed: it was given up, or expired; write "
                    "the batch again"
                )

    def commit(
        self,
        query_id: str,
        batch_id: int,
        decision_id: str,
        then: Callable[[Exception | None], None],
    ) -> Generator[NotReady | None, None, bool]:
        """Append what was decided; whether it was done before, else ``then`` is called.

        then: with None once all is in the log and on disk, or with what stopped it: then a later
        commit goes on. Raises RequestError.
        """
        query = self._query(query_id)
        while not query.is_saved:
            yield self._later(query, query.save)
            query = self._query(query_id)
        if query.state.applied_batch_id >= batch_id:
            paths: list[Path] = []
            upto = query.state.applied_batch_id
            yield self._later(query, lambda: paths.extend(query.paths_up_to(upto)))
            yield from self._remove_sliced(query, paths)
            return True
        held = query.state.decision
        if held is None or (held.batch_id, held.decision_id) != (batch_id, decision_id):
            raise _refused(
                f"broker {self.broker_name} holds another decision for batch {batch_id} of query "
                f"{query_id}: ask for its state and follow what was decided"
            )
        query.waiters.append(then)
        self._start_applying(query)
        return False

    def abort(
        self, query_id: str, batch_id: int, attempts: Iterable[str]
    ) -> Generator[NotReady | None, None, None]:
        """Remove attempts, except those that a decision names. Raises RequestError."""
        query = self._query(query_id)
        yield from self._remove_sliced(query, (query.path(batch_id, name) for name in attempts))

    def _remove_sliced(
        self, query: Query, paths: Iterable[Path]
    ) -> Generator[NotReady | None, None, None]:
        is_any = False
        remaining = iter(paths)
        while some := list(islice(remaining, _VOIDED_AT_ONCE)):
            is_any |= query.void(some)
            yield None
        if is_any:
            yield self._later(query, query.remove_void)
        self._raise_failure(query)

    def forget(self, query_id: str) -> None:
        """Remove what is known of a query that won't come back. Raises RequestError, NotReady."""
        query = self._saved(self._query(query_id))
        if query.state.undone:
            raise _refused(
                f"query {query_id} has an unfinished batch {query.state.undone.batch_id}: commit it"
            )
        self._drop(query)
        try:
            query.forget()
        except OSError as error:
            raise self._unavailable(error) from error

    # -- what they share ---------------------------------------------------------------------------

    def _new(self, query_id: str) -> Query:
        return Query(self._root / query_id, self._files, self._drop_attempt)

    def _register(self, query: Query, host: Host) -> None:
        """Keep a query, and count it for ``host``, now that it has state. Raises RequestError."""
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
        self._raise_failure(query)
        return query

    def _raise_failure(self, query: Query) -> None:
        if query.failure:
            failure, query.failure = query.failure, None
            raise self._unavailable(failure)

    def _saved(self, query: Query) -> Query:
        if not query.is_saved:
            raise self._later(query, query.save)
        return query

    def _later(self, query: Query, work: Callable[[], None]) -> NotReady:
        """Have a thread do ``work``; what it fails with is told when the request comes back."""

        def fetch() -> None:
            try:
                work()
            except OSError as error:
                query.failure = error

        return NotReady(fetch, STAGED_WRITES)

    def _unavailable(self, error: OSError) -> RequestError:
        return RequestError(
            ResponseCode.SERVICE_NOT_AVAILABLE,
            f"staged writes can't be kept: {error.strerror or error} "
            f"({error.filename or self._root}); make room or mend the disk, then write again",
        )

    # -- applying ----------------------------------------------------------------------------------

    def _start_applying(self, query: Query) -> None:
        if query.phase is not Phase.APPLYING:
            query.apply(Event.APPLY)
            self._jobs.append(query)
            self._asked.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Apply what was decided and remove what nobody decided on, until cancelled."""
        async with trio.open_nursery() as nursery:
            self._start_soon(nursery, self._run_expiry)
            self._start_soon(nursery, self._run_flush)
            self._start_soon(nursery, self._run_jobs)
            task_status.started()

    async def _run_jobs(self) -> None:
        while True:
            while self._jobs:
                await self._apply_and_tell(self._jobs.popleft())
            await self._asked.wait()
            self._asked = trio.Event()

    async def _apply_and_tell(self, query: Query) -> None:
        try:
            await self._apply(query)
        except (StoreError, OSError) as error:
            log.error("a staged batch waits", query=query.folder.name, reason=str(error))
            _stop(query, error)
        except Exception as error:
            _stop(query, error)
            raise
        else:
            _call_back(query, None)
            await self._remove_applied(query)

    async def _apply(self, query: Query) -> None:
        """Append what is not in the log yet, in the order of the decision."""
        decision = query.state.undone
        assert decision is not None
        skipped = query.applied_records
        for staged in decision.part(self.broker_name):
            if skipped >= staged.record_count:
                skipped -= staged.record_count
            else:
                await self._append_attempt(query, decision, staged, skipped)
                skipped = 0
        await self._wait_flushed()
        await self._finish(query, decision)

    async def _append_attempt(
        self, query: Query, decision: Decision, staged: StagedAttempt, skipped: int
    ) -> None:
        path = query.path(decision.batch_id, staged.attempt)
        blocks = _after(skipped, read_blocks(path))
        # While some are appended, the next are made records, and those after them are read.
        with ThreadPoolExecutor(1) as thread:
            records: list[StagedRecords] = []
            read = await trio.to_thread.run_sync(thread.submit(_next_of, blocks).result)
            while records or read:
                wanted = [(self._store.queue(block.topic, block.queue_id), block) for block in read]
                coming = thread.submit(_make_and_read, wanted, query.state.tag, blocks)
                for each in records:
                    await self._append(query, each)
                    await trio.lowlevel.checkpoint()
                records, read = await trio.to_thread.run_sync(coming.result)

    async def _append(self, query: Query, records: StagedRecords) -> None:
        store, block = self._store, records.block

        def make_records() -> StagedRecords:
            queue = store.queue(block.topic, block.queue_id)
            is_gone = queue is not records.queue
            return StagedRecords(queue, block, query.state.tag) if is_gone else records

        def note(_queue_offset: int, _physical_offset: int) -> None:
            query.applied_records += block.record_count
            self._on_stored(block.topic, block.record_count, records.body_bytes)

        await store.write_path.append_block(make_records, note)
        if store.commit_log.max_offset - store.commit_log.flushed_offset >= _FLUSH_BYTES:
            store.flusher.ask()

    async def _wait_flushed(self) -> None:
        """On disk, whatever the store confirms: the staged blocks will be removed."""
        store = self._store
        await wait_for(store.flusher.when_flushed, store.commit_log.max_offset, store.root)

    async def _finish(self, query: Query, decision: Decision) -> None:
        """Note that the batch is in the log; then its files and those of older ones may go."""
        held = query.state
        done = QueryState(decision.batch_id, decision, held.tag, held.from_offset)
        await trio.to_thread.run_sync(query.write, done)
        query.finish(done)

    async def _remove_applied(self, query: Query) -> None:
        """Remove what is in the log by now, for which nobody waits."""
        try:
            paths = await trio.to_thread.run_sync(query.paths_up_to, query.state.applied_batch_id)
            await self._remove(query, paths)
        except OSError as error:
            log.error("staged blocks that are in the log not removed", reason=str(error))

    async def _remove(self, query: Query, paths: Iterable[Path]) -> None:
        """Remove attempts, and the folder of a query that has nothing else. Raises OSError."""
        is_any = False
        remaining = iter(paths)
        while some := list(islice(remaining, _VOIDED_AT_ONCE)):
            is_any |= query.void(some)
            await trio.lowlevel.checkpoint()
        if is_any:
            await trio.to_thread.run_sync(query.remove_void)
            query.remove_folder()

    async def _run_flush(self) -> None:
        """Bring to disk what is staged, so that little is left for the seal."""
        while True:
            await self._flush_asked.wait()
            self._flush_asked = trio.Event()
            while self._to_flush:
                query, attempt = self._to_flush.popleft()
                try:
                    await trio.to_thread.run_sync(attempt.flush, self._files)
                except FileNotFoundError:  # it was given up, or is in the log already
                    continue
                except OSError as error:
                    log.error("staged blocks are lost", reason=str(error))
                    query.void([attempt.path])

    # -- expiry ------------------------------------------------------------------------------------

    async def _run_expiry(self) -> None:
        while True:
            try:
                await self.expire()
            except OSError as error:
                log.error("staged leftovers not removed, trying on", reason=str(error))
            await trio.sleep(_EXPIRE_LOOK_S)

    async def expire(self) -> None:
        """Remove attempts that nobody decided on for too long. Raises OSError."""
        before_ms = self._store.clock.now_ms() - self._reserved_ms
        for path in await trio.to_thread.run_sync(self._leftovers, before_ms):
            query = self._queries.get(path.parent.name) or self._new(path.parent.name)
            if query.phase is not Phase.DAMAGED:
                await self._remove(query, [path])
        for query in [query for query in self._queries.values() if query.is_idle]:
            self._drop(query)

    def _leftovers(self, before_ms: int) -> list[Path]:
        paths = self._root.glob(f"*/*{BLOCKS_SUFFIX}")
        return [path for path in paths if _modified_ms(path) < before_ms]


def _stop(query: Query, problem: Exception) -> None:
    """Leave a batch as it is until the next commit."""
    query.apply(Event.STOP)
    _call_back(query, problem)


def _call_back(query: Query, problem: Exception | None) -> None:
    """Call back the waiters for a batch, with what stopped it, if anything."""
    waiters, query.waiters = query.waiters, []
    for then in waiters:
        then(problem)


def _modified_ms(path: Path) -> float:
    try:
        return path.stat().st_mtime * 1000
    except FileNotFoundError:  # it was applied or given up meanwhile
        return math.inf


def _after(skipped: int, blocks: Iterator[StagedBlock]) -> Iterator[StagedBlock]:
    """The blocks without their first ``skipped`` records."""
    for block in blocks:
        if skipped >= block.record_count:
            skipped -= block.record_count
        else:
            yield block.without(skipped)
            skipped = 0


def _next_of(blocks: Iterator[StagedBlock]) -> list[StagedBlock]:
    """The next few blocks, none at the end. Raises OSError, CorruptStage."""
    return list(islice(blocks, _BLOCKS_AT_ONCE))


def _make_and_read(
    wanted: list[tuple[StoreQueue, StagedBlock]], tag: int, blocks: Iterator[StagedBlock]
) -> tuple[list[StagedRecords], list[StagedBlock]]:
    """Blocks as records of their queues, and the next few blocks. Raises as ``_next_of``."""
    return [StagedRecords(queue, block, tag) for queue, block in wanted], _next_of(blocks)


def _gives_way(query: Query, held: Decision, new: Decision, replaces: str | None) -> bool:
    """Whether a decision that is held makes room for another one."""
    if query.phase is Phase.APPLYING or query.applied_records:
        return False
    if new.batch_id > held.batch_id:
        return True
    is_same_batch = new.batch_id == held.batch_id > query.state.applied_batch_id
    return is_same_batch and replaces == held.decision_id != new.decision_id


def _decision_bytes(decision: Decision) -> int:
    """Memory of a decision."""
    chars = len(decision.decision_id) + sum(map(len, decision.attempts))
    attempts = sum(map(len, decision.attempts.values()))
    return 4 * chars + _DECIDED_BYTES * (1 + len(decision.attempts) + attempts)


def _refused(remark: str) -> RequestError:
    return RequestError(ResponseCode.ILLEGAL_OPERATION, remark)


def count_tagged(commit_log: CommitLog, tag: int, from_offset: int) -> int:
    """How many records from ``from_offset`` on carry the tag."""
    count = 0
    for file in commit_log.files.files:
        physical_offset = max(file.start_offset, from_offset)
        while physical_offset < file.end_offset and (
            record := commit_log.record_at(physical_offset, may_wait=True)
        ):
            count += _has_tag(record, tag)
            physical_offset += len(record)
    return count


def _has_tag(record: memoryview, tag: int) -> bool:
    (sys_flag,) = _INT.unpack_from(record, SYS_FLAG_AT)
    is_ours = not sys_flag & (BORN_HOST_V6 | STORE_HOST_V6)
    return bool(is_ours and _TAG.unpack_from(record, _TAG_AT)[0] == tag)
