"""Persists changes by pops: the log of pops, the groups' offsets, and answers that wait for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio

from headrace_protocol.codes import ResponseCode
from headrace_protocol.serving import Reply

if TYPE_CHECKING:
    from headrace_broker.consumer.offsets import ConsumerOffsets
    from headrace_broker.pop.pop_log import PopLog
    from headrace_broker.pop.pops import Pops
    from headrace_broker.store.message_store import MessageStore
    from headrace_protocol.serving import Request

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
        self._waiting: list[tuple[Request, Reply]] = []

    def write_out(self) -> None:
        """Write what has changed. Raises OSError."""
        if self.log.is_pending:
            self.log.write_out()
            self.settle()
            self._requested.set()
            if self._waiting and not self._is_running:
                self.flush_now()

    def settle(self) -> None:
        """Record how far groups are whose progress has changed."""
        for queue in self._pops.take_changed():
            self._offsets.settle(*queue.name, queue.settled_offset)

    async def bring_to_disk(self) -> OSError | None:
        """Bring all that offsets count so far to disk; returns the error of a failure.

        A message that was stored again counts as settled, and might be lost until then. This waits
        for no other task, since a save of offsets is not cut off by a stop.
        """
        commit_log = self._store.commit_log
        try:
            self.write_out()
            written, log_end = self.log.written, commit_log.max_offset
            await self._store.flusher.flush_log()
            if commit_log.flushed_offset < log_end:
                return OSError(str(commit_log.life.refusal))
            await trio.to_thread.run_sync(self.log.start_flush())
        except OSError as error:
            return error
        self.log.note_flushed(written)
        return None

    def save_problem(self) -> OSError | None:
        """The reason not to save offsets, whose messages may be lost; None if there is none."""
        life = self._store.commit_log.life
        return None if life.is_writable else OSError(f"offsets of pops not saved: {life.refusal}")

    def reply(self, request: Request, reply: Reply) -> Reply | None:
        """The answer to a request that may leave after this turn; None if it leaves later."""
        if not self._is_sync or (self.log.flushed == self.log.written and not self.log.is_pending):
            return reply
        self._waiting.append((request, reply))
        self._requested.set()
        return None

    def answer(self, request: Request, reply: Reply) -> None:
        """Answer a request outside of a turn of its client. Raises OSError before that."""
        self.write_out()
        if (now := self.reply(request, reply)) is not None:
            request.reply(now)
        elif not self._is_running:
            self.flush_now()

    async def run(self) -> None:
        """Bring changes to disk until cancelled."""
        self._is_running = True
        interval_s = self._store.settings.flush_interval_ms / 1000
        try:
            while True:
                with trio.move_on_after(_LOOK_S):
                    await self._requested.wait()
                self._requested = trio.Event()
                self.log.note_log_end()
                if not self._is_sync:
                    await trio.sleep(interval_s)
                self.write_out()
                written, waiting = self.log.written, self._take_waiting()
                try:
                    await trio.to_thread.run_sync(self.log.start_flush())
                except OSError as error:
                    self._store.flusher.stop_writing(f"a flush of pops failed: {error.strerror}")
                    self._answer(waiting, Reply(code=ResponseCode.SYSTEM_ERROR, remark=_FAILED))
                else:
                    self.log.note_flushed(written)
                    self._answer(waiting)
        finally:
            self._is_running = False

    def flush_now(self) -> None:
        """Bring all changes to disk in this thread, then answer. Raises OSError.

        Also in a turn, whose answers leave together anyway.
        """
        waiting = self._take_waiting()
        self.write_out()
        written = self.log.written
        self.log.start_flush()()
        self.log.note_flushed(written)
        for request, reply in waiting:
            request.reply(reply)

    def _take_waiting(self) -> list[tuple[Request, Reply]]:
        waiting, self._waiting = self._waiting, []
        return waiting

    def _answer(self, waiting: list[tuple[Request, Reply]], failed: Reply | None = None) -> None:
        with self._store.flusher.answering():
            for request, reply in waiting:
                request.reply(failed or reply)
