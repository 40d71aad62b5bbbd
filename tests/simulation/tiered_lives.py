"""Lives of a broker with tiered topics, on a faulty disk that has the tier's folder as well.

A life ends by a power cut or a kill at any operation of the disk, be it of the store or of the
tier, or by a stop. Meanwhile the tier's folder is away or full for a while, answers of it are lost,
log files expire behind the upload, segments of the tier expire, and topics are deleted and made
anew. Whatever happens, a consumer that pulls from the least offset on reads all flushed messages
that have not expired, once, in order and at their offsets. A seed decides everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

import trio

from headrace_broker.cold.breaker import Breaker
from headrace_broker.queue_directory import Source, Use
from headrace_broker.store.files.filesystem import DiskUsage
from headrace_broker.store.followers.following import Following
from headrace_broker.store.settings import Retention
from headrace_broker.store.store_source import GetStatus
from headrace_broker.tiered.access.tiered_storage import TieredStorage
from headrace_broker.tiered.container.stored_tier import StoredTier
from headrace_broker.tiered.container.tier import Tier
from headrace_protocol.errors import RequestError
from headrace_protocol.java_hash import tags_code
from headrace_protocol.message import decode_records
from headrace_protocol.tier.driver import Failure
from tests.simulation.history import PromiseBroken
from tests.simulation.tiered_model import Name, QueueModel, Sent
from tests.simulation.world import DISK_FILES, HOUR_MS, Life, Lives, World
from tests.support.broker import BrokerUnderTest, broker_config
from tests.support.faulty_files import ENDINGS, FaultyFiles
from tests.support.simulated_store import StoreWeather
from tests.support.stores import put, ready
from tests.support.troubled_driver import TROUBLES, TroubledDriver, Weather

TOPICS: Final = ("One", "Two")
# A start makes the unit of the last record anew, also if its topic was deleted, and all units if
# there are none: so this topic has the last record when another is deleted.
KEPT: Final = "Kept"
QUEUES: Final = 2
TAGS: Final = ("", "red", "green")
OPERATIONS_MAX: Final = 600
LOG_FILE_BYTES: Final = 8192
TIER_HOURS: Final = 3
KEYS_ASKED: Final = 3
# Longer than any pause after failed reads.
PAUSE_MS: Final = 61_000
READ_FAILED: Final = (RequestError, OSError)


class TieredLife(Life):
    """One life of the broker."""

    troubles: Sequence[str] = TROUBLES

    def __init__(self, lives: TieredLives, files: FaultyFiles) -> None:
        super().__init__(lives, files)
        self.models = lives.models
        self.weather = lives.weather
        self.broker = BrokerUnderTest(
            files.root.parent,
            lives.config,
            self.clock,
            files=files,
            commit_log_file_bytes=LOG_FILE_BYTES,
            consume_queue_file_bytes=2000,
            index_entry_count=400,
            ring_rows=1 << 11,
            retention=Retention(reserved_ms=HOUR_MS, delete_hours=frozenset(range(24))),
        )
        self.store = self.broker.store
        tier = self.broker.tier
        assert tier is not None
        lives.equip(tier, files)
        self.tier = tier
        tier.reader.breaker = Breaker("the tier", self.clock.current_time)
        self.steps = [
            *[self.send] * 6,
            self.flush,
            *[self.follow] * 5,
            self.pass_time,
            *[self.clean_log] * 3,
            *[self.clean_tier] * 2,
            self.crowd_disk,
            *[self.spoil_tier] * 2,
            self.mend_tier,
            self.delete_topic,
            self.forget_read,
            *[self.look] * 2,
            self.look_by_tag,
            self.look_by_key,
        ]

    @property
    def is_replaced(self) -> bool:
        """True if another broker has taken over the tier."""
        return False

    @property
    def may_fail(self) -> bool:
        """True if the tier may be out of reach."""
        return bool(self.weather.trouble) or self.is_replaced

    @contextmanager
    def forgiving(self) -> Iterator[None]:
        """Let what needs the tier fail if that is out of reach, then or meanwhile."""
        try:
            yield
        except OSError:
            if not self.may_fail:
                raise

    # -- what happens to a broker ------------------------------------------------------------------

    def send(self) -> None:
        topic, queue_id = self.rng.choice(TOPICS), self.rng.randrange(QUEUES)
        queue = self.store.queue(topic, queue_id)
        model = self.models[topic, queue_id]
        self.clock.ms += self.rng.choice((1, 300))
        for _ in range(self.rng.choice((1, 2, 5, 20))):
            body = self.rng.randbytes(self.rng.choice((1, 10, 300, 1500)))
            tags = self.rng.choice(TAGS)
            properties: dict[str, Any] = {
                "KEYS": f"k{len(model.sent)}",
                **({"TAGS": tags} if tags else {}),
            }
            if queue.next_offset != len(model.sent):
                raise PromiseBroken(f"{queue} goes on at {queue.next_offset}")
            model.sent.append(Sent(body, tags, self.clock.ms))  # first: a kill may leave it there
            put(self.store, queue, body, **properties)
            self.counts["messages sent"] += 1

    def flush(self) -> None:
        self.store.flusher.flush_now()
        for model in self.models.values():
            model.flushed_count = len(model.sent)

    def follow(self) -> None:
        """Upload what is there, or as much as the weather allows."""
        self.flush()
        with self.forgiving():
            for following in self.store.followers.all:
                following.catch_up()
            self.counts["uploads"] += 1
        if self.tier.upload.standings.given_up and not self.is_replaced:
            raise PromiseBroken(f"queues are stuck: {self.tier.upload.standings.given_up}")

    def pass_time(self) -> None:
        self.clock.ms += self.rng.choice((HOUR_MS // 4, HOUR_MS, 5 * HOUR_MS))

    def clean_log(self) -> None:
        if self.rng.random() < 0.3:
            self.store.cleaner.request()
        before = self.store.commit_log.min_offset
        trio.run(self.store.cleaner.round, clock=self.clock)
        files = (self.store.commit_log.min_offset - before) // LOG_FILE_BYTES
        self.counts["log files cleaned"] += files

    def clean_tier(self) -> None:
        with self.forgiving():
            before = self.segment_count()
            try:
                self.tier.clean_up({})
            finally:
                self.note_expiry()
            self.counts["segments expired"] += max(before - self.segment_count(), 0)

    def note_expiry(self) -> None:
        """Whatever is old enough now may be gone."""
        expired_ms = self.clock.ms - TIER_HOURS * HOUR_MS
        for model in self.models.values():
            model.expired_ms = max(model.expired_ms, expired_ms)

    def segment_count(self) -> int:
        access = self.tier.access
        if not access.is_open:
            return 0
        return sum(len(queue.log.segments) for queue in files_of(access.tier).queues.values())

    def crowd_disk(self) -> None:
        used = round(self.rng.choice((0.5, 0.5, 0.8, 0.87)) * DISK_FILES * LOG_FILE_BYTES)
        self.files.usage = DiskUsage(used, DISK_FILES * LOG_FILE_BYTES - used)

    def spoil_tier(self) -> None:
        self.weather.trouble = self.rng.choice(self.troubles)
        self.files.faults[f"tier {self.weather.trouble}"] += 1

    def mend_tier(self) -> None:
        self.weather.trouble = ""
        self.clock.ms += PAUSE_MS

    def delete_topic(self) -> None:
        """Delete a topic, also one of which only a part is uploaded, and make it anew."""
        if self.rng.random() < 0.3:
            self.upload_a_part()
        self.replace_topic(self.rng.choice(TOPICS))

    def upload_a_part(self) -> None:
        """Upload for a while, and save no positions."""
        self.flush()
        following = self.tier_following()
        with self.forgiving():
            for work in islice(following._follow(), self.rng.randrange(1, 4)):
                work.run()
            following.follower.sync()
        following._restart()

    def replace_topic(self, topic: str) -> None:
        """Delete a topic and make it anew; a crash meanwhile may bring the old one back."""
        names = [name for name in self.models if name[0] == topic]
        for name in names:
            self.models[name].is_deleted = True
        with self.broker.topics.deleting(topic):
            self.store.delete_topic(topic)
        self.broker.topics.deleted(topic)
        self.broker.store_message(KEPT, 0)
        self.flush()
        if self.rng.random() < 0.3:
            self.follow()
        self.save_tables()
        self.broker.create_topic(topic, QUEUES)
        self.save_tables()
        for name in names:
            self.models[name] = QueueModel()
        self.counts["topics deleted"] += 1

    def save_tables(self) -> None:
        self.broker.topics.incarnations.saved.finish()
        self.broker.topics.saved.finish()

    def forget_read(self) -> None:
        self.clock.ms += PAUSE_MS
        self.tier.reader.expire()

    # -- what consumers see ------------------------------------------------------------------------

    def source(self, name: Name, use: Use = Use.PULL) -> Source:
        return self.broker.directory.serve(*name, use).source

    def look(self) -> None:
        """Read everything; in bad weather as far as it goes."""
        for name in self.models:
            try:
                self.look_at(name)
            except READ_FAILED:
                if not self.may_fail:
                    raise
                self.counts["reads that failed"] += 1
                self.clock.ms += PAUSE_MS

    def look_at(self, name: Name) -> None:
        model, source = self.models[name], self.source(name)
        low, end = ready(self.source(name, Use.BEGIN).min_offset), source.max_offset()
        model.check_begin(name, low)
        found: list[tuple[int, bytes]] = []
        try:
            at = low
            while at < end:
                at = self.pull(source, at, None, found)
        finally:
            model.check(name, found, low, low + len(found))
        if len(found) != end - low:
            raise PromiseBroken(f"{name}: {len(found)} messages were read from {low} to {end}")

    def pull(
        self, source: Source, at: int, tags: frozenset[int] | None, found: list[tuple[int, bytes]]
    ) -> int:
        """Read the next messages; returns the next offset, which passes no unread message."""
        count = self.rng.choice((1, 3, 32))
        result = ready(partial(source.get, at, count, self.rng.choice((1, 2000, 50_000)), tags))
        if result.status is GetStatus.FOUND:
            for buffer in result.buffers:
                found += [(one.queue_offset, one.body) for one in decode_records(buffer)]
        elif result.status is not GetStatus.NO_MATCHED_MESSAGE:
            raise PromiseBroken(f"a pull at {at} says {result}")
        if result.next_offset <= at:
            raise PromiseBroken(f"a pull at {at} leads to {result.next_offset}")
        self.counts["pulls"] += 1
        return result.next_offset

    def look_by_tag(self) -> None:
        name, tag = self.rng.choice(sorted(self.models)), self.rng.choice(TAGS[1:])
        model, source = self.models[name], self.source(name)
        found: list[tuple[int, bytes]] = []
        try:
            low, end = ready(self.source(name, Use.BEGIN).min_offset), source.max_offset()
            at = low
            while at < end:
                at = self.pull(source, at, frozenset({tags_code(tag)}), found)
        except READ_FAILED:
            if not self.may_fail:
                raise
            return
        wanted = [
            (at, sent.body) for at, sent in enumerate(model.sent) if at >= low and sent.tags == tag
        ]
        if found != wanted:
            raise PromiseBroken(f"{name}: {[at for at, _ in found]} have the tag {tag}")

    def look_by_key(self) -> None:
        """The index of the tier has each record that is kept."""
        access = self.tier.access
        if self.may_fail or not access.is_open:
            return
        for name, model in self.models.items():
            queue = access.queue(*name)
            if queue is None or access.tier.index is None or name in self.unsettled():
                continue
            kept = range(queue.min_offset, queue.commit_offset)
            for at in self.rng.sample(kept, min(len(kept), KEYS_ASKED)):
                if model.sent[at].store_ms >= model.expired_ms:
                    hits = access.tier.index.query(name[0], f"k{at}", 0, 1 << 60, 100)
                    units = queue.units(at, 1)
                    assert not isinstance(hits, Failure), hits
                    assert not isinstance(units, Failure), units
                    place = int(units.units["physical_offset"][0])
                    if (name[1], place) not in {(hit.queue_id, hit.log_offset) for hit in hits}:
                        raise PromiseBroken(f"k{at} of {name} is not found by key")

    def unsettled(self) -> set[Name]:
        """Queues whose tier is compared with the log by the next upload."""
        following = self.tier_following()
        return {
            name for name in self.models if name not in {t.name for t in following._tracks.values()}
        }

    def tier_following(self) -> Following:
        """The upload's follower."""
        return next(f for f in self.store.followers.all if f.follower.name == "tier")

    # -- begin and end -----------------------------------------------------------------------------

    def create(self) -> None:
        """Create the topics at a new broker."""
        for topic in TOPICS:
            self.broker.create_topic(topic, QUEUES)
        self.save_tables()
        self.broker.store_message(KEPT, 0)

    def settle(self) -> None:
        """Compare what a new life finds; what it lacks is gone for good."""
        deleted = {name[0] for name, model in self.models.items() if model.is_deleted}
        for name, model in self.models.items():
            if name[0] not in deleted:
                end = self.store.queue(*name).consume_queue.max_offset
                model.settle(name, ready(self.source(name, Use.BEGIN).min_offset), end)
        # Afterwards: this flushes what the others have.
        for topic in sorted(deleted):
            self.replace_topic(topic)

    def start(self) -> None:
        if self.rng.random() < 0.5:
            self.tier.load()
        self.settle()
        self.look()

    def close(self) -> None:
        self.broker.close()
        if not (self.files.root / "abort").exists():
            for model in self.models.values():
                model.flushed_count = len(model.sent)

    def end(self) -> None:
        """Upload everything, let the log forget it, and look once more."""
        self.mend_tier()
        self.follow()
        self.pass_time()
        self.store.cleaner.request()
        self.clean_log()
        self.forget_read()
        self.look()
        self.clean_tier()
        self.forget_read()
        self.look()
        for name, model in self.models.items():
            queue = self.tier.access.queue(*name)
            commit_offset = queue.commit_offset if queue is not None else 0
            if commit_offset != len(model.sent):
                raise PromiseBroken(f"{name} is uploaded to {commit_offset} of {len(model.sent)}")
        self.check_nothing_is_left()

    def check_nothing_is_left(self) -> None:
        """The folder has the files that the metadata names, and no other."""
        tier = files_of(self.tier.access.tier)
        failure = tier.sweep()
        assert failure is None, failure
        folder = self.files.root / "tier" / tier._folder
        there = {path.relative_to(folder).as_posix() for path in folder.rglob("COMMIT_LOG/*")}
        known = {
            queue.log.address.segment_path(row.base_offset).partition("/")[2]
            for queue in tier.queues.values()
            for row in queue.log.segments
        }
        if not there <= known:
            raise PromiseBroken(f"{sorted(there - known)} are left in the tier")


class TieredLives(Lives[TieredLife]):
    """A directory, and what was sent to each queue."""

    name = "broker with tiered topics"
    closed_share = 0.4
    life_type: type[TieredLife] = TieredLife

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.models = {
            (topic, number): QueueModel() for topic in TOPICS for number in range(QUEUES)
        }
        self.config = broker_config(
            world.folder,
            clean_file_forcibly_enable=True,  # the disk is the simulation's
            message_store_plug_in="tieredstore",
            tiered_store_file_reserved_time=TIER_HOURS,
            **self.place(self.root / "tier"),
            tiered_storage_level=self.rng.choice(("NOT_IN_DISK", "NOT_IN_DISK", "FORCE")),
        )
        self.weather = self.open_tier()

    def open_tier(self) -> Weather | StoreWeather:
        """The troubles of the tier."""
        return Weather(self.rng)

    def equip(self, tier: TieredStorage, files: FaultyFiles) -> None:
        """Put the troubles in front of the tier of a life."""
        weather = self.weather
        assert isinstance(weather, Weather)
        root = self.root / "tier"
        tier.access.drivers.open = lambda: TroubledDriver(root, files, weather)

    def place(self, folder: Path) -> dict[str, Any]:
        """The settings that say where the tier is, and how it is kept there."""
        rng = self.rng
        return {
            "tiered_backend_service_provider": "posix",
            "tiered_store_file_path": folder,
            "tiered_store_index_file_max_hash_slot_num": 13,
            "tiered_store_index_file_max_index_num": 50,
            "tiered_store_commit_log_max_size": rng.choice((2000, 8000)),
            "tiered_store_consume_queue_max_size": rng.choice((100, 600)),
            "tiered_store_group_commit_count": rng.choice((3, 4096)),
            "tiered_store_group_commit_size": rng.choice((1000, 4 << 20)),
            "commit_log_rolling_interval": 1,
            "commit_log_rolling_minimum_size": rng.choice((500, 16 << 20)),
        }

    def begin(self) -> None:
        self.live_calmly(TieredLife.create)

    def finish(self) -> None:
        self.live_calmly(TieredLife.start)
        self.live_calmly(TieredLife.start, TieredLife.end)

    def new_life(self, files: FaultyFiles) -> TieredLife:
        self.weather.trouble = ""
        return self.life_type(self, files)

    def arm(self, files: FaultyFiles) -> None:
        if ending := self.rng.choice(ENDINGS):
            files.end_after(self.rng.randrange(OPERATIONS_MAX), ending)


def files_of(tier: StoredTier) -> Tier:
    """A tier of this simulation, which keeps files."""
    assert isinstance(tier, Tier)
    return tier
