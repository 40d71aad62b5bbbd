"""Persists changes by pops: the log of pops, the groups' offsets, and answers that wait for it."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Final

import structlog
import trio

from headrace_broker.inner.writer import RETRY_S
from headrace_broker.pop.pop_log import PopsNotWritable
from headrace_broker.pop.revive_topic import saved_behind
from headrace_broker.store.errors import StoreNotWritable
from headrace_broker.store.life import State
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import reason_of
from headrace_protocol.outages import Outages
from headrace_protocol.serving import Reply

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from headrace_broker.consumer.offsets import ConsumerOffsets
    from headrace_broker.pop.pop_log import PopLog
    from headrace_broker.pop.pops import Pops
    from headrace_broker.store.message_store import MessageStore
    from headrace_protocol.serving import Request

logger = structlog.get_logger("headrace.broker")

# Between looks at how much a start would have to read.
_LOOK_S: Final = 60.0
_FAILED: Final = "what is popped can't be brought to disk; see the log of this broker"


class PopProgress:
    """Writes what has changed at the end of each turn, and brings it to disk.

    With synchronous flush answers wait until it is there.
    """

    def __init__(
        self, store: MessageStore, offsets: ConsumerOffsets, pops: Pops, log: PopLog
    ) -> None:
        self._store = store
        self._offsets = offsets
        self._pops = pops
        self.log = log
        self._is_sync = store.settings.flush == "sync"
        self._is_running = False
        self._requested = trio.Event()
        self._flushing = trio.Lock()
        self._outages = Outages(logger.error, ended=logger.warning)
        self._name = f"the log of pops in {log.folder}"
        self._waiting: list[tuple[Request, Reply]] = []

    def end_turn(self) -> None:
        """Write what has changed. What can't be written is retried, and answers may wait for it."""
        if (self.log.is_pending and not self.log.problem) or self._is_unserved:
            with suppress(OSError, StoreNotWritable):  # logged; ``run`` retries
                self.write_out()
                if self._is_unserved:
                    self.flush_now()

    @property
    def _is_unserved(self) -> bool:
        """True if answers wait, and no task will flush soon: at the first POP of all."""
        return bool(self._waiting) and not self._is_running and not self._flushing.locked()

    def write_out(self) -> None:
        """Write what has changed. Raises OSError, which is logged; ``run`` retries."""
        if self.log.is_pending:
            self._requested.set()
        try:
            self.log.write_out()
        except OSError as error:
            self._outages.failed(self._name, error)
            raise
        self._outages.worked(self._name)
        self.settle()

    def settle(self) -> None:
        """Record how far groups are whose progress has changed."""
        for queue in self._pops.take_changed():
            behind = saved_behind(queue.name.group)
            settled, saved = queue.settled_offset - behind, queue.saved_offset - behind
            self._offsets.settle(*queue.name, settled, saved)

    async def bring_to_disk(self) -> OSError | None:
        """Bring all that offsets count so far to disk; returns the error of a failure.

        A message that was stored again counts as settled, and might be lost until then. This waits
        for no other task, since a save of offsets is not cut off by a stop.
        """
        commit_log = self._store.commit_log
        try:
            self.write_out()
            log_end = commit_log.max_offset
            await self._store.flusher.flush_log()
            if commit_log.flushed_offset < log_end:
                return OSError(str(commit_log.life.refusal))
            await self._flush()
        except OSError as error:
            return error
        except StoreNotWritable as error:
            return OSError(str(error))
        return None

    def save_problem(self) -> OSError | None:
        """The reason not to save offsets, whose messages may be lost; None if there is none."""
        life = self._store.commit_log.life
        problem = self.log.problem if life.is_writable else life.refusal
        return OSError(f"offsets of pops not saved: {problem}") if problem else None

    def check(self) -> None:
        """Raise PopsNotWritable unless what a request changes can be written, and answered."""
        self.log.check_room()
        # Every answer would be replaced, and what it has given back.
        if self._is_sync and self._store.commit_log.life.state is State.FAILED:
            raise PopsNotWritable(ResponseCode.SERVICE_NOT_AVAILABLE, _FAILED)

    def reply(self, request: Request, reply: Reply) -> Reply | None:
        """The answer to a request that may leave after this turn; None if it leaves later."""
        if not self._is_sync or (self.log.flushed == self.log.written and not self.log.is_pending):
            return reply
        self._waiting.append((request, reply))
        self._requested.set()
        return None

    def answer(self, request: Request, reply: Reply) -> None:
        """Answer a request outside of a turn of its client."""
        now = self.reply(request, reply)
        self.end_turn()
        if now is not None:
            request.reply(now)

    async def run(self) -> None:
        """Bring changes to disk until cancelled."""
        self._is_running = True
        interval_s = self._store.settings.flush_interval_ms / 1000
        try:
            while True:
                with trio.move_on_after(_LOOK_S):
                    await self._requested.wait()
                self._requested = trio.Event()
                if not self._is_sync:
                    await trio.sleep(interval_s)
                if not await self._bring_to_disk():
                    await trio.sleep(RETRY_S)
        finally:
            self._is_running = False

    async def _bring_to_disk(self) -> bool:
        """Write all changes and flush them; returns whether that succeeded. Failures are logged."""
        try:
            self.write_out()
            await self._flush()
        except (OSError, StoreNotWritable):
            return False
        return True

    async def _flush(self) -> None:
        """Bring all that is written to disk. Raises OSError, StoreNotWritable."""
        # An overlapping flush would find nothing dirty and count it as on disk too early, as would
        # the next one if this were given up.
        with trio.CancelScope(shield=True):
            async with self._flushing:
                with self._one_flush(self._store.flusher.answering) as flush:
                    await trio.to_thread.run_sync(flush)

    def flush_now(self) -> None:
        """Bring all that is written to disk in this thread. Raises OSError, StoreNotWritable.

        Also in a turn, whose answers leave together anyway.
        """
        with self._one_flush(nullcontext) as flush:
            flush()

    @contextmanager
    def _one_flush(
        self, answering: Callable[[], AbstractContextManager[None]]
    ) -> Iterator[Callable[[], None]]:
        """The only flush that is under way: a function for any thread. Then come the answers.

        answering: entered around these. Raises OSError, StoreNotWritable. A failed flush is never
        retried, because its pages may be gone.
        """
        # What is not even written waits longer.
        waiting = [] if self.log.is_pending else self._take_waiting()
        failed: Reply | None = Reply(code=ResponseCode.SYSTEM_ERROR, remark=_FAILED)
        try:
            self._check_life()
            written = self.log.written
            yield self.log.start_flush()
            self.log.note_flushed(written)
            failed = None
        except OSError as error:
            self._store.flusher.stop_writing(f"a flush of pops failed: {reason_of(error)}")
            raise
        finally:
            with answering():
                for request, reply in waiting:
                    if failed is not None and reply.on_lost is not None:
                        reply.on_lost()
                    request.reply(failed or reply)

    def _check_life(self) -> None:
        """Raise StoreNotWritable after a failed flush."""
        life = self._store.commit_log.life
        if life.state is State.FAILED and (refusal := life.refusal):
            raise refusal

    def _take_waiting(self) -> list[tuple[Request, Reply]]:
        waiting, self._waiting = self._waiting, []
        return waiting

    def finish(self) -> None:
        """Write all changes and flush them, for a stop. Raises OSError."""
        try:
            self.write_out()
        finally:
            if self._store.commit_log.life.state is not State.FAILED:
                self.flush_now()
