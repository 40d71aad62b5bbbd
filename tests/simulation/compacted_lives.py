"""Lives of a broker with a compacted topic on a faulty disk, beside a dictionary.

A life ends by a power cut or a kill at any operation of the disk, or by a stop. Whatever a life
has brought to disk is found by the next one, by reading from offset 0 and by key: of each key the
newest value that was flushed, or a later one. After a stop the older messages may be lost, and
another broker, which has them all, brings them back. The topic may be deleted and created again,
empty. A seed decides everything.
"""

from __future__ import annotations

from contextlib import suppress

from headrace_broker.compaction import follower, rebuilds
from headrace_broker.compaction.compactor import Request
from headrace_broker.compaction.master import Pulled
from headrace_broker.compaction.rebuilds import Rebuild
from headrace_broker.store.errors import StoreError
from headrace_broker.topics.attributes import CompactionPolicy
from headrace_protocol.admin_headers import DeleteTopicHeader
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.columns import RecordColumns
from headrace_protocol.key_lookup import NoRecord
from headrace_protocol.message import decode_record
from tests.broker.compaction.test_compaction_lookups import get, key
from tests.broker.compaction.test_compaction_source import SIZES, C, create, follow_unsaved, read
from tests.simulation.history import PromiseBroken
from tests.simulation.world import Life, Lives, World
from tests.support.broker import BrokerUnderTest, broker_config
from tests.support.faulty_files import ENDINGS, FaultRates, FaultyFiles

QUEUE = (C, 0)
OTHER = "OTHER"
KEYS = [f"k{number}" for number in range(12)]
POLICY = CompactionPolicy(delete_retention_ms=1000, max_lag_ms=0)
STEPS = 14
OPERATIONS_MAX = 400
COMMIT_LOG_FILE_BYTES = 2048
MASTER = "127.0.0.1:1"
MASTER_COUNT_MAX = 5
# Two or three pulls.
SAVE_BYTES = 1000
# Of lives in which the topic may be deleted: it must live long enough to be compacted.
DELETE_SHARE = 0.3


class Table:
    """The values of each key in the order in which they were sent; b"" deletes the key."""

    def __init__(self) -> None:
        self._values: dict[str, list[bytes]] = {name: [b""] for name in KEYS}
        self._flushed: dict[str, int] = dict.fromkeys(KEYS, 0)
        self._is_being_deleted = False

    def put(self, name: str, value: bytes) -> None:
        self._values[name].append(value)

    def flushed(self) -> None:
        """All values so far are on disk."""
        self._is_being_deleted = False
        self._flushed = {name: len(values) - 1 for name, values in self._values.items()}

    def settle(self, found: dict[str, bytes]) -> None:
        """Check what a new life finds; the rest is gone for good."""
        for name, values in self._values.items():
            possible = values[self._flushed[name] :]
            if self._is_being_deleted and found:  # of the old topic, which must be whole
                possible.pop()
            value = found.get(name, b"")
            if value not in possible:
                raise PromiseBroken(f"{name} is {value!r}, expected one of {possible}")
            self._values[name] = [value]
        self.flushed()

    def delete_all(self) -> None:
        """All keys are gone, once ``flushed`` says so."""
        self._is_being_deleted = True
        for values in self._values.values():
            values.append(b"")

    def check(self, found: dict[str, bytes]) -> None:
        """Check what a life finds while it lasts."""
        newest = {name: values[-1] for name, values in self._values.items()}
        if {name: found.get(name, b"") for name in KEYS} != newest:
            raise PromiseBroken(f"found {found}, expected {newest}")


class Master:
    """Another broker with the queue: the record at each queue offset, dropped ones are None.

    is_needed: whether the broker has lost its older messages, and not all are back.
    is_whole: whether it has all messages; not after a crash in the middle of a deletion.
    """

    def __init__(self) -> None:
        self._records: list[bytes | None] = []
        self.is_needed = False
        self.is_whole = True

    def follow(self, broker: BrokerUnderTest) -> None:
        """Copy what has been stored since."""
        if not self.is_whole:
            return
        queue = broker.store.queue(*QUEUE)
        while len(self._records) < queue.next_offset:
            result = broker.store.source(queue).get(len(self._records), 1, 1 << 16, None)
            self._records.append(b"".join(result.buffers))

    def begin_anew(self) -> None:
        """The topic was created again."""
        self._records = []
        self.is_whole = True

    def compact(self, end: int) -> None:
        """Drop what was superseded before a queue offset."""
        newest: dict[str, int] = {}
        for offset, record in enumerate(self._records[:end]):
            if record is None:
                continue
            name = decode_record(record).properties["KEYS"]
            if name in newest:
                self._records[newest[name]] = None
            newest[name] = offset

    def pulled(self, offset: int) -> Pulled:
        end = len(self._records)
        found = [at for at in range(offset, end) if self._records[at] is not None]
        if not found:
            return Pulled(None, None, end)
        found = found[:MASTER_COUNT_MAX]
        records = RecordColumns.from_records(b"".join(self._records[at] or b"" for at in found))
        return Pulled(records, found[-1] + 1, end)


class CompactedLife(Life):
    """One life of the broker."""

    def __init__(self, lives: CompactedLives, files: FaultyFiles) -> None:
        super().__init__(lives, files)
        folder = files.root.parent
        self.broker = BrokerUnderTest(
            folder,
            broker_config(folder, **SIZES),
            self.clock,
            files=files,
            commit_log_file_bytes=COMMIT_LOG_FILE_BYTES,
        )
        self.store = self.broker.store
        self._table = lives.table
        self._master = lives.master
        self.steps = [
            *[self.send] * 4,
            self.flush,
            *[self.follow] * 2,
            self.follow_unsaved,
            *[self.compact] * 3,
            self.rebuild,
            self.fail,
            self.look,
        ]
        if self.rng.random() < DELETE_SHARE:
            self.steps.append(self.delete)

    def send(self) -> None:
        for _ in range(self.rng.randrange(1, 9)):
            name = self.rng.choice(KEYS)
            value = b"" if self.rng.random() < 0.25 else b"%d" % self.rng.randrange(10**6)
            self._table.put(name, value)
            self.broker.store_message(C, 0, value, KEYS=name)
            self.counts["messages sent"] += 1

    def flush(self) -> None:
        self.broker.store.flusher.flush_now()
        self._table.flushed()
        self._master.follow(self.broker)

    def follow(self) -> None:
        self.flush()
        self.broker.store.followers.all[0].catch_up()

    def follow_unsaved(self) -> None:
        self.flush()
        follow_unsaved(self.broker)

    def compact(self) -> None:
        # Time passes, so that delete markers go; a small map needs several rounds.
        self.broker.clock.ms += self.rng.choice([0, 1000, 30_000])
        map_bytes = self.rng.choice([200, 2000])
        result = self.broker.compaction.compactor.compact(self._request(map_bytes))
        if result is not None:
            self.counts["compactions"] += 1
            self.counts["rounds"] += result.round_count
            self.counts["messages dropped"] += result.dropped_count

    def _request(self, map_bytes: int) -> Request:
        return Request(QUEUE, POLICY, self.broker.clock.ms, map_bytes, is_forced=True)

    def rebuild(self) -> None:
        if not self._master.is_whole:
            return
        self.follow()
        if self.rng.random() < 0.5:
            self._master.compact(
                self.rng.randrange(self.broker.store.queue(*QUEUE).next_offset + 1)
            )
        compaction = self.broker.compaction
        work = Rebuild(compaction.queues, QUEUE, self.broker.clock.ms)
        if work.begin(MASTER, POLICY.delete_retention_ms):
            self.counts["rebuilds resumed"] += bool(work.checkpoint.position)
            while not work.is_complete():
                work.take(self._master.pulled(work.checkpoint.position))
            work.merge(compaction.compactor, self._request(2000))
            self.broker.store.followers.all[0].retry()
            self.counts["rebuilds"] += 1
        self._master.is_needed = False

    def fail(self) -> None:
        """Follow, compact or rebuild with a full disk."""
        self.flush()
        self.files.is_full = True
        steps = [self.broker.store.followers.all[0].catch_up, self.compact, self.rebuild]
        with suppress(OSError, StoreError):
            self.rng.choice(steps)()
        self.files.is_full = False

    def delete(self) -> None:
        """Delete the topic and create it again, empty."""
        self._table.delete_all()
        # A crash on the way leaves the old topic, an empty one or none.
        self._master.is_whole = False
        answer = self.broker.ask(RequestCode.DELETE_TOPIC_IN_BROKER, DeleteTopicHeader(topic=C))
        if answer.code != ResponseCode.SUCCESS:
            raise PromiseBroken(f"topic not deleted: {answer.remark}")
        if self.rng.random() < 0.5:
            self.broker.store.followers.all[0].catch_up()
        self.create()
        self._master.begin_anew()
        self._table.flushed()
        self.counts["topics deleted"] += 1

    def create_first(self) -> None:
        """Create the topic at a new broker."""
        self.create()
        # A store whose queues are all gone rebuilds them, also those of a deleted topic.
        self.broker.create_topic(OTHER, 1)
        self.broker.store_message(OTHER, 0)
        self.save_tables()

    def create(self) -> None:
        create(self.broker)
        self.save_tables()

    def save_tables(self) -> None:
        self.broker.topics.incarnations.saved.finish()
        self.broker.topics.saved.finish()

    def start(self) -> None:
        if self.broker.topics.get(C) is None:
            self.create()
        if self._master.is_needed:
            self.rebuild()
        self._table.settle(self.found())

    def live(self, step_count: int) -> None:
        super().live(step_count)
        self.flush()

    def close(self) -> None:
        self.broker.close()

    def look(self) -> None:
        self._table.check(self.found())

    def found(self) -> dict[str, bytes]:
        """The messages from offset 0 on; GET_BY_KEY must find the same."""
        messages = read(self.broker)
        offsets = [message.queue_offset for message in messages]
        if offsets != sorted(set(offsets)):
            raise PromiseBroken(f"queue offsets {offsets} do not ascend")
        table = {message.properties["KEYS"]: message.body for message in messages}
        by_key = get(self.broker, *map(key, KEYS))
        for name, value in zip(KEYS, by_key, strict=True):
            if table.get(name, NoRecord.NEVER) != value:
                raise PromiseBroken(f"{name} is {table.get(name)!r} when read, {value!r} by key")
        return table


class CompactedLives(Lives[CompactedLife]):
    """A directory, what was sent for each key, and another broker that has it too."""

    name = "broker with a compacted topic"
    life_count = 4
    step_counts = range(STEPS, STEPS + 1)
    constants = (
        # The key index is brought to disk each time, not once a minute.
        (follower, "INDEX_SYNC_S", -1.0),
        (rebuilds, "_SAVE_BYTES", SAVE_BYTES),
    )

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.table, self.master = Table(), Master()

    def begin(self) -> None:
        self.live_calmly(CompactedLife.create_first)

    def finish(self) -> None:
        self.live_calmly(CompactedLife.start, lambda life: life.live(STEPS))

    def new_life(self, files: FaultyFiles) -> CompactedLife:
        return CompactedLife(self, files)

    def next_files(self, rates: FaultRates | None) -> FaultyFiles:
        before = self.files
        files = super().next_files(rates)
        was_stopped = before is not None and before.image is None and not before.faults["kill"]
        if was_stopped and self.master.is_whole and self.rng.random() < 0.5:
            lose_older(files)
            self.master.is_needed = True
            self.outcome.counts["losses of older messages"] += 1
        return files

    def arm(self, files: FaultyFiles) -> None:
        if ending := self.rng.choice(ENDINGS):
            files.end_after(files.operation_count + self.rng.randrange(OPERATIONS_MAX), ending)

    def end(self, life: CompactedLife) -> None:
        life.close()
        life.files.stop()


def lose_older(files: FaultyFiles) -> None:
    """Remove the compaction log and all files of the CommitLog but the last."""
    lost = [path for path in (files.root / "compaction").rglob("*") if path.is_file()]
    lost += sorted(files.root.glob("commitlog/*"))[:-1]
    for path in sorted(lost):
        files.unlink(path)
        files.mark_names_unsynced(path.parent)
    files.sync_names()
