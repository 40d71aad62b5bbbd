"""Batches whose units are made with their rows: dispatch gives what it gives row by row."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from headrace_broker.store.errors import StoreBusy
from headrace_broker.store.log import commit_log
from headrace_broker.store.log.batch_records import Origin
from headrace_broker.store.log.ring import RUN_ROWS_MIN
from headrace_broker.store.message_store import MessageStore
from headrace_broker.store.store_queue import StoreQueue
from headrace_protocol.message import INNER_BATCH, encode_batch
from headrace_protocol.message_ids import encode_host
from tests.support.seeds import seeds
from tests.support.stores import HOST, FaultyFiles, crash, open_store, put, read_all, units_from

Item = tuple[int, bytes, bytes]
QUEUES = [("A", 0), ("A", 1), ("B", 0)]


class NoUniformBatch:
    """Stands for ``UniformBatch``: no batch is one."""

    @staticmethod
    def of(*_: Any) -> None:
        return None


def drain(store: MessageStore, confirmed_offset: int | None = None) -> tuple[bool, list[str]]:
    """True if all that may be put was, and the queues that got units."""
    dispatcher = store.dispatcher
    try:
        dispatcher.drain(confirmed_offset)
    finally:
        touched = dispatcher.take_touched()
    return not dispatcher.is_interrupted, sorted(map(name_of, touched))


def name_of(queue: StoreQueue) -> str:
    return f"{queue.topic}/{queue.queue_id}"


def units(store: MessageStore) -> dict[str, list[tuple[int, int, int]]]:
    """Those of each queue, from the oldest on."""
    queues = [queue.consume_queue for queue in store.queues]
    found = [units_from(queue, queue.first_offset) for queue in queues]
    return dict(zip(map(name_of, store.queues), found, strict=True))


class Life:
    """A store and what a seed does to it; ``seen`` is what must not depend on the way."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = Random(seed)
        self.files = FaultyFiles()
        self.sizes: dict[str, Any] = {
            "commit_log_file_bytes": 1 << 14,
            "ring_rows": 128,
            "appends_checksums": self.rng.random() < 0.3,
            "store_host": encode_host("::1", 1) if self.rng.random() < 0.3 else HOST,
        }
        self.folder = folder
        self.store = open_store(folder, files=self.files, **self.sizes)
        self.seen: list[object] = []
        self.runs_made = 0

    def live(self) -> None:
        steps = [self.batch] * 4 + [self.single, self.drain_all, self.drain_some, self.drain_some]
        steps += [self.drain_on_a_full_disk, self.drain_without_new_files, self.index, self.delete]
        for _ in range(60):
            step = self.rng.choice(steps)
            self.seen.append((step.__name__, step()))
        self.seen.append((drain(self.store), units(self.store)))

    def queue(self) -> StoreQueue:
        return self.store.queue(*self.rng.choice(QUEUES))

    def batch(self) -> object:
        rng, queue = self.rng, self.queue()
        body = encode_batch(self.items())
        born_host = rng.choice([HOST, encode_host("::1", 1)])
        try:
            first, physical_offsets = self.store.write_path.append_batch(
                queue, body, rng.choice([0, 2]), Origin(7, born_host, 1)
            )
        except StoreBusy as error:
            self.store.index_tick()
            return str(error)
        self.runs_made += len(self.store.ring.runs)
        return first, physical_offsets.tolist()

    def items(self) -> list[Item]:
        rng = self.rng
        count, size = rng.randint(1, 40), rng.randint(0, 20)
        is_alike = rng.random() < 0.8
        tags = rng.choice([["T"], ["T", "U"], [""]])
        end = rng.choice([b"\x02", b""]) if rng.random() < 0.2 else b"\x02"
        items = []
        for number in range(count):
            tag = rng.choice(tags)
            text = f"KEYS\x01k{number % 10}" + (f"\x02TAGS\x01{tag}" if tag else "")
            body = rng.randbytes(size if is_alike else rng.randint(0, 20))
            items.append((0 if is_alike else number, body, text.encode() + end))
        return items

    def single(self) -> object:
        if self.store.ring.written == self.store.ring.limit:
            return None
        return put(self.store, self.queue(), dispatch=False, TAGS="T")

    def drain_all(self) -> object:
        return drain(self.store), units(self.store)

    def drain_some(self) -> object:
        """Up to an offset between those of the waiting records, mostly in the middle of a batch."""
        waiting = range(self.store.dispatcher.cursor.taken, self.store.ring.written)
        if not waiting:
            return None
        row = self.store.ring.rows[self.rng.choice(waiting) & self.store.ring.mask]
        confirmed_offset = int(row["physical_offset"]) + self.rng.choice([0, 1])
        return drain(self.store, confirmed_offset), units(self.store)

    def drain_on_a_full_disk(self) -> object:
        """Units put before the error may differ; those that are there once it is over may not."""
        self.files.is_full = True
        try:
            drain(self.store)
        except OSError:
            pass
        finally:
            self.files.is_full = False
        drain(self.store)
        return units(self.store)

    def drain_without_new_files(self) -> object:
        dispatcher = self.store.dispatcher
        dispatcher.new_files_max = self.rng.choice([0, 1])
        try:
            return drain(self.store), units(self.store), dispatcher.cursor.taken
        finally:
            dispatcher.new_files_max = sys.maxsize

    def index(self) -> None:
        self.store.index_tick()

    def delete(self) -> None:
        if self.rng.random() < 0.3:
            self.store.delete_topic("A")

    def log(self) -> list[bytes]:
        self.store.write_path.commit()
        return [bytes(file.view[:used]) for file, used in self.store.commit_log.used]


@pytest.mark.parametrize("seed", seeds(24))
def test_every_way_gives_the_same_log_and_units(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = Life(tmp_path / "fast", seed)
    fast.live()
    assert fast.runs_made > 3
    monkeypatch.setattr(commit_log, "UniformBatch", NoUniformBatch)
    slow = Life(tmp_path / "slow", seed)
    slow.store.ring.run_rows_min = sys.maxsize
    slow.live()
    assert slow.runs_made == 0
    for fast_step, slow_step in zip(fast.seen, slow.seen, strict=True):
        assert fast_step == slow_step
    assert fast.log() == slow.log()
    assert recovered_units(fast) == recovered_units(slow)


def recovered_units(life: Life) -> object:
    """The rows that a start after a crash makes of the log."""
    crash(life.store)
    store = open_store(life.folder, files=life.files, **life.sizes)
    found = units(store)
    store.close()
    return found


def plain(count: int) -> bytes:
    return encode_batch([(0, b"body", b"TAGS\x01T\x02")] * count)


def append(store: MessageStore, count: int) -> None:
    store.write_path.append_batch(store.queue("T", 0), plain(count), 0, Origin(1, HOST))


def test_a_run_is_put_without_a_look_at_its_rows(tmp_path: Path) -> None:
    store = open_store(tmp_path, ring_rows=128, commit_log_file_bytes=1 << 16)
    append(store, 50)
    assert [len(run.units) for run in store.ring.runs] == [50]
    store.ring.rows["tags_code"][:50] = 7
    assert drain(store) == (True, ["T/0"])
    assert {unit[2] for unit in units_from(store.queue("T", 0).consume_queue, 0)} == {ord("T")}
    assert not store.ring.runs
    assert store.ring.taken == 0  # the index has not taken them
    store.write_path.commit()
    assert [m.queue_offset for m in read_all(store, store.queue("T", 0))] == list(range(50))


def test_a_run_across_the_rings_seam(tmp_path: Path) -> None:
    store = open_store(tmp_path, ring_rows=64, commit_log_file_bytes=1 << 16)
    for count in (50, 50, 64, 10):
        append(store, count)
        newest = store.ring.rows[(store.ring.written - 1) & store.ring.mask]
        assert newest["queue_offset"] == store.queue("T", 0).next_offset - 1
        drain(store)
        store.index_tick()
    assert store.queue("T", 0).consume_queue.max_offset == 174


def test_a_run_waits_until_all_of_it_is_confirmed(tmp_path: Path) -> None:
    store = open_store(tmp_path, commit_log_file_bytes=1 << 16)
    append(store, RUN_ROWS_MIN)
    append(store, RUN_ROWS_MIN)
    first, second = store.ring.runs
    assert drain(store, 0) == (True, [])
    assert list(store.ring.runs) == [first, second]
    # All but one of its rows: they are put by themselves, and so is the last one.
    assert drain(store, first.last_physical_offset) == (True, ["T/0"])
    assert store.queue("T", 0).consume_queue.max_offset == RUN_ROWS_MIN - 1
    assert list(store.ring.runs) == [second]
    assert drain(store, second.last_physical_offset + 1) == (True, ["T/0"])
    assert store.queue("T", 0).consume_queue.max_offset == 2 * RUN_ROWS_MIN
    assert not store.ring.runs


def test_small_batches_are_no_runs(store: MessageStore) -> None:
    append(store, RUN_ROWS_MIN - 1)
    assert not store.ring.runs
    assert drain(store) == (True, ["T/0"])


def test_a_run_never_has_a_flag_of_records_without_a_unit(
    store: MessageStore, queue: StoreQueue
) -> None:
    store.write_path.append_batch(queue, plain(RUN_ROWS_MIN), INNER_BATCH, Origin(1, HOST))
    assert not store.ring.rows["sys_flag"][:RUN_ROWS_MIN].any()
