"""Something is away at any moment: ``python -m tests.chaos.run --minutes 60 --every 20``.

Three brokers, two nameservers, tiers in folders and an S3 server; writers and readers of a plain,
a static and a compacted topic, and a Spark stream. At each tick a fault begins or ends. In the end
every reader must have every acknowledged message, no answer may have been silently a part, and no
fault may have filled the logs. The exit code is 1 if a promise was broken, with the promises.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain, starmap
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from tests.chaos import faults, work
from tests.chaos.faults import Chaos, Episode, Fault
from tests.chaos.ledger import AFTER_S, LINES_MAX, Ledger, LogBook
from tests.chaos.stream import Stream
from tests.chaos.work import COMPACTED, PLAIN, STATIC, TOPICS, Group, Scene, Workers
from tests.support.cluster import Cluster, Own
from tests.support.object_server import bucket_settings, running
from tests.support.own_disk import OwnDisk, may_mount
from tests.support.processes import run as run_command

# The tier of each: a folder, the S3 server, a folder beside a small disk of the broker's own.
IN_FOLDER, IN_BUCKET, ON_OWN_DISK = "broker-a", "broker-b", "broker-c"
DISK_BYTES = 128 << 20
HEAL_S = 60.0
SETTLE_S = 5.0
SETTINGS: dict[str, Any] = {
    "mappedFileSizeCommitLog": 1 << 20,
    "mappedFileSizeConsumeQueue": 20 * 2000,
    "cleanFileForciblyEnable": "true",
    # The least: what the tier has leaves the log as soon as the disk is used as much.
    "diskSpaceCleanForciblyRatio": 30,
    "cleanResourceInterval": 1000,
    "tieredStoreGroupCommitTimeout": 1000,
    "tieredStoreCommitLogMaxSize": 1 << 20,
    "tieredStoreIndexFileMaxHashSlotNum": 1000,
    "tieredStoreIndexFileMaxIndexNum": 5000,
    "compactionMappedFileSize": 1 << 20,
    "compactionScheduleInternal": 20_000,
}


class PairedCluster(Cluster):
    """Its brokers and clients have two nameservers."""

    NAMESERVERS = 2


class Place(NamedTuple):
    """A running cluster, and all that can happen to it."""

    cluster: Cluster
    faults: list[Fault]


@contextmanager
def cluster(folder: Path) -> Iterator[Place]:
    """Brokers with their tiers and disks, and empty topics."""
    server = folder / "s3"
    server.mkdir()
    with (
        running(server) as (bucket, process),
        OwnDisk(folder / ON_OWN_DISK, DISK_BYTES) as disk,
        PairedCluster(
            folder,
            Own(IN_FOLDER, settings=tier_in(tier_of(folder, IN_FOLDER))),
            Own(IN_BUCKET, settings=bucket_settings(bucket)),
            Own(ON_OWN_DISK, disk, tier_in(tier_of(folder, ON_OWN_DISK))),
            **SETTINGS,
        ) as started,
    ):
        for arguments in (
            (PLAIN, "--queues", "2"),
            (STATIC, "--static", "--queues", "6"),
            (COMPACTED, "--compacted", "--queues", "6"),
        ):
            done = run_command("topic", "create", *arguments, nameserver=started.addresses)
            assert done.returncode == 0, done.stderr
        filler = disk.inside(folder / ON_OWN_DISK / "filler")
        yield Place(started, table(folder, started, process, filler))


def tier_in(folder: Path) -> dict[str, object]:
    """The settings of a tier in a folder."""
    return {
        "messageStorePlugIn": "tieredstore",
        "tieredBackendServiceProvider": "posix",
        "tieredStoreFilePath": folder,
    }


def tier_of(folder: Path, broker: str) -> Path:
    """The folder of a broker's tier."""
    return folder / f"tier-{broker}"


def table(
    folder: Path, started: Cluster, server: subprocess.Popen[bytes], filler: Path
) -> list[Fault]:
    """All that can be taken away, filled or paused."""
    daemons = {f"nameserver-{n}": each for n, each in enumerate(started.nameservers)}
    return [
        *chain.from_iterable(starmap(faults.of_daemon, (daemons | started.brokers).items())),
        *(
            faults.of_folder(f"the tier of {name}", tier_of(folder, name))
            for name in (IN_FOLDER, ON_OWN_DISK)
        ),
        faults.of_server("the S3 server", server),
        faults.of_disk(f"the disk of {ON_OWN_DISK}", filler),
    ]


class Run:
    """One run, from the first writer to the last check."""

    def __init__(self, folder: Path, place: Place, seed: int, say: Callable[[str], object]) -> None:
        self.ledger, self.book = Ledger(), LogBook(folder)
        self.chaos = Chaos(place.faults, Random(seed))
        self._folder = folder
        self._cluster = place.cluster
        self._say = say
        self._scene = Scene(place.cluster.addresses, self.ledger, self.book, seed)
        self._group = Group(self._scene)
        self._stream: Stream | None = None

    def go(self, seconds: float, every_s: float, *, spark: bool) -> None:
        """All of it."""
        self.book.start()
        with ExitStack() as stack:
            if spark:
                self._stream = Stream(self._folder, self._scene.nameserver, TOPICS)
                stack.callback(self._stream.kill)
                self._stream.start()
            stack.enter_context(self._group.consumer)
            writers, readers, group = (Workers(self.ledger) for _ in range(3))
            group.start("the group", self._group.run)
            self._start(writers, readers)
            time.sleep(SETTLE_S)
            self._trouble(seconds, every_s)
            writers.stop(HEAL_S)
            readers.stop(work.COMMAND_TIMEOUT_S)
            self._say(f"{self.book.now():6.0f} s  everything is back; healing")
            self._check_readers()
        self.book.stop()
        self._check_logs()

    def _start(self, writers: Workers, readers: Workers) -> None:
        scene = self._scene
        for topic in TOPICS:
            writers.start(f"writer of {topic}", partial(work.write, scene, writers, topic))
        writers.start("writer of keys", partial(work.put, scene, writers))
        for is_local in (False, True):
            look_up = partial(work.look_up, scene, readers, is_local=is_local)
            readers.start(f"table local={is_local}", look_up)
        readers.start("commands", partial(work.run_commands, scene, readers))

    def _trouble(self, seconds: float, every_s: float) -> None:
        now = self.book.now
        until = now() + seconds
        while now() < until:
            next_s = now() + every_s
            self._step(partial(self.chaos.tick, now))
            time.sleep(max(0.0, next_s - now()))
        for episode in self.chaos.active:
            self._step(partial(self.chaos.end, episode, now))
        time.sleep(AFTER_S)

    def _step(self, step: Callable[[], Episode]) -> None:
        try:
            self._tell(step())
        except (AssertionError, OSError) as error:
            self.ledger.violate(f"a fault could not begin or end: {str(error)[-4000:]}")

    def _tell(self, episode: Episode) -> None:
        what = "begins" if episode.ended_s is None else "ends"
        self._say(f"{self.book.now():6.0f} s  {episode.fault.name}: {what}")

    # -- checks ------------------------------------------------------------------------------------

    def _check_readers(self) -> None:
        """Every kind of reader has, or finds within the time to heal, all that was acknowledged."""
        self._cluster.wait_registered()
        wanted = frozenset().union(*map(self.ledger.acknowledged, TOPICS))
        self._await(lambda: wanted <= self._group.read)
        self.ledger.check_names("the group", wanted, self._group.read)
        for topic in TOPICS:
            read = work.read_all(self._scene, topic, HEAL_S)
            self.ledger.check_names(
                f"PullConsumer of {topic}", self.ledger.acknowledged(topic), read
            )
            if not work.consume_by_command(self._scene, topic):
                self.ledger.violate(f"headrace consume {topic} fails with everything back")
        work.check_keys(self._scene)
        if not all(work.get_by_command(self._scene, key) for key in ("key-0", "key-1")):
            self.ledger.violate("headrace kv get fails with everything back")
        if stream := self._stream:
            self._await(lambda: wanted <= stream.read())
            self.ledger.check_names("Spark's output", wanted, stream.read())

    def _await(self, holds: Callable[[], bool]) -> None:
        until = time.monotonic() + HEAL_S
        while time.monotonic() < until and not holds():
            time.sleep(0.5)

    def _check_logs(self) -> None:
        for line in self.book.lines:
            if "Traceback" in line.text:
                self.ledger.violate(f"{line.source} logged a traceback: {line.text[:2000]}")
        for episode in self.chaos.episodes:
            count = self.book.share(episode, self.chaos.episodes)
            if count > LINES_MAX:
                sources = Counter(line.source for line in self.book.during(episode))
                self.ledger.violate(
                    f"{count:.0f} log lines about {episode.fault.name}, which began at "
                    f"{episode.began_s:.0f} s: {dict(sources)}"
                )

    def summary(self) -> str:
        """A line about the faults of the run, and their cost."""
        acknowledged = {each: len(self.ledger.acknowledged(each)) for each in TOPICS}
        episodes = self.chaos.episodes
        lines = [self.book.share(each, episodes) for each in episodes]
        most = max((len(self.book.during(each)) for each in episodes), default=0)
        return (
            f"{len(self.chaos.episodes)} faults, acknowledged {acknowledged}, "
            f"log lines per fault {max(lines, default=0):.0f} at most ({most} with those of faults "
            f"at the same time), {dict(self.ledger.counts)}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--every", type=float, default=20, help="seconds from tick to tick")
    parser.add_argument("--seed", type=int, default=Random().randrange(1 << 32))
    parser.add_argument("--no-spark", action="store_true")
    parser.add_argument("--keep-logs", type=Path, help="folder for all lines, as a file")
    chosen = parser.parse_args()
    if not may_mount():
        sys.exit("this user may not mount a tmpfs of its own (unshare --user --mount)")
    _say(f"seed {chosen.seed}")
    with tempfile.TemporaryDirectory(prefix="headrace-chaos-") as name:
        folder = Path(name)
        with cluster(folder) as place:
            run = Run(folder, place, chosen.seed, _say)
            run.go(chosen.minutes * 60, chosen.every, spark=not chosen.no_spark)
    if chosen.keep_logs:
        lines = (f"{each.at_s:8.1f} {each.source:14} {each.text}\n" for each in run.book.lines)
        (chosen.keep_logs / "chaos.lines").write_text("".join(lines))
    _say(run.summary())
    if run.ledger.violations:
        sys.exit("\n".join(run.ledger.violations))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
