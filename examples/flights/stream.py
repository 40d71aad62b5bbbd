"""The flights pass through a Spark stream that is killed halfway.

The stream is a separate program (``examples.flights.delays``). This module starts it, kills it,
restarts it, and compares its output with the flights that the consumers received.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec
import trio

from examples.flights.ledger import FLIGHT_COUNT, TOPIC, CarrierDelays, Check
from headrace.consumer.pull import PullConsumer
from headrace.errors import HeadraceError
from headrace.messages import Message

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from headrace.embedded import Embedded

DELAYS = "flight-delays"
_QUEUES = 4
_ROOT = Path(__file__).parents[2]
_STALL_S = 120.0
# A week's sums are written once a later flight arrives, so a flight of the next year completes the
# last week. That flight belongs to no carrier, and its own week is never completed.
_NEXT_YEAR = {"carrier": "", "time_hour": "2014-03-01T00:00:00Z", "dep_delay": "", "arr_delay": ""}


class Progress(msgspec.Struct, frozen=True):
    """A line of the program's output. rows: in a micro-batch; None once the stream caught up."""

    batch_id: int
    rows: int | None = None


class StreamFailed(HeadraceError):
    """The stream's program ended or stopped producing output."""

    def __init__(self, what: str, log: Path) -> None:
        tail = log.read_text(errors="replace").strip()[-4000:]
        super().__init__(f"the Spark stream {what}; end of its log:\n{tail}")


class WeekDelays(CarrierDelays):
    """A message of the results topic: sums over one carrier's flights in one week."""

    carrier: str = ""
    week: str = ""


class StreamView(Protocol):
    """Progress display of the stream."""

    def rows(self, count: int, batch_count: int) -> None:
        """Show the number of flights in committed micro-batches."""

    def note(self, text: str) -> None:
        """Show an action taken on the stream."""


class Streamed(NamedTuple):
    """The outcome of the stream.

    rows_by_batch: number of flights that Spark read, by micro-batch id. killed_at: number of
    flights in committed micro-batches when the stream was killed. weeks: the results.
    """

    rows_by_batch: Mapping[int, int]
    killed_at: int
    weeks: list[WeekDelays]

    def checks(self, carriers: Mapping[str, CarrierDelays]) -> list[Check]:
        """The stream's guarantees. carriers: sums over the flights that consumers received."""
        read = sum(self.rows_by_batch.values()) - 1  # without the flight of the next year
        repeated = len(self.weeks) - len({(week.carrier, week.week) for week in self.weeks})
        differ = _differing(_totals(self.weeks), carriers)
        return [
            Check(
                "stream killed in the middle and resumed",
                0 < self.killed_at < FLIGHT_COUNT,
                f"after {self.killed_at} flights",
            ),
            Check(
                "each flight read once by Spark",
                read == FLIGHT_COUNT,
                f"{read} in {len(self.rows_by_batch)} micro-batches",
            ),
            Check(
                "each carrier's week written once",
                repeated == 0 < len(self.weeks),
                f"{len(self.weeks)} results, {repeated} repeated",
            ),
            Check(
                f"totals of {len(carriers)} carriers equal the consumers'",
                not differ,
                f"{len(differ)} differ",
            ),
        ]


def _totals(weeks: list[WeekDelays]) -> dict[str, CarrierDelays]:
    totals: dict[str, CarrierDelays] = {}
    for week in weeks:
        totals.setdefault(week.carrier, CarrierDelays()).add_sums(week)
    return totals


def _differing(ours: Mapping[str, CarrierDelays], theirs: Mapping[str, CarrierDelays]) -> list[str]:
    return [name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)]


@asynccontextmanager
async def starting_spark(mq: Embedded) -> AsyncIterator[Stream]:
    """Start Spark, which takes seconds, while the block does other work; killed at its end."""
    with TemporaryDirectory(prefix="headrace-flights-") as folder:
        stream = Stream(mq.nameserver, Path(folder))
        try:
            await stream.start_session()
            yield stream
        finally:
            with trio.CancelScope(shield=True):
                await stream.close()


async def stream_delays(mq: Embedded, stream: Stream, view: StreamView) -> Streamed:
    """Have Spark read all flights and write delays by carrier and week; kill it once midway.

    Raises StreamFailed.
    """
    async with mq.admin() as admin:
        await admin.create_topic(DELAYS, queues=_QUEUES)
    await stream.start_reading()
    # For the time after the kill: starting takes longer than reading.
    await stream.start_session()
    killed_at = await stream.read_until(FLIGHT_COUNT // 2, view)
    await stream.kill()
    view.note(f"killed Spark after {killed_at} flights, another Spark takes over")
    await stream.catch_up(view)
    view.note("sending a flight of the next year to complete the last weeks")
    await _send_next_year(mq)
    await stream.catch_up(view)
    return Streamed(stream.rows_by_batch, killed_at, await _read_results(mq))


class Stream:
    """The stream's program; every process of it uses the same checkpoint."""

    def __init__(self, nameserver: str, folder: Path) -> None:
        self.rows_by_batch: dict[int, int] = {}
        self._command = [sys.executable, "-m", "examples.flights.delays", nameserver]
        self._command.append(str(folder / "checkpoint"))
        self._log = folder / "log"
        self._process: trio.Process | None = None
        self._next_process: trio.Process | None = None
        self._received = bytearray()

    async def start_session(self) -> None:
        """Start the next process; it starts a Spark session, then waits until it is to read."""
        with self._log.open("ab") as log:
            self._next_process = await trio.lowlevel.open_process(
                self._command,
                cwd=_ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )

    async def kill(self) -> None:
        """Kill the process that reads, and its Java process."""
        process, self._process = self._process, None
        await _kill(process)

    async def close(self) -> None:
        """Kill all processes."""
        await self.kill()
        await _kill(self._next_process)

    async def read_until(self, rows: int, view: StreamView) -> int:
        """Return the rows in committed micro-batches, once they are at least ``rows``."""
        while sum(self.rows_by_batch.values()) < rows:
            await self._next_progress(view)
        return sum(self.rows_by_batch.values())

    async def catch_up(self, view: StreamView) -> None:
        """Read everything."""
        await self.start_reading()
        while (await self._next_progress(view)).rows is not None:
            pass

    async def start_reading(self) -> None:
        """Have a process read everything: the one that did before, or the next one."""
        if self._process is None:
            self._process, self._next_process = self._next_process, None
            self._received.clear()
        assert self._process is not None
        assert self._process.stdin is not None
        await self._process.stdin.send_all(b"\n")

    async def _next_progress(self, view: StreamView) -> Progress:
        progress = msgspec.json.decode(await self._read_line(), type=Progress)
        if progress.rows is not None:
            self.rows_by_batch[progress.batch_id] = progress.rows
            view.rows(sum(self.rows_by_batch.values()), len(self.rows_by_batch))
        return progress

    async def _read_line(self) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        while b"\n" not in self._received:
            with trio.move_on_after(_STALL_S) as limit:
                data = await self._process.stdout.receive_some()
            if limit.cancelled_caught:
                raise StreamFailed(f"produced no output for {_STALL_S:g} s", self._log)
            if not data:
                raise StreamFailed("ended", self._log)
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return bytes(line)


async def _kill(process: trio.Process | None) -> None:
    if process is not None:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _send_next_year(mq: Embedded) -> None:
    async with mq.producer() as producer:
        await producer.send(Message(TOPIC, msgspec.json.encode(_NEXT_YEAR)))


async def _read_results(mq: Embedded) -> list[WeekDelays]:
    """All messages of the results topic."""
    async with mq.admin() as admin:
        stats = await admin.topic_stats(DELAYS)
    count = sum(offset.message_count for offset in stats.values())
    decode = msgspec.json.Decoder(WeekDelays).decode
    weeks: list[WeekDelays] = []
    async with PullConsumer(nameserver=mq.nameserver, connect=mq.connect) as consumer:
        await consumer.assign(await consumer.queues(DELAYS))
        while len(weeks) < count:
            batch = await consumer.receive_many(timeout_ms=1000)
            if batch is not None:
                weeks += map(decode, batch.values())
    return weeks
