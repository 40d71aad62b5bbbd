"""kill -9 of a broker and of the official consumer while the queues of a static topic move.

The producer sends each key's messages one after the other, each until it is acknowledged. All of
them are read at the places of their acknowledgements, by the consumer that is killed and by one
that comes later. Between our brokers, in strict mode, offsets have no gap and keys their order.

With one of Apache's brokers in the cluster, a consumer that is killed and started again has that
promise only while Apache's leads no queue that was moved to it: it stores the offset in a pull as
a physical one, and gives it to the next consumer as a greater static one. See FINDINGS.md.
"""

from __future__ import annotations

import subprocess
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random

import pytest
import trio

from headrace.admin.client import Admin
from headrace.admin.statictopic import UnchangedTopic
from headrace.errors import HeadraceError
from headrace_protocol.statictopic.plans import Mode
from tests.conformance.console import Console
from tests.conformance.peer import QUICK_JVM, START_TIMEOUT_S, Peer, headrace_cluster, second_apache
from tests.conformance.probe import wait_for_route
from tests.conformance.test_static_moves import lines, load

pytestmark = [pytest.mark.conformance, pytest.mark.slow, pytest.mark.long]

TOPIC, QUEUES = "KILLED", 4
KEYS, PAUSE_MS = 8, 20
# Apache's brokers don't pass requests on, so a client learns of a move by its next route.
POLL_MS = 500
READ_S = 60
# Of Apache's broker: it holds the pulls of a queue that it has lost for 15 s otherwise.
SHORT_POLLS = {"longPollingEnable": "false"}


class Running:
    """A topic under load on two brokers.

    acknowledged: file of the producer's lines "BODY QUEUE OFFSET".
    """

    def __init__(self, home: Path, peer: Peer, admin: Admin, console: Console) -> None:
        self._home = home
        self._peer = peer
        self._admin = admin
        self._console = console
        self.acknowledged = home / "acknowledged"

    @asynccontextmanager
    async def producing(self) -> AsyncIterator[Callable[[], Awaitable[object]]]:
        """Send until the yielded function is called, which waits for all acknowledgements."""
        await self._admin.create_static_topic(TOPIC, QUEUES)
        with self._client("keyed", self.acknowledged, "producer", KEYS, PAUSE_MS) as process:
            yield partial(trio.to_thread.run_sync, partial(process.communicate, timeout=READ_S))

    @contextmanager
    def reading(self, group: str = "follows") -> Iterator[Path]:
        """A consumer that is killed at the end of the block; yields the file of its lines."""
        file = self._home / f"read-{group}"
        with self._client("consume", file, group):
            yield file

    @contextmanager
    def _client(
        self, work: str, file: Path, group: str, *more: int
    ) -> Iterator[subprocess.Popen[bytes]]:
        """A process of StaticLoad.java, killed at the end of the block."""
        words = (self._peer.nameserver, TOPIC, file, group, POLL_MS, *more)
        command = load(self._home, work, *map(str, words))
        with (
            (self._home / f"{group}.log").open("ab") as log,
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log) as process,
        ):
            try:
                yield process
            finally:
                process.kill()

    async def until_followed(self, file: Path) -> None:
        """Wait until some messages of each queue were read that were sent from now on."""
        seen = len(lines(self.acknowledged))
        with trio.fail_after(READ_S):
            while True:
                new = set(lines(self.acknowledged)[seen:]).intersection(lines(file))
                counts = Counter(line.split()[1] for line in new)
                if len(counts) == QUEUES and min(counts.values()) > 5:
                    return
                await trio.sleep(0.1)

    async def until_all_read(self, file: Path) -> None:
        with trio.fail_after(READ_S):
            while self.unread(file):  # noqa: ASYNC110 - another process writes it
                await trio.sleep(0.2)

    def unread(self, file: Path) -> set[str]:
        """Acknowledgements whose message was not read at their place.

        Those of undecided offsets (-1) name none.
        """
        read = set(lines(file))
        bodies = {line.split()[0] for line in read}
        return {
            line
            for line in set(lines(self.acknowledged)) - read
            if not line.endswith(" -1") or line.split()[0] not in bodies
        }

    async def remap(self, target: str, mode: Mode = Mode.STRICT) -> None:
        await self._admin.remap_static_topic(TOPIC, [target], mode=mode)

    async def remap_by_mqadmin(self, target: str) -> None:
        words = ("remappingStaticTopic", "-t", TOPIC, "-b", target)
        printed = await trio.to_thread.run_sync(lambda: self._console.printed(self._peer, *words))
        assert "Exception" not in printed, printed

    async def remap_and_kill(self, target: str, killed: str, mode: Mode = Mode.STRICT) -> None:
        """Kill a broker in the middle of a remap, start it again, and finish the remap."""
        seed = Random().randrange(1 << 32)
        print(f"seed {seed}")  # noqa: T201

        async def try_to_remap() -> None:
            with suppress(HeadraceError):
                await self.remap(target, mode)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(try_to_remap)
            await trio.sleep(Random(seed).uniform(0, 0.1))
            await self.kill(killed)
        with suppress(UnchangedTopic):
            await self._admin.repair_static_topic(TOPIC)
        with suppress(UnchangedTopic):
            await self.remap(target, mode)

    async def kill(self, name: str) -> None:
        """kill -9 of a broker, which starts again."""
        daemons = self._peer.daemons
        daemons[name].kill()
        daemons[name] = daemons[name].again()
        await trio.to_thread.run_sync(daemons[name].wait_for, '"serving"')
        await trio.to_thread.run_sync(wait_for_route, self._peer.nameserver, START_TIMEOUT_S, name)


async def test_between_our_brokers(tmp_path: Path, console: Console) -> None:
    with headrace_cluster(tmp_path, ["a", "b"], {}) as peer:
        async with (
            Admin(nameserver=peer.nameserver) as admin,
            (running := Running(tmp_path, peer, admin, console)).producing() as stop,
        ):
            with running.reading() as file:
                await running.until_followed(file)
                for target, killed in (("a", "a"), ("b", "b"), ("a", "b")):
                    await running.remap_and_kill(target, killed)
                    await running.until_followed(file)
            with running.reading() as file:
                await running.remap("b")
                await running.kill("b")
                await running.until_followed(file)
                await running.remap("a")
                await running.until_followed(file)
                await stop()
                await running.until_all_read(file)
            with running.reading("late") as late:
                await running.until_all_read(late)
    assert set(lines(file)) == set(lines(late))
    check_strict(lines(late))


def check_strict(found: list[str]) -> None:
    """Offsets without a gap, and each key in order but for messages that were sent again."""
    places: dict[int, dict[int, str]] = defaultdict(dict)
    for line in found:
        body, queue, place = line.split()
        places[int(queue)][int(place)] = body
    for bodies in places.values():
        assert sorted(bodies) == list(range(len(bodies)))
        numbers: dict[str, dict[int, None]] = defaultdict(dict)
        for offset in sorted(bodies):
            key, number = bodies[offset].split("-")
            numbers[key][int(number)] = None  # stays where it was first
        assert all(list(some) == list(range(len(some))) for some in numbers.values())


async def test_beside_one_of_apaches(tmp_path: Path, console: Console) -> None:
    (tmp_path / "apache").mkdir()
    apache = partial(second_apache, settings=SHORT_POLLS, jvm=QUICK_JVM)
    with (
        headrace_cluster(tmp_path, ["ours"], {}) as peer,
        apache(peer, tmp_path / "apache", "theirs"),
    ):
        async with (
            Admin(nameserver=peer.nameserver) as admin,
            (running := Running(tmp_path, peer, admin, console)).producing() as stop,
        ):
            with running.reading() as file:
                await running.until_followed(file)
            # Apache's leads its first items, whose offsets are the physical ones.
            with running.reading() as file:
                await running.kill("ours")
                await running.until_followed(file)
                await running.remap_by_mqadmin("theirs")
                await running.until_followed(file)
                await running.remap_and_kill("ours", "ours", Mode.AVAILABLE)
                await running.until_followed(file)
            with running.reading() as file:
                await running.remap("theirs")
                await running.kill("ours")
                await running.until_followed(file)
                await running.remap_by_mqadmin("ours")
                await running.until_followed(file)
                await stop()
                await running.until_all_read(file)
            with running.reading("late") as late:
                await running.until_all_read(late)
