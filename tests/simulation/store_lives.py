"""One store on a faulty disk, life after life: the store alone, so thousands of seeds a minute.

Each life appends, dispatches, flushes and indexes at random until it is killed, loses power at any
operation of the disk (in the middle of a recovery too), or stops in order. The next one must find:

- the records of the log as they were appended, up to one of them; all of those before it, none
  after it, and at least what was flushed (after a kill: all that was written);
- in each queue those records, from offset 0 on without a gap, and by their keys in the index;
- the same once more when it is opened again.

When the last one has stopped in order, a bit of its files is flipped. The start after that must
say so, or serve all the same.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from headrace_broker.store.errors import StoreBusy, StoreError, StoreFormatError, StoreNotWritable
from headrace_broker.store.message_store import MessageStore
from headrace_protocol.message import CorruptRecord, decode_records, encode_properties
from tests.simulation.determinism import decided_by, temporary_folder
from tests.simulation.history import PromiseBroken
from tests.simulation.totals import Outcome
from tests.support.faulty_files import FaultRates, FaultyFiles, PowerCut, next_life
from tests.support.stores import HOST, SetClock, read_all, ready, small_settings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from headrace_broker.store.settings import StoreSettings
    from headrace_broker.store.store_queue import StoreQueue
    from headrace_protocol.message import StoredMessage

TOPICS = ("One", "Two")
QUEUES = 2
LIVES = 6
STEPS_MAX = 40
INDEX_LOOKS = 20
END_MS = 1 << 60


@dataclass
class Appended:
    """All records in the order of the log; the first ``flushed_count`` are safe."""

    records: list[tuple[str, int, bytes]] = field(default_factory=list)
    flushed_count: int = 0
    written_count: int = 0

    def by_queue(self, count: int) -> dict[tuple[str, int], list[bytes]]:
        queues = defaultdict(list)
        for topic, queue_id, body in self.records[:count]:
            queues[topic, queue_id].append(body)
        return queues


class Life:
    """One store from its start to its end."""

    def __init__(
        self,
        settings: StoreSettings,
        files: FaultyFiles,
        clock: SetClock,
        appended: Appended,
        least_count: int,
    ) -> None:
        self.least_count = least_count
        self.rng = files.rng
        self.files = files
        self.appended = appended
        self.clock = clock
        self.store = MessageStore(settings, clock, files)
        self.steps: list[Callable[[], None]] = [
            *[self.append] * 6,
            self.dispatch,
            self.flush_log,
            self.flush_all,
            self.store.index_tick,
            self.fill_disk,
        ]

    def live(self, step_count: int) -> None:
        self.store.load()
        self.check()
        for _ in range(step_count):
            try:
                self.rng.choice(self.steps)()
            except (StoreNotWritable, StoreBusy, OSError):
                if self.store.commit_log.is_refusal_final:
                    return

    def append(self) -> None:
        """Some messages for one queue, as a batch of requests appends them."""
        store, rng = self.store, self.rng
        queue = store.queue(rng.choice(TOPICS), rng.randrange(QUEUES))
        self.clock.ms += rng.choice((1, 300))
        store.begin_batch()
        for _ in range(rng.choice((1, 1, 3, 20))):
            body = rng.randbytes(rng.choice((0, 10, 300, 1500)))
            key = f"key{len(self.appended.records)}"
            store.append(queue, body, encode_properties({"KEYS": key}), 0, 0, 0, 1, HOST, 0)
            self.appended.records.append((queue.topic, queue.queue_id, body))
        store.write_out()
        self.appended.written_count = len(self.appended.records)

    def dispatch(self) -> None:
        self.store.dispatch()

    def flush_log(self) -> None:
        count = len(self.appended.records)
        self.store.flusher.flush_log_now()
        self.appended.flushed_count = count

    def flush_all(self) -> None:
        count = len(self.appended.records)
        self.store.flusher.flush_now()
        self.appended.flushed_count = count

    def fill_disk(self) -> None:
        self.files.is_full = not self.files.is_full
        self.clock.ms += 2000

    # -- what a start must find --------------------------------------------------------------------

    def check(self) -> None:
        """Compare with what was appended, and forget of it what is gone for good."""
        found = {}
        for queue in self.store.queues:
            messages = self.read(queue)
            offsets = [message.queue_offset for message in messages]
            if offsets != list(range(len(offsets))):
                raise PromiseBroken(f"{queue.topic}/{queue.queue_id} has the offsets {offsets}")
            found[queue.topic, queue.queue_id] = [message.body for message in messages]
        count = sum(map(len, found.values()))
        self.check_records(count, found)
        self.appended.records = self.appended.records[:count]
        self.appended.flushed_count = self.appended.written_count = count
        self.check_index()

    def read(self, queue: StoreQueue) -> list[StoredMessage]:
        try:
            return read_all(self.store, queue)
        except CorruptRecord as error:
            raise PromiseBroken(f"{queue.topic}/{queue.queue_id} is served damaged") from error

    def check_records(self, count: int, found: dict[tuple[str, int], list[bytes]]) -> None:
        if not self.least_count <= count <= len(self.appended.records):
            raise PromiseBroken(
                f"{count} of {len(self.appended.records)} records are there, "
                f"{self.least_count} must be"
            )
        for name, bodies in self.appended.by_queue(count).items():
            if found.get(name) != bodies:
                raise PromiseBroken(f"{name} does not hold what the log's first {count} were")

    def check_index(self) -> None:
        records = list(enumerate(self.appended.records))
        for number, (topic, _, body) in self.rng.sample(records, min(len(records), INDEX_LOOKS)):
            query = partial(self.store.query_index, topic, f"key{number}", 32, 0, END_MS)
            places = ready(query)
            if body not in [record_body(self.store, place) for place in places]:
                raise PromiseBroken(f"key{number} of {topic} leads to {places}, not to its record")


def record_body(store: MessageStore, physical_offset: int) -> bytes | None:
    record = ready(partial(store.record_at, physical_offset))
    return None if record is None else next(iter(decode_records(record))).body


def run(seed: int) -> Outcome:
    """All lives of a store. Raises PromiseBroken."""
    with temporary_folder() as folder, decided_by(seed):
        return _Store(folder / "store", Random(seed)).run()


class _Store:
    """A directory, what was appended to it, and what happened to it."""

    def __init__(self, root: Path, rng: Random) -> None:
        self.rng = rng
        self.clock = SetClock()
        self.settings = random_settings(root, rng)
        self.appended = Appended()
        self.files: FaultyFiles | None = None
        self.outcome = Outcome("store alone", Counter(), Counter())

    def run(self) -> Outcome:
        for _ in range(LIVES):
            self.live()
        for _ in range(2):
            self.live_calmly()
        self.outcome.counts["records kept"] = len(self.appended.records)
        self.flip_bit()
        return self.outcome

    def new_life(self, rates: FaultRates | None = None) -> Life:
        before, appended = self.files, self.appended
        is_on = before is not None and before.image is None
        self.files = next_life(self.settings.root, self.rng, rates, before)
        least_count = appended.written_count if is_on else appended.flushed_count
        return Life(self.settings, self.files, self.clock, appended, least_count)

    def live(self) -> None:
        """One life with faults."""
        rng = self.rng
        life = self.new_life(
            FaultRates(write=rng.choice((0, 0, 0.01)), sync=rng.choice((0, 0, 0.02)))
        )
        files = life.files
        files.cut_after = rng.choice((-1, rng.randrange(150)))
        try:
            life.live(rng.randrange(STEPS_MAX))
            end(life, is_clean=rng.random() < 0.3)
        except PowerCut:
            pass
        except StoreFormatError:
            raise
        except (StoreError, OSError):
            if not (files.faults["failed write"] or files.faults["failed sync"] or files.is_full):
                raise
            files.cut_power()
        finally:
            self.over(life)

    def live_calmly(self) -> None:
        """One life without faults, stopped in order."""
        life = self.new_life()
        try:
            life.live(0)
            life.store.close()
            life.files.stop()
        finally:
            self.over(life)

    def over(self, life: Life) -> None:
        life.store.lock.release()
        self.outcome.faults.update(life.files.faults)
        self.outcome.counts["lives"] += 1
        self.outcome.counts["operations of the disk"] += life.files.operation_count

    def flip_bit(self) -> None:
        assert self.files is not None
        image = self.files.as_written()
        if image.flip_bit(self.rng) is None:
            return
        image.write_to(self.settings.root)
        self.files = None
        life = self.new_life()
        try:
            life.live(0)
            self.outcome.faults["flipped bit, harmless"] += 1
        except StoreError:
            self.outcome.faults["flipped bit, found"] += 1
        finally:
            self.over(life)


def random_settings(root: Path, rng: Random) -> StoreSettings:
    return small_settings(
        root,
        commit_log_file_bytes=rng.choice((4096, 16384, 65536)),
        consume_queue_file_bytes=rng.choice((200, 6000)),
        ring_rows=rng.choice((1 << 6, 1 << 11)),
        index_entry_count=rng.choice((20, 400)),
    )


def end(life: Life, *, is_clean: bool) -> None:
    files, appended = life.files, life.appended
    if is_clean:
        life.store.close()
        if not (files.root / "abort").exists():
            appended.flushed_count = appended.written_count = len(appended.records)
    if files.faults["failed sync"] or files.rng.random() < 0.5:
        # What a failed sync dropped is still in memory: only a restart of the machine shows it.
        files.cut_power()
    else:
        files.kill()
