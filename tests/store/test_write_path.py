"""What the write path promises: nothing is seen or acknowledged beyond the confirmed offset."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from headrace_broker.store import message_store
from tests.support.stores import FaultyFiles, open_store, put, query_index

if TYPE_CHECKING:
    import pytest

    from headrace_broker.store.message_store import MessageStore


def found(store: MessageStore) -> list[int]:
    return query_index(store, "T", "k", 9, 0, 1 << 62)


def test_a_query_by_key_finds_nothing_before_the_flush(tmp_path: Path) -> None:
    store = open_store(tmp_path, flush="sync")
    offset = put(store, store.queue("T", 0), KEYS="k")
    assert found(store) == []
    store.index_tick()
    assert found(store) == []
    store.flusher.flush_log_now()
    assert found(store) == [offset]
    store.close()


class HeldFiles(FaultyFiles):
    """Syncs of the log wait until they may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()

    def fdatasync(self, descriptor: int) -> None:
        if "/commitlog/" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            self.has_begun.set()
            assert self.may_go_on.wait(5)
        super().fdatasync(descriptor)


async def test_the_indexing_thread_waits_for_the_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_store, "BLOCK_ROWS_MAX", 0)  # small blocks too go to the thread
    files = HeldFiles()
    store = open_store(tmp_path, files=files, flush="sync", index_tick_ms=0)
    store.works_aside = True
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        offset = put(store, store.queue("T", 0), KEYS="k")
        with trio.fail_after(5):
            while not files.has_begun.is_set():  # noqa: ASYNC110 - a thread begins it
                await trio.sleep(0.001)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert found(store) == []
        files.may_go_on.set()
        with trio.fail_after(5):
            while not found(store):  # noqa: ASYNC110 - see above
                await trio.sleep(0.001)
        assert found(store) == [offset]
        nursery.cancel_scope.cancel()
    store.close()
