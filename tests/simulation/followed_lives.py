"""The lives of a store with a follower that copies all of it, on the same faulty disk.

However a life ends, the copy then holds what was appended to each queue, from its first message on,
nothing else and nothing twice. When it has caught up that is all that is on disk, though clean-up
may have removed some of it since. A seed stands for other steps than those of a store alone, whose
totals are kept.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace_broker.store.followers.following import Following
from headrace_broker.store.queues.queue_blocks import ReadLimits, read_block
from headrace_protocol.errors import CorruptRecord
from tests.simulation.history import PromiseBroken
from tests.simulation.store_lives import StoreLife, StoreLives
from tests.support.faulty_files import FaultyFiles
from tests.support.followers import CopyingFollower

# Some records, so that a life has many blocks.
LIMITS = ReadLimits(block_bytes=2000)


class FollowedLife(StoreLife):
    """Adds the follower once the store is open."""

    follower: CopyingFollower
    following: Following

    def __init__(self, lives: FollowedLives, files: FaultyFiles) -> None:
        super().__init__(lives, files)
        self.steps += [self.catch_up] * 5

    def check(self) -> None:
        super().check()
        self.follower = CopyingFollower(self.store.root / "copies", self.files)
        self.following = self.store.followers.add(self.follower)

    def catch_up(self) -> None:
        """The follower takes all that is on disk, unless the disk fails."""
        self.following.catch_up()
        self.check_copy(is_whole=True)
        self.counts["times that a follower caught up"] += 1

    def check_copy(self, *, is_whole: bool) -> None:
        """Compare what was copied with what was appended."""
        try:
            copied = self.follower.copied()
        except CorruptRecord as error:
            raise PromiseBroken("what was copied is damaged") from error
        flushed_offset = self.store.commit_log.flushed_offset
        for name, records in self.appended.by_queue().items():
            wanted = [(record.queue_offset, record.body) for record in records]
            found = copied.pop(name, [])
            if found != wanted[: len(found)]:
                raise PromiseBroken(f"the copy of {name} is not what was appended")
            queue = self.store.queue(*name)
            on_disk = sum(
                record.physical_offset < flushed_offset
                and record.queue_offset < queue.consume_queue.max_offset
                for record in records
            )
            if len(found) > on_disk or (is_whole and len(found) < on_disk):
                raise PromiseBroken(f"{len(found)} of {on_disk} messages of {name} were copied")
        if copied:
            raise PromiseBroken(f"{sorted(copied)} were never appended to")


class FollowedLives(StoreLives):
    """Its copy is compared whenever nothing is broken."""

    name = "store with a follower"
    constants = ((read_block, "__defaults__", (LIMITS,)),)
    life_type = FollowedLife
    # Followers leave batches out.
    topics_of_batches: tuple[tuple[str, ...], ...] = ((),)

    def live_calmly(self, *works: Callable[[StoreLife], object]) -> None:
        super().live_calmly(*works, self.copy_rest)

    def finish(self) -> None:
        super().finish()
        counts = self.outcome.counts
        if counts["messages copied"] != counts["records kept"]:
            raise PromiseBroken(f"{counts} in the end")

    def copy_rest(self, life: StoreLife) -> None:
        assert isinstance(life, FollowedLife)
        life.store.flusher.flush_now()
        life.catch_up()
        self.outcome.counts["messages copied"] = sum(map(len, life.follower.copied().values()))
