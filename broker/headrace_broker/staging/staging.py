"""Staged writes: blocks kept aside until their micro-batch is decided, then appended exactly once.

"Batch" in this folder is a micro-batch. Requests are served on the loop, and await what a thread
does with files. ``Applying`` appends decided batches one after the other.
Source: docs/protocol.md "Staged writes".
"""

from __future__ import annotations

import math
import secrets
from collections import Counter, deque
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import structlog
import trio

from headrace_broker.staging.applying import remove
from headrace_broker.staging.blocks import StagedBlock
from headrace_broker.staging.query import BLOCKS_SUFFIX, FLUSH_BYTES, Attempt, Phase, Query, voided
from headrace_broker.staging.queues import Settlements
from headrace_broker.staging.state import QueryState
from headrace_broker.store.files.filesystem import make_private
from headrace_broker.store.recovery import NOTHING, Scan
from headrace_daemon.slices import in_slices
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.message import BORN_HOST_V6, STORE_HOST_V6
from headrace_protocol.waiting import Until, sliced

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator
    from pathlib import Path

    from headrace_broker.host_budget import Host
    from headrace_broker.staging.applying import Applying
    from headrace_broker.staging.queries import Queries
    from headrace_broker.staging.queues import QueueNames
    from headrace_broker.store.message_store import MessageStore
    from headrace_protocol.columns import Buffer, RecordColumns
    from headrace_protocol.headers import StageSealHeader, StageSendHeader
    from headrace_protocol.serving import RunLong
    from headrace_protocol.staging import Decision
    from headrace_protocol.waiting import Run

log = structlog.get_logger("headrace.broker")

_EXPIRY_INTERVAL_S = 60.0
# Looked at per slice, a quarter of a millisecond.
_QUERIES_AT_ONCE = 128
_TAG_BITS = 62


class Staging:
    """The staged writes of all queries at one broker."""

    def __init__(
        self,
        store: MessageStore,
        queries: Queries,
        applying: Applying,
        reserved_ms: int,
        run_long: RunLong,
    ) -> None:
        """Does not touch the disk.

        reserved_ms: age at which attempts without a decision are removed.
        run_long: runs work in slices.
        """
        self._store = store
        self._files = store.fs
        self._reserved_ms = reserved_ms
        self.queries = queries
        self.applying = applying
        self.broker_name = applying.broker_name
        self._queues = applying.queues
        self.settlements = Settlements(self._pending_for, self._resume, run_long)
        # The number of records in the log by the tag of their query's pending decision.
        self._tagged: Counter[int] = Counter()
        self._tags = np.empty(0, np.int64)
        self.scan = Scan(self.scan_from, self._count_tagged)
        self._to_flush: deque[tuple[Query, Attempt]] = deque()
        self._flush_requested = trio.Event()

    # -- start -------------------------------------------------------------------------------------

    def scan_from(self) -> int:
        """Read each query's state; return the offset from which the log may hold pending records.

        Raises OSError, StoreFormatError.
        """
        self.queries.load()
        pending = [query.state for query in self.queries.values() if query.state.pending]
        self._tags = np.array([state.tag for state in pending], np.int64)
        return min((state.from_offset for state in pending), default=NOTHING)

    def _count_tagged(self, records: RecordColumns) -> None:
        """Count the records that carry the tag of a pending decision."""
        tags = records.prepared_transaction_offset
        is_ours = records.sys_flag & (BORN_HOST_V6 | STORE_HOST_V6) == 0
        self._tagged.update(tags[is_ours & np.isin(tags, self._tags)].tolist())

    def load(self) -> None:
        """Find batches that a killed broker had begun to apply, for ``Applying`` to resume.

        After the scan of the log, and before anything is appended. Raises OSError.
        """
        for query in self.queries.values():
            if query.phase is Phase.DAMAGED:
                log.error("rejecting the staged writes of a query", reason=str(query.problem))
            else:
                self._recover(query)
        self.queries.known.add(*(name for name, query in self.queries.items() if query.has_state))

    def _recover(self, query: Query) -> None:
        query.remove_void()
        if query.state.pending is None:
            return
        self._lower_from_offset(query)
        query.applied_records = self._tagged[query.state.tag]
        if query.applied_records:
            log.info("resuming a staged batch", query=query.folder.name)
            self.applying.begin(query)

    def _lower_from_offset(self, query: Query) -> None:
        # After a power cut took the end of the log, new records may lie before from_offset.
        log_end = self._store.commit_log.max_offset
        if query.state.from_offset > log_end:
            state = query.state
            query.decide(msgspec.structs.replace(state, from_offset=log_end))
            query.save()

    # -- staging -----------------------------------------------------------------------------------

    async def stage(
        self,
        header: StageSendHeader,
        body: Buffer,
        sys_flag: int,
        host: Host,
        user: str | None = None,
    ) -> None:
        """Keep a checked block; ignore one that is there already. Raises RequestError."""
        query = self.queries.sound(header.query_id)
        attempt = await self._attempt(query, header)
        if attempt is None:
            if header.block_number:
                raise self._unknown_attempt(header.attempt)
            attempt = self.queries.begin_attempt(query, header.batch_id, header.attempt, host)
        query.claim(user)
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
            query.keep_owner()
            attempt.append(block, self._files)
        except OSError as error:
            if not attempt.block_count:
                self.queries.drop_attempt(query, header.batch_id, header.attempt)
            raise self.queries.unavailable(error) from error
        if attempt.file_bytes - attempt.flushed_bytes >= FLUSH_BYTES:
            attempt.flushed_bytes = attempt.file_bytes
            self._to_flush.append((query, attempt))
            self._flush_requested.set()

    async def seal(self, header: StageSealHeader) -> Attempt:
        """An attempt, once it is completely on disk. Raises RequestError."""
        while True:
            query = self.queries.sound(header.query_id)
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
            await self.queries.in_thread(partial(self._sync, query, attempt))

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
            self.queries[header.query_id] = query
            await self.queries.in_thread(partial(query.recover_attempt, *key))
        return query.attempts.get(key)

    def _unknown_attempt(self, name: str) -> RequestError:
        return _rejected(
            f"attempt {name} is not known to broker {self.broker_name}: it was discarded, or "
            "lost in a crash of the machine; begin another attempt"
        )

    # -- deciding ----------------------------------------------------------------------------------

    async def state(self, query_id: str) -> QueryState:
        """The state of a query, once it is on disk. Raises RequestError."""
        return (await self.queries.saved(query_id)).state

    async def decide(
        self,
        query_id: str,
        decision: Decision,
        replaces: str | None,
        host: Host,
        user: str | None = None,
    ) -> Decision:
        """The decision that holds, on disk: the first for its batch, or that of a later batch.

        replaces: id of the decision that this one replaces. Raises RequestError.
        """
        while True:
            query = await self.queries.saved(query_id)
            held = query.state.decision
            if held is not None and not _may_replace(query, held, decision, replaces):
                return held
            self._check_complete(query, decision)
            if (unread := self._unread(query, decision)) is not None:
                await self.queries.in_thread(partial(query.recover_attempt, *unread))
                continue
            self._check_led(query, decision)
            self.queries.count_decision(query, decision, host)
            query.claim(user)
            applied = query.state.applied_batch_id
            tag = secrets.randbits(_TAG_BITS) + 1
            log_end = self._store.commit_log.max_offset
            query.decide(QueryState(applied, decision, tag, log_end, query.owner))

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
                is_closing = (topic, queue_id) in self.settlements.closing
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
        query = await self.queries.saved(query_id)
        upto = query.state.applied_batch_id
        if upto >= batch_id:
            paths = await self.queries.in_thread(partial(query.paths_up_to, upto))
            await self._discard(query, paths)
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
        self.applying.begin(query)

    async def abort(self, query_id: str, batch_id: int, attempts: Iterable[str]) -> None:
        """Remove attempts, except those that the pending decision names. Raises RequestError."""
        query = self.queries.sound(query_id)
        await self._discard(query, (query.path(batch_id, name) for name in attempts))

    async def _discard(self, query: Query, paths: Iterable[Path]) -> None:
        if await sliced(voided(query, paths)):
            await self.queries.in_thread(query.remove_void)
            try:
                query.remove_folder()
            except OSError as error:
                raise self.queries.unavailable(error) from error

    async def forget(self, query_id: str) -> None:
        """Remove the state of a query that won't come back. Raises RequestError."""
        while True:
            query = await self.queries.saved(query_id)
            if query.state.pending:
                raise _rejected(
                    f"query {query_id} has a pending batch {query.state.pending.batch_id}: commit "
                    "it"
                )
            if query_id not in self.queries.known:
                break
            await self.queries.in_thread(partial(self.queries.known.drop, query_id))
        self.queries.drop(query)
        try:
            query.forget()
        except OSError as error:
            raise self.queries.unavailable(error) from error

    # -- queues that move --------------------------------------------------------------------------

    def settle(
        self, topic: str, queue_ids: Iterable[int], then: Callable[[Exception | None], None]
    ) -> None:
        """Call back once the batches decided for queues of a topic are in the log.

        No other is decided for them until ``moved``. The error is a PendingBatch.
        """
        queues = frozenset((topic, queue_id) for queue_id in queue_ids)
        self.settlements.begin(queues, then)

    def moved(self, topic: str, queue_ids: Iterable[int]) -> None:
        """End what ``settle`` began."""
        self.settlements.end(frozenset((topic, queue_id) for queue_id in queue_ids))

    def _resume(self, query: Query) -> None:
        """Apply a pending batch that no other broker has a part of.

        Others may lack their part of a decision, which then may still be replaced.
        """
        pending = query.state.pending
        is_ours_alone = pending is not None and set(pending.attempts) == {self.broker_name}
        if is_ours_alone and query.phase is Phase.DECIDED:
            self.applying.begin(query)

    def _pending_for(self, queues: QueueNames) -> Iterator[Query | None]:
        # A later decision is not for these queues, which are closing.
        for number, query in enumerate(list(self.queries.values()), 1):
            pending = query.state.pending
            if pending is not None and self._is_for(query, pending, queues):
                yield query
            if not number % _QUERIES_AT_ONCE:
                yield None

    def _is_for(self, query: Query, pending: Decision, queues: QueueNames) -> bool:
        for staged in pending.part(self.broker_name):
            attempt = query.attempts.get((pending.batch_id, staged.attempt))
            # The blocks of an attempt from before a restart may be for any queue.
            if attempt is None or attempt.queues & queues:
                return True
        return False

    # -- tasks -------------------------------------------------------------------------------------

    async def run_flush(self) -> None:
        """Flush what is staged until cancelled, so that little is left for the seal."""
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

    async def run_expiry(self) -> None:
        """Remove expired attempts until cancelled."""
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
            query = self.queries.get(path.parent.name) or self.queries.new(path.parent.name)
            if query.phase is Phase.DAMAGED:
                await trio.lowlevel.checkpoint()
            else:
                await remove(query, [path])
        await in_slices(self._drop_idle())

    def _drop_idle(self) -> Generator[None, None, None]:
        for number, query_id in enumerate(list(self.queries), 1):
            query = self.queries.get(query_id)
            if query is not None and query.is_idle:
                self.queries.drop(query)
            if not number % _QUERIES_AT_ONCE:
                yield

    def _expired_paths(self, before_ms: int) -> list[Path]:
        paths = self.queries.root.glob(f"*/*{BLOCKS_SUFFIX}")
        return [path for path in paths if _modified_ms(path) < before_ms]


def _modified_ms(path: Path) -> float:
    try:
        return path.stat().st_mtime * 1000
    except FileNotFoundError:  # applied or discarded meanwhile
        return math.inf


def _may_replace(query: Query, held: Decision, new: Decision, replaces: str | None) -> bool:
    """True if a new decision may replace the one that holds."""
    if query.phase is Phase.APPLYING or query.applied_records:
        return False
    if new.batch_id > held.batch_id:
        return True
    is_same_batch = new.batch_id == held.batch_id > query.state.applied_batch_id
    return is_same_batch and replaces == held.decision_id != new.decision_id


def _rejected(remark: str) -> RequestError:
    return RequestError(ResponseCode.ILLEGAL_OPERATION, remark)
