"""Appends the records of decided batches to the log, one batch after the other."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING

import msgspec
import structlog
import trio

from headrace_broker.staging.blocks import StagedBlock, StagedRecords, read_blocks
from headrace_broker.staging.query import FLUSH_BYTES, Event, Phase, Query, voided
from headrace_broker.store.errors import StoreError
from headrace_daemon.slices import in_slices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from headrace_broker.staging.queues import Queues
    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.store.store_queue import StoreQueue
    from headrace_protocol.staging import Decision, StagedAttempt

log = structlog.get_logger("headrace.broker")

# A hop to a thread costs about as much as a block.
_BLOCKS_AT_ONCE = 4


class Applying:
    """The batches whose records are being appended.

    on_stored: called after an append with the topic, message count and body bytes.
    """

    def __init__(
        self,
        store: MessageStore,
        queues: Queues,
        broker_name: str,
        on_stored: Callable[[str, int, int], None],
    ) -> None:
        self._store = store
        self.queues = queues
        self.broker_name = broker_name
        self._on_stored = on_stored
        self._waiting: deque[Query] = deque()
        self._has_work = trio.Event()

    def begin(self, query: Query) -> None:
        """Apply the pending batch of a query soon, unless that has begun."""
        if query.phase is not Phase.APPLYING:
            query.apply(Event.APPLY)
            self._waiting.append(query)
            self._has_work.set()

    async def run(self) -> None:
        """Apply what waits, until cancelled."""
        while True:
            while self._waiting:
                await self._apply_and_report(self._waiting.popleft())
            await self._has_work.wait()
            self._has_work = trio.Event()

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
                wanted = [(self.queues.queue(block.topic, block.queue_id), block) for block in read]
                coming = thread.submit(_make_and_read, wanted, query.state.tag, blocks)
                for each in records:
                    await self._append(query, each)
                    await trio.lowlevel.checkpoint()
                records, read = await trio.to_thread.run_sync(coming.result)

    async def _append(self, query: Query, records: StagedRecords) -> None:
        store, block = self._store, records.block

        def make_records() -> StagedRecords:
            queue = self.queues.queue(block.topic, block.queue_id)
            is_recreated = queue is not records.queue
            return StagedRecords(queue, block, query.state.tag) if is_recreated else records

        def note(_queue_offset: int, _physical_offset: int) -> None:
            query.applied_records += block.record_count
            self._on_stored(block.topic, block.record_count, records.body_bytes)

        await store.write_path.append_block(make_records, note)
        if store.commit_log.max_offset - store.commit_log.flushed_offset >= FLUSH_BYTES:
            store.flusher.request_flush()

    async def _finish(self, query: Query, decision: Decision) -> list[Path]:
        """Save that the batch is in the log; returns its files and those of older ones."""
        done = msgspec.structs.replace(query.state, applied_batch_id=decision.batch_id)

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
            await remove(query, paths)
        except OSError as error:
            log.error("applied staged blocks not removed", reason=str(error))


async def remove(query: Query, paths: Iterable[Path]) -> None:
    """Remove attempts, and the query's folder if it is empty then. Raises OSError."""
    if await in_slices(voided(query, paths)):
        await trio.to_thread.run_sync(query.remove_void)
        query.remove_folder()


def _stop(query: Query, problem: Exception) -> None:
    """Suspend a batch until the next commit."""
    query.apply(Event.STOP)
    _call_back(query, problem)


def _call_back(query: Query, problem: Exception | None) -> None:
    """Call the waiters for a batch with None, or the error that stopped it."""
    waiters, query.waiters = query.waiters, []
    for on_done in waiters:
        on_done(problem)


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
