"""One store on a faulty disk, life after life: the store alone, so thousands of seeds a minute.

Each life appends, one by one, in blocks that a producer encoded and in batches that are one record,
dispatches, flushes, indexes and cleans up at random until it is killed, loses power at any
operation of the disk (in the middle of a recovery or a clean-up too), or stops in order. Time
passes and jumps, the disk fills up, a group consumes, readers hold on to what they read. The next
life must find:

- the records of the log as they were appended, up to one of them; none after it, and at least what
  was flushed (after a kill: all that was written);
- of those before it all but the first ones, no more of them than ``expiry`` allows, in their queues
  without a gap, and by their keys in the index;
- the same once more when it is opened again.

A queue's first offset only rises, from life to life too once that is on disk. What a reader holds
stays on disk. When the last life has stopped in order, a bit of its files is flipped. The start
after that must say so, or serve all the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

import trio

from headrace_broker.store.errors import StoreBusy, StoreError, StoreNotWritable
from headrace_broker.store.files.filesystem import DiskUsage
from headrace_broker.store.log.batch_units import BATCH_UNIT_BYTES
from headrace_broker.store.log.encoded_records import EncodedRecords
from headrace_broker.store.message_store import MessageStore
from headrace_broker.store.retention import cleaner
from headrace_broker.store.retention.rules import TRUST_S
from headrace_broker.store.retention.topic_floors import TopicLimit
from headrace_broker.store.settings import Retention, StoreSettings
from headrace_broker.store.store_queue import StoreQueue
from headrace_broker.store.store_source import GetStatus
from headrace_protocol.errors import CorruptRecord
from headrace_protocol.frame import Buffer
from headrace_protocol.inner_batch import unwrap_messages
from headrace_protocol.message import (
    StoredMessage,
    decode_records,
    encode_batch,
    encode_properties,
)
from tests.simulation.expiry import Appended, Facts, Name, Record
from tests.simulation.history import PromiseBroken
from tests.simulation.world import DISK_FILES, HOUR_MS, MINUTE_MS, Life, Lives, World
from tests.support.batches import block
from tests.support.faulty_files import FaultRates, FaultyFiles, PowerCut
from tests.support.stores import (
    HOST,
    get_ready,
    query_index,
    read_all,
    ready,
    small_settings,
    units_from,
)

TOPICS = ("One", "Two")
QUEUES = 2
INDEX_LOOKS = 20
END_MS = 1 << 60


class Held(NamedTuple):
    """A reader's data: views, their bytes when given, and their files."""

    views: Sequence[Buffer]
    data: list[bytes]
    paths: set[Path]


class StoreLife(Life):
    """One store from its start to its end."""

    def __init__(self, lives: StoreLives, files: FaultyFiles) -> None:
        super().__init__(lives, files)
        self.appended = lives.appended
        self.least_count = self.appended.written_count
        self.store = MessageStore(lives.settings, self.clock, files)
        self.batch_topics = lives.batch_topics
        self.store.is_batch_topic = self.batch_topics.__contains__
        self.store.cleaner.unconsumed = lambda: self.lowest_unconsumed
        self.limits = lives.limits
        self.store.cleaner.topic_limits = lambda: self.limits
        # The first offset of each queue: as it is on disk, and as it was seen.
        self.shown_from = lives.shown_from
        self.seen_from = dict(self.shown_from)
        # What a killed process removed may come back until something else goes from there.
        self.doubtful_from: dict[Name, int] = {}
        self.is_after_kill = lives.is_on
        self.held: list[Held] = []
        self.asked_rounds = 0
        self.trusted_s: float | None = None  # None until the cleaner has looked at the clock
        self.is_cleaned = True
        self.steps = [
            *[self.append] * 6,
            *[self.append_block] * 2,
            *[self.append_inner_batch] * 2,
            *[self.dispatch] * 2,
            self.flush_log,
            *[self.flush_all] * 2,
            *[self.store.index_tick] * 2,
            self.fill_disk,
            self.crowd_disk,
            *[self.pass_time] * 2,
            self.jump_clock,
            *[self.consume] * 3,
            self.hold,
            self.let_go,
            self.ask,
            *[self.clean] * 4,
        ]

    def start(self) -> None:
        self.store.load()
        self.check()

    def live(self, step_count: int) -> None:
        for _ in range(step_count):
            with suppress(StoreNotWritable, StoreBusy, OSError):
                self.rng.choice(self.steps)()
            if not self.store.commit_log.life.is_writable:
                return

    def close(self) -> None:
        self.store.close()
        if not (self.files.root / "abort").exists():
            self.appended.flushed_count = self.appended.written_count = len(self.appended.records)

    def append(self) -> None:
        """Some messages for one queue, as a batch of requests appends them."""
        store, rng = self.store, self.rng
        queue = store.queue(rng.choice(TOPICS), rng.randrange(QUEUES))
        self.clock.ms += rng.choice((1, 300))
        store.write_path.begin()
        for _ in range(rng.choice((1, 1, 3, 20))):
            body = rng.randbytes(rng.choice((0, 10, 300, 1500)))
            properties = keys_of(len(self.appended.records))
            queue_offset = queue.next_offset
            place = store.write_path.append((queue, body, properties, 0, 0, 0, 1, 0), HOST)
            self.note(queue, queue_offset, place, store.commit_log.max_offset - place, body)
        self.write_out()

    def append_block(self) -> None:
        """Some messages for one queue, as whole records that a producer has encoded."""
        store, rng = self.store, self.rng
        queue = store.queue(rng.choice(TOPICS), rng.randrange(QUEUES))
        bodies = [rng.randbytes(rng.choice((1, 10, 300))) for _ in range(rng.choice((1, 3, 8)))]
        first = len(self.appended.records)
        keys = [keys_of(first + number) for number in range(len(bodies))]
        count, body = block(*bodies, topic=queue.topic, properties=keys)
        records = EncodedRecords(queue, count, body)
        store.write_path.begin()
        queue_offset, place = store.write_path.append_records(records)
        for number, size in enumerate(records.rows["size"].tolist()):
            self.note(queue, queue_offset + number, place, size, bodies[number])
            place += size
        self.write_out()
        self.counts["records in encoded blocks"] += count

    def append_inner_batch(self) -> None:
        """Some messages for one queue, as one record."""
        if not self.batch_topics:
            return
        store, rng = self.store, self.rng
        queue = store.queue(rng.choice(self.batch_topics), rng.randrange(QUEUES))
        bodies = [rng.randbytes(rng.choice((0, 10, 300))) for _ in range(rng.choice((1, 3, 8)))]
        first = len(self.appended.records)
        items = [(0, body, keys_of(first + number)) for number, body in enumerate(bodies)]
        store.write_path.begin()
        queue_offset = queue.next_offset
        message = (queue, encode_batch(items), b"", 0, 0, 0, 1, 0)
        place, _ = store.write_path.append_inner_batch(message, HOST)
        size = store.commit_log.max_offset - place
        for number, body in enumerate(bodies):
            # The bytes count for the last message: a limit drops the record with all of them.
            byte_count = size if number == len(bodies) - 1 else 0
            self.note(queue, queue_offset + number, place, byte_count, body)
        self.write_out()
        self.counts["inner batches"] += 1

    def note(
        self, queue: StoreQueue, queue_offset: int, place: int, byte_count: int, body: bytes
    ) -> None:
        topic, queue_id, now_ms = queue.topic, queue.queue_id, self.store.commit_log.now_ms
        record = Record(topic, queue_id, queue_offset, place, byte_count, now_ms, body)
        self.appended.records.append(record)

    def write_out(self) -> None:
        self.store.write_path.commit()
        self.appended.written_count = len(self.appended.records)

    def dispatch(self) -> None:
        self.store.write_path.publish()

    def flush_log(self) -> None:
        count = len(self.appended.records)
        self.store.flusher.flush_log_now()
        self.flushed(count)

    def flush_all(self) -> None:
        count = len(self.appended.records)
        self.store.flusher.flush_now()
        self.flushed(count)

    def flushed(self, count: int) -> None:
        self.appended.flushed_count = count
        if self.is_cleaned:  # and with the log the names of its files are on disk
            self.note_shown()

    def note_shown(self) -> None:
        for name, offset in self.seen_from.items():
            if offset != self.doubtful_from.get(name):
                self.shown_from[name] = offset

    def fill_disk(self) -> None:
        self.files.is_full = not self.files.is_full
        self.clock.ms += 2000

    # -- clean-up ----------------------------------------------------------------------------------

    def crowd_disk(self) -> None:
        """Somebody fills the disk, or makes room."""
        file_bytes = self.store.settings.commit_log_file_bytes
        used_bytes = round(self.rng.choice((0.5, 0.5, 0.8, 0.87, 0.95)) * DISK_FILES * file_bytes)
        self.files.usage = DiskUsage(used_bytes, DISK_FILES * file_bytes - used_bytes)

    def pass_time(self) -> None:
        self.clock.ms += self.rng.choice((MINUTE_MS, HOUR_MS, 5 * HOUR_MS))

    def jump_clock(self) -> None:
        jump_ms = self.rng.choice((2, 100)) * HOUR_MS
        self.clock.jump(jump_ms)
        if self.trusted_s is not None:
            self.trusted_s = self.clock.current_time() + TRUST_S

    def consume(self) -> None:
        """The group goes on in a queue."""
        consumed = self.appended.consumed
        if consumed:
            name = self.rng.choice(sorted(consumed))
            queue = self.store.find_queue(*name)
            end = queue.consume_queue.max_offset if queue else 0
            consumed[name] = min(consumed[name] + self.rng.choice((5, 50)), end)

    def lowest_unconsumed(
        self, topic: str, queue_ids: Iterable[int]
    ) -> Generator[None, None, Mapping[int, tuple[int, str]]]:
        yield
        consumed = self.appended.consumed
        return {
            queue_id: (consumed[topic, queue_id], "group")
            for queue_id in queue_ids
            if (topic, queue_id) in consumed
        }

    def hold(self) -> None:
        """A reader is given some messages, and takes his time."""
        store, rng = self.store, self.rng
        queue = store.queue(rng.choice(TOPICS), rng.randrange(QUEUES))
        first, end = store.source(queue).min_offset(), store.source(queue).max_offset()
        if first == end:
            return
        offset = rng.choice((first, rng.randrange(first, end)))
        result = get_ready(store, queue, offset)
        assert result.status is GetStatus.FOUND
        paths = set()
        for unit in units_from(queue.consume_queue, offset):
            file = store.commit_log.files.find(unit[0])
            assert file is not None
            paths.add(file.path)
            offset += 1
            if offset == result.next_offset:
                break
        self.held.append(Held(result.buffers, [bytes(view) for view in result.buffers], paths))

    def let_go(self) -> None:
        self.held[:1] = []

    def ask(self) -> None:
        self.store.cleaner.request()
        self.asked_rounds = cleaner.REQUESTED_ROUNDS

    def clean(self) -> None:
        """A round of clean-up."""
        store = self.store
        facts = self.facts()
        self.appended.expire(facts)
        self.asked_rounds = max(self.asked_rounds - 1, 0)
        self.trusted_s = self.trusted_s or -TRUST_S
        self.is_cleaned = False
        try:
            trio.run(store.cleaner.round, clock=self.clock)
        except PowerCut:
            self.counts["power cuts while cleaning"] += 1
            raise
        self.is_cleaned = not store.cleaner.status().waiting_files
        # A round flushes before it removes, and of a flush that failed a part may be done.
        self.appended.flushed_count = self.appended.count_to(store.commit_log.flushed_offset)
        self.count_expired(facts)
        self.check_held()
        self.check_queues()

    def facts(self) -> Facts:
        store, now_ms = self.store, self.clock.ms
        return Facts(
            retention=store.cleaner.retention,
            limits=self.limits,
            now_ms=now_ms,
            disk=self.files.usage,
            file_bytes=store.settings.commit_log_file_bytes,
            log_begin=store.commit_log.min_offset,
            log_end=store.commit_log.max_offset,
            queues_from=Counter({name_of(q): store.source(q).min_offset() for q in store.queues}),
            is_requested=self.asked_rounds > 0,
            is_clock_trusted=self.clock.current_time() >= (self.trusted_s or 0),
            wanted_bytes=store.commit_log.room.wanted_bytes,
        )

    def count_expired(self, before: Facts) -> None:
        store = self.store
        log_begin = store.commit_log.min_offset
        self.counts["clean-ups"] += 1
        self.counts["log files cleaned"] += (log_begin - before.log_begin) // before.file_bytes
        for record in self.appended.records:
            if before.log_begin <= record.physical_offset < log_begin:
                self.counts["records expired"] += 1
            elif record.physical_offset >= log_begin:
                first = store.source(store.queue(*record.name)).min_offset()
                is_trimmed = before.queues_from[record.name] <= record.queue_offset < first
                self.counts["records trimmed"] += is_trimmed

    def check_held(self) -> None:
        for views, data, paths in self.held:
            gone = [path.name for path in sorted(paths) if not path.exists()]
            if gone or [bytes(view) for view in views] != data:
                raise PromiseBroken(f"a reader holds what is gone from {gone}, or has changed")

    def check_nothing_is_left(self) -> None:
        """Check that clean-up has removed what it has to, also after one that was cut off."""
        store = self.store
        log_begin = store.commit_log.min_offset
        used = [file.path for file in store.commit_log.files.files]
        ends = [index_file.header.end_physical_offset for index_file in store.index_files.files]
        used += [index_file.file.path for index_file in store.index_files.files]
        for queue in store.queues:
            files = queue.consume_queue.files.files
            used += [file.path for file in files]
            unit_bytes = queue.consume_queue.unit_bytes
            lasts = [file.end_offset // unit_bytes - 1 for file in files[:-1]]
            ends += [queue.consume_queue.head_of(number)[0] for number in lasts]
        folders = ("commitlog", "consumequeue", "batchconsumequeue", "index")
        there = [p for folder in folders for p in (store.root / folder).rglob("*") if p.is_file()]
        if set(there) != set(used) or any(end < log_begin for end in ends[:-1]):
            raise PromiseBroken(f"{set(there) ^ set(used)} is left, or leads to {ends}")

    # -- what a start must find --------------------------------------------------------------------

    def check(self) -> None:
        """Compare with what was appended, and forget of it what is gone for good."""
        count = self.appended.count_to(self.store.commit_log.max_offset)
        if count < self.least_count:
            total = len(self.appended.records)
            raise PromiseBroken(f"{count} of {total} records are there, {self.least_count} must be")
        self.appended.end(count)
        for name, offset in self.seen_from.items():
            self.seen_from[name] = min(offset, self.next_offset(name))
        self.check_queues()
        for name in self.appended.by_queue():
            queue = self.store.find_queue(*name)
            if queue is None or self.store.source(queue).max_offset() != self.next_offset(name):
                raise PromiseBroken(f"{queue} does not go on at {self.next_offset(name)}")
        if self.is_after_kill:
            self.doubtful_from = dict(self.seen_from)
        self.note_shown()
        self.check_index()

    def next_offset(self, name: Name) -> int:
        """The next queue offset, by the records that are there."""
        return max((r.queue_offset + 1 for r in self.appended.records if r.name == name), default=0)

    def check_queues(self) -> None:
        """Check that queues show what was appended, from an offset on that expiry allows."""
        log_begin = self.store.commit_log.min_offset
        if log_begin > self.appended.log_from:
            raise PromiseBroken(f"the log begins at {log_begin}, not at {self.appended.log_from}")
        records = self.appended.by_queue()
        for queue in self.store.queues:
            name = name_of(queue)
            self.check_queue(queue, records.get(name, []))
            first = self.store.source(queue).min_offset()
            if first < self.seen_from.get(name, 0):
                raise PromiseBroken(f"{queue} begins at {first} again, not {self.seen_from[name]}")
            self.seen_from[name] = first

    def check_queue(self, queue: StoreQueue, records: list[Record]) -> None:
        first, end = self.store.source(queue).min_offset(), self.store.source(queue).max_offset()
        for record in records:
            is_due = record.physical_offset >= self.appended.log_from
            if is_due and self.appended.queues_from[record.name] <= record.queue_offset < first:
                raise PromiseBroken(f"{queue} begins at {first}, without {record.queue_offset}")
        found = [(message.queue_offset, message.body) for message in self.read(queue)]
        wanted = {record.queue_offset: record.body for record in records}
        if found != [(offset, wanted.get(offset)) for offset in range(first, end)]:
            offsets = [offset for offset, _ in found]
            raise PromiseBroken(f"{queue}, of {first} to {end}, does not hold {offsets} as it was")

    def read(self, queue: StoreQueue) -> list[StoredMessage]:
        try:
            return read_all(self.store, queue)
        except CorruptRecord as error:
            raise PromiseBroken(f"{queue.topic}/{queue.queue_id} is served damaged") from error

    def check_index(self) -> None:
        store, records = self.store, list(enumerate(self.appended.records))
        for number, record in self.rng.sample(records, min(len(records), INDEX_LOOKS)):
            places = ready(partial(query_index, store, record.topic, f"key{number}", 32, 0, END_MS))
            bodies = [body for place in places for body in record_bodies(store, place)]
            is_there = record.physical_offset >= store.commit_log.min_offset
            is_due = record.physical_offset >= self.appended.log_from
            if (is_due and record.body not in bodies) or (bodies and not is_there):
                raise PromiseBroken(f"key{number} of {record.topic} leads to {places}")


def name_of(queue: StoreQueue) -> Name:
    return queue.topic, queue.queue_id


def keys_of(number: int) -> bytes:
    return encode_properties({"KEYS": f"key{number}"})


def record_bodies(store: MessageStore, physical_offset: int) -> list[bytes]:
    """Those of the messages of a record."""
    record = ready(partial(store.commit_log.record_at, physical_offset))
    return [] if record is None else [each.body for each in unwrap_messages(decode_records(record))]


class StoreLives(Lives[StoreLife]):
    """A directory, what was appended to it, and what happened to it.

    is_on: the store is what a killed process left in memory, not what a disk kept.
    topics_of_batches: the choices of topics that keep batches as they come.
    """

    name = "store alone"
    step_counts = range(60)
    life_type: type[StoreLife] = StoreLife
    topics_of_batches: tuple[tuple[str, ...], ...] = ((), (), TOPICS[1:], TOPICS)

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.settings = random_settings(self.root, self.rng)
        self.batch_topics = self.rng.choice(self.topics_of_batches)
        self.appended = Appended(consumed=dict.fromkeys(random_queues(self.rng), 0))
        self.shown_from: dict[Name, int] = {}
        self.limits: dict[str, TopicLimit] = {}
        self.is_on = False

    def rates(self) -> FaultRates:
        return FaultRates(write=self.rng.choice((0, 0, 0.01)), sync=self.rng.choice((0, 0, 0.02)))

    def next_files(self, rates: FaultRates | None) -> FaultyFiles:
        self.is_on = self.files is not None and self.files.image is None
        if not self.is_on:
            self.appended.written_count = self.appended.flushed_count
        files = super().next_files(rates)
        self.settings = replace(
            self.settings,
            retention=random_retention(self.rng),
            appends_checksums=self.rng.random() < 0.5,
        )
        self.limits = random_limits(self.rng)
        return files

    def arm(self, files: FaultyFiles) -> None:
        files.cut_after = self.rng.choice((-1, self.rng.randrange(150)))

    def new_life(self, files: FaultyFiles) -> StoreLife:
        return self.life_type(self, files)

    def finish(self) -> None:
        for _ in range(2):
            self.live_calmly(StoreLife.start)
        self.live_calmly(StoreLife.start, StoreLife.clean, StoreLife.check_nothing_is_left)
        self.outcome.counts["records kept"] = len(self.appended.records)
        self.flip_bit()

    def over(self, life: StoreLife | None, files: FaultyFiles) -> None:
        super().over(life, files)
        if life is not None:
            life.held.clear()
            status = life.store.cleaner.status()
            cleaned = life.counts["log files cleaned"] - status.waiting_files
            self.outcome.counts["queue and index files cleaned"] += status.removed_files - cleaned

    def flip_bit(self) -> None:
        assert self.files is not None
        image = self.files.as_written()
        if image.flip_bit(self.rng) is None:
            return
        image.write_to(self.settings.root)
        self.files = None
        self.shown_from.clear()  # what a topic's limits gave up is back with an older copy of it
        files = self.next_files(None)
        life = self.new_life(files)
        try:
            life.start()
            self.outcome.faults["flipped bit, harmless"] += 1
        except StoreError:
            self.outcome.faults["flipped bit, found"] += 1
        finally:
            self.over(life, files)


def random_queues(rng: Random) -> list[Name]:
    """Those that a group consumes."""
    queues = [(topic, queue_id) for topic in TOPICS for queue_id in range(QUEUES)]
    return rng.sample(queues, rng.choice((0, 1, 4)))


def random_retention(rng: Random) -> Retention:
    return Retention(
        reserved_ms=rng.choice((1, 8)) * HOUR_MS,
        delete_hours=rng.choice((frozenset(range(24)), frozenset(range(4, 12)), frozenset())),
        files_max=rng.choice((1, 10)),
        removes_young=rng.random() < 0.7,
        removes_unconsumed=rng.random() < 0.2,
    )


def random_limits(rng: Random) -> dict[str, TopicLimit]:
    """The limits of some topics."""
    return {
        topic: TopicLimit(rng.choice((None, HOUR_MS)), rng.choice((None, 1000, 10_000)))
        for topic in rng.sample(TOPICS, rng.choice((0, 0, 1, 2)))
    }


def random_settings(root: Path, rng: Random) -> StoreSettings:
    return small_settings(
        root,
        commit_log_file_bytes=rng.choice((4096, 16384, 65536)),
        consume_queue_file_bytes=rng.choice((200, 6000)),
        batch_queue_file_bytes=rng.choice((4, 300)) * BATCH_UNIT_BYTES,
        ring_rows=rng.choice((1 << 6, 1 << 11)),
        index_entry_count=rng.choice((20, 400)),
    )
