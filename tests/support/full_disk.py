"""A store that fills its disk and gets over it; a program, for a file system of its own.

``python -m tests.support.full_disk FOLDER LOG_FILE_BYTES`` prints what it did.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Iterable
from pathlib import Path

import trio
import trio.lowlevel

from headrace_broker.clock import SystemClock
from headrace_broker.store.errors import StoreNotWritable
from headrace_broker.store.files.filesystem import Files
from headrace_broker.store.message_store import MessageStore
from headrace_broker.store.settings import Retention, StoreSettings
from tests.support.running import running
from tests.support.stores import put, read_all

PATIENCE_S = 30
BODY = bytes(20_000)


class FullDisk:
    """One run, step by step; ``consumed`` is how far the only group has got."""

    def __init__(self, root: Path, log_file_bytes: int, files: Files | None = None) -> None:
        self.settings = StoreSettings(
            root=root,
            commit_log_file_bytes=log_file_bytes,
            consume_queue_file_bytes=20 * 1024,
            index_slot_count=1000,
            index_entry_count=4000,
            flush_interval_ms=5,
            clean_interval_ms=20,
            retention=Retention(delete_hours=frozenset(), clean_ratio=1.0),
        )
        self.files = files
        self.consumed = 0
        self.refusals: set[str] = set()
        self._open()

    def _open(self) -> None:
        self.store = MessageStore(self.settings, SystemClock(), self.files)
        self.store.load()
        self.store.cleaner.unconsumed = lambda: self._unconsumed
        self.queue = self.store.queue("T", 0)

    def _unconsumed(
        self, topic: str, _ids: Iterable[int]
    ) -> Generator[None, None, dict[int, tuple[int, str]]]:
        yield
        return {0: (self.consumed, "g")} if topic == "T" else {}

    def try_put(self, topic: str = "T") -> bool:
        queue = self.store.queue(topic, 0)
        try:
            put(self.store, queue, BODY, KEYS=str(queue.next_offset))
        except StoreNotWritable as error:
            self.refusals.add(error.reason.partition(" is ")[0])
            return False
        return True

    async def put_until(self, is_accepted: bool) -> None:
        """Try until messages are taken, or are refused."""
        end = time.monotonic() + PATIENCE_S
        while self.try_put() is not is_accepted:
            assert time.monotonic() < end, self.store.statistics()
            await trio.sleep(0 if is_accepted is False else 0.02)

    async def run(self) -> str:
        """All of it; says what it saw."""
        async with running(self.store.run):
            self.try_put("other")
            await self.put_until(is_accepted=False)
            full_offset = self.queue.consume_queue.max_offset
            assert len(read_all(self.store, self.queue)) == full_offset  # reads go on
            assert self.store.commit_log.min_offset == 0  # nobody has consumed it
            self.store.delete_topic("other")  # deletes, too
            self.consumed = full_offset
            while self.store.commit_log.min_offset == 0:  # the deletion may have made some room
                await self.put_until(is_accepted=True)
            for _ in range(full_offset):  # a consumer that keeps up: never full for long
                self.consumed = self.queue.consume_queue.max_offset
                await self.put_until(is_accepted=True)
                await trio.lowlevel.checkpoint()
        self.store.close()
        end_offset = self.queue.next_offset
        self._open()
        assert self.queue.next_offset == end_offset
        offsets = [message.queue_offset for message in read_all(self.store, self.queue)]
        assert offsets == list(range(offsets[0], end_offset))
        self.store.close()
        return f"{full_offset} messages, then {end_offset}: {', '.join(sorted(self.refusals))}"


if __name__ == "__main__":
    sys.stdout.write(trio.run(FullDisk(Path(sys.argv[1]), int(sys.argv[2])).run))
