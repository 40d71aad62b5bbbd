"""The lives of a broker with tiered topics in a bucket, whose store and way to it have faults.

A life ends as those of ``tiered_lives``, also before and after what any request does. Objects are
merged; uploads, expiry and merges go on beside each other. A rival, another broker of the same
name, takes the tier over in the middle of any request. It uploads what the broker has, and goes on
when the broker has taken the tier back. Whatever happens, the manifest names only what is there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec

from headrace_broker.store.files.cold_files import ColdFiles
from headrace_broker.store.followers.following import _view
from headrace_broker.store.queues.queue_blocks import read_block
from headrace_broker.tiered.access.tiered_storage import TieredStorage
from headrace_broker.tiered.container.stored_tier import Group, Name
from headrace_broker.tiered.objects.object_tier import CATALOGS, DATA, ObjectTier
from headrace_broker.tiered.objects.sizes import ObjectSizes
from headrace_broker.tiered.rescue.verify import _verify_objects
from headrace_protocol.tier.paths import Home
from headrace_protocol.tier.rows import Manifest, ObjectRow
from tests.simulation.history import PromiseBroken
from tests.simulation.tiered_lives import PAUSE_MS, TIER_HOURS, TieredLife, TieredLives
from tests.simulation.world import HOUR_MS, LifeClock
from tests.support.faulty_files import FaultyFiles
from tests.support.simulated_store import TROUBLES, SimulatedStore, StoreClient, StoreWeather
from tests.support.tiers import block

# Of the requests of a broker.
TAKEOVER_RATE: Final = 0.02
RIVAL_RATE: Final = 0.1
INTERRUPTION_RATE: Final = 0.05
# Age of objects that are swept; no put is under way for so long.
SWEEP_MS: Final = 2 * HOUR_MS
MADE_UP: Final = 3
RANDOM_SIZES: Final = {
    "runs": (2, 3),
    "object_bytes": (2500, 20_000),
    "tail": (1, 5),
    "sweep_ms": (SWEEP_MS,),
    "catalog_parts_min": (3, 9),
    "catalog_parts_max": (10, 30),
    "read_bytes": (0, 256 << 10),
}
TOGETHER_BYTES: Final = (3000, 16 << 20)
_rows = msgspec.json.Decoder(list[ObjectRow])
_manifest = msgspec.json.Decoder(Manifest)


class ObjectLife(TieredLife):
    """One life of the broker."""

    troubles = TROUBLES
    weather: StoreWeather

    def __init__(self, lives: ObjectLives, files: FaultyFiles) -> None:
        super().__init__(lives, files)
        self.rival, self.store_of_tier = lives.rival, lives.bucket
        self.is_settled = False
        self._is_merging = self._is_looking = self._is_interrupted = False
        self.steps += [*[self.merge] * 4, *[self.meet_rival] * 2]

    @property
    def objects(self) -> ObjectTier:
        """The tier, which must be open."""
        tier = self.tier.access.tier
        assert isinstance(tier, ObjectTier)
        return tier

    @property
    def is_replaced(self) -> bool:
        return self.rival.is_writer

    def settle(self) -> None:
        super().settle()
        self.is_settled = True

    # -- what happens ------------------------------------------------------------------------------

    def merge(self) -> None:
        """Make some objects, or begin; the merge may go on later."""
        self._is_merging = True
        with self.forgiving():
            for _ in range(self.rng.randrange(1, 6)):
                self.counts["objects made by merges"] += self.tier._merge()
        self._is_merging = False

    def meet_rival(self) -> None:
        """Let the rival work."""
        self.rival.act(self)

    def on_request(self) -> None:
        """Let another thread of this broker work, or its rival."""
        if self.rng.random() < (TAKEOVER_RATE if self.rival.tier is None else RIVAL_RATE):
            self.rival.act(self)
        access = self.tier.access
        can_work = access.is_open and not self._is_interrupted
        can_work = can_work and access._opening is None and not access.writing.locked()
        # What looks for the mark waits for others that do; here it would wait for itself.
        can_work = (
            can_work and access.drivers.mark is not None and not access.drivers.mark._lock.locked()
        )
        if can_work and not self.objects.lock.locked() and self.rng.random() < INTERRUPTION_RATE:
            self.interrupt()

    def interrupt(self) -> None:
        """Do something else in the middle of a merge or a read."""
        works: list[Callable[[], None]] = [self.follow]
        if self._is_merging:
            works += [self.send, self.clean_tier, self.delete_topic]
        elif self._is_looking:
            works.append(self.merge)
        else:
            return
        self._is_interrupted = True
        self.rng.choice(works)()
        self._is_interrupted = False
        self.counts["interruptions"] += 1

    def look(self) -> None:
        self._is_looking = True
        super().look()
        self._is_looking = False

    def pass_time(self) -> None:
        self.store_of_tier.land()
        super().pass_time()

    def mend_tier(self) -> None:
        self.store_of_tier.land(are_lost=self.rng.random() < 0.5)
        super().mend_tier()

    def segment_count(self) -> int:
        if not self.tier.access.is_open:
            return 0
        return sum(len(queue.state.pieces) for queue in self.objects.queues.values())

    # -- the end -----------------------------------------------------------------------------------

    def check_nothing_is_left(self) -> None:
        """The bucket has the objects that the manifest names, and no other."""
        self.rival.tier = None
        while self.tier._merge():
            pass
        tier, store = self.objects, self.store_of_tier
        damage = [
            problem
            for problem in _verify_objects(tier._home, store, deep=True).problems
            if problem.is_damage
        ]
        if damage:
            raise PromiseBroken(f"{damage}")
        # Until all has expired and is swept.
        for _ in range(4):
            self.clock.ms += SWEEP_MS + PAUSE_MS
            self.tier.clean_up({})
        named = {*tier.inventory.objects, *tier.inventory.catalogs}
        left = {
            entry.path.removeprefix(f"{tier.folder}/")
            for folder in (DATA, CATALOGS)
            for entry in _listed(store, f"{tier.folder}/{folder}")
        }
        if left != named:
            raise PromiseBroken(f"{sorted(left ^ named)} are named or there, but not both")


class Rival:
    """Another broker of this name; it does not notice when the tier is taken back.

    tier: as it knows it. may_take_over: whether it does so if it has none.
    """

    def __init__(self, store: SimulatedStore, rng: Random, clock: LifeClock) -> None:
        self._store = store
        self._rng = rng
        self._clock = clock
        self._client = StoreClient(store, StoreWeather(rng, clock), lambda: None)
        self.tier: ObjectTier | None = None
        self.may_take_over = False

    @property
    def is_writer(self) -> bool:
        """True if the tier is the rival's now."""
        tier = self.tier
        if tier is None:
            return False
        stored = self._store.objects[tier.manifest.path]
        return _manifest.decode(stored).writer == tier.manifest.manifest.writer

    def act(self, life: ObjectLife) -> None:
        """Take the tier over, or work on in it, whoever has it now."""
        tier = self.tier
        if tier is None:
            if life.is_settled and self.may_take_over:
                self._take_over(life)
            return
        self._rng.choice((self._upload, self._upload, self._merge, self._clean_up))(tier, life)
        if tier.manifest.replaced is not None:
            self.tier = None

    def _take_over(self, life: ObjectLife) -> None:
        home: Home = life.tier.settings.home
        tier = ObjectTier(self._client, home, life.tier.access.object_sizes)
        failure = tier.start(self._clock.ms)
        if failure is not None:
            raise PromiseBroken(f"the tier can't be taken over: {failure}")
        self.tier = tier
        life.counts["takeovers"] += 1

    def _upload(self, tier: ObjectTier, life: ObjectLife) -> None:
        """Upload the broker's next messages; once the tier is not the rival's any more, others."""
        is_writer = self.is_writer
        group = self._next_messages if is_writer else self._other_messages
        groups = {
            name: found
            for name in life.models
            if name in tier.queues
            and life.tier.access.lives.is_current(name[0])
            and (found := group(name, tier.queues[name].commit_offset, life)) is not None
        }
        failure = tier.append_all(groups, self._clock.ms)
        if is_writer and failure is not None:
            raise PromiseBroken(f"the rival can't upload: {failure}")
        if not is_writer and groups and failure is None:
            raise PromiseBroken("a broker that was replaced has uploaded")
        life.counts["uploads of a rival" if is_writer else "uploads refused"] += bool(groups)

    def _next_messages(self, name: Name, first: int, life: ObjectLife) -> Group | None:
        log, view = life.store.commit_log, _view(life.store.queue(*name))
        found = read_block(view, first, ColdFiles(log.files), log.flushed_offset)
        if found is None or not len(found.units):
            return None
        return Group(found.records, found.units["tags_code"])

    def _other_messages(self, name: Name, first: int, _: ObjectLife) -> Group:
        return Group(*block(first, MADE_UP, name[1], name[0]))

    def _merge(self, tier: ObjectTier, _life: ObjectLife) -> None:
        for _ in range(self._rng.randrange(1, 6)):
            tier.merge(self._clock.ms)

    def _clean_up(self, tier: ObjectTier, life: ObjectLife) -> None:
        before_ms = self._clock.ms - TIER_HOURS * HOUR_MS
        tier.clean_up(lambda _topic: before_ms, self._clock.ms)
        life.note_expiry()


class ObjectLives(TieredLives):
    """A directory and a bucket, and what happened to them."""

    name = "broker with tiered topics in a bucket"
    life_type = ObjectLife
    weather: StoreWeather

    def open_tier(self) -> StoreWeather:
        weather = StoreWeather(self.rng, self.clock)
        self.bucket = SimulatedStore()
        self.bucket.after_change = self.check_manifest
        self.rival = Rival(self.bucket, self.rng, self.clock)
        self._life: ObjectLife | None = None
        self._catalogs: dict[str, list[str]] = {}
        choose = self.rng.choice
        self.sizes = ObjectSizes(**{name: choose(values) for name, values in RANDOM_SIZES.items()})
        self._together_bytes = choose(TOGETHER_BYTES)
        return weather

    def place(self, _folder: Path) -> dict[str, Any]:
        return {"tiered_backend_service_provider": "s3", "object_store_bucket": "bucket"}

    def equip(self, tier: TieredStorage, files: FaultyFiles) -> None:
        tier.access.object_sizes = self.sizes
        tier.access.drivers.open = lambda: self.open_bucket(files)
        tier.upload.together_bytes = self._together_bytes

    def open_bucket(self, files: FaultyFiles) -> StoreClient:
        """The bucket as a broker reaches it until its life ends."""

        def on_request() -> None:
            files.operate()
            if self._life is not None:
                self._life.on_request()

        return StoreClient(self.bucket, self.weather, on_request)

    def new_life(self, files: FaultyFiles) -> TieredLife:
        self._life = None
        life = super().new_life(files)
        assert isinstance(life, ObjectLife)
        self._life = life
        return life

    def live(self) -> None:
        self.rival.may_take_over = self.rng.random() < 0.4
        super().live()
        self.rival.may_take_over = False

    def check_manifest(self) -> None:
        """Check that the objects of the manifest are there, whole."""
        objects = self.bucket.objects
        path = next((path for path in objects if path.endswith("/manifest.json")), None)
        if path is None:
            return
        folder, manifest = path.rpartition("/")[0], _manifest.decode(objects[path])
        named = {reference.name for reference in manifest.tail}
        for reference in manifest.catalogs:
            if f"{folder}/{reference.name}" not in objects:
                raise PromiseBroken(f"the manifest names {reference.name}, which is gone")
            if reference.name not in self._catalogs:
                rows = _rows.decode(objects[f"{folder}/{reference.name}"])
                self._catalogs[reference.name] = [row.name for row in rows if row.name]
            named |= {*self._catalogs[reference.name]}
        gone = [name for name in sorted(named) if f"{folder}/{name}" not in objects]
        if gone:
            raise PromiseBroken(f"the manifest names {gone}, which are gone")


def _listed(store: SimulatedStore, folder: str) -> list[Any]:
    entries = store.entries(folder)
    assert isinstance(entries, list)
    return entries
