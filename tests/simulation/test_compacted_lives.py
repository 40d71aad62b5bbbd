"""Lives of a broker with a compacted topic on a faulty disk, beside a dictionary.

A life ends by a power cut or a kill at any operation of the disk, or by a stop. Whatever a life
has brought to disk is found by the next one, by reading from offset 0 and by key: of each key the
newest value that was flushed, or a later one. A seed decides everything; as a program it takes the
first seed and their number: ``python -m tests.simulation.test_compacted_lives 0 500``.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest

from headrace_broker.compaction.compactor import Request
from headrace_broker.store.errors import StoreError
from headrace_broker.topics.attributes import CompactionPolicy
from headrace_protocol.key_lookup import NoRecord
from tests.broker.test_compaction_lookups import get, key
from tests.broker.test_compaction_source import SIZES, C, create, read
from tests.support.broker import BrokerUnderTest, broker_config
from tests.support.faulty_files import FaultyFiles, PowerCut, next_life
from tests.support.stores import SetClock

if TYPE_CHECKING:
    from collections.abc import Callable

KEYS = [f"k{number}" for number in range(12)]
POLICY = CompactionPolicy(delete_retention_ms=20_000, max_lag_ms=0)
LIVES = 5
STEPS = 14
OPERATIONS_MAX = 400


class Table:
    """The values of each key in the order in which they were sent; b"" deletes the key."""

    def __init__(self) -> None:
        self._values: dict[str, list[bytes]] = {name: [b""] for name in KEYS}
        self._flushed: dict[str, int] = dict.fromkeys(KEYS, 0)

    def put(self, name: str, value: bytes) -> None:
        self._values[name].append(value)

    def flushed(self) -> None:
        """All values so far are on disk."""
        self._flushed = {name: len(values) - 1 for name, values in self._values.items()}

    def settle(self, found: dict[str, bytes]) -> None:
        """Check what a new life finds; the rest is gone for good."""
        for name, values in self._values.items():
            possible = values[self._flushed[name] :]
            value = found.get(name, b"")
            assert value in possible, f"{name} is {value!r}, expected one of {possible}"
            self._values[name] = [value]
        self.flushed()

    def check(self, found: dict[str, bytes]) -> None:
        """Check what a life finds while it lasts."""
        newest = {name: values[-1] for name, values in self._values.items()}
        assert {name: found.get(name, b"") for name in KEYS} == newest


class Life:
    """One life of the broker."""

    def __init__(
        self, folder: Path, files: FaultyFiles, table: Table, rng: Random, clock: SetClock
    ) -> None:
        config = broker_config(folder, **SIZES)
        self.broker = BrokerUnderTest(folder, config, clock, files=files)
        self._files = files
        self._table = table
        self._rng = rng
        self.steps: list[Callable[[], None]] = [
            *[self.send] * 4,
            self.flush,
            *[self.follow] * 3,
            *[self.compact] * 3,
            self.fail,
            self.look,
        ]

    def send(self) -> None:
        for _ in range(self._rng.randrange(1, 9)):
            name = self._rng.choice(KEYS)
            value = b"" if self._rng.random() < 0.15 else b"%d" % self._rng.randrange(10**6)
            self._table.put(name, value)
            self.broker.store_message(C, 0, value, KEYS=name)

    def flush(self) -> None:
        self.broker.store.flusher.flush_now()
        self._table.flushed()

    def follow(self) -> None:
        self.flush()
        self.broker.store.followers.all[0].catch_up()

    def compact(self) -> None:
        request = Request((C, 0), POLICY, self.broker.clock.ms, 2000, is_forced=True)
        self.broker.parts.compaction.compactor.compact(request)

    def fail(self) -> None:
        """Follow or compact with a full disk."""
        self.flush()
        self._files.is_full = True
        with suppress(OSError, StoreError):
            self._rng.choice([self.broker.store.followers.all[0].catch_up, self.compact])()
        self._files.is_full = False

    def look(self) -> None:
        self._table.check(self.found())

    def found(self) -> dict[str, bytes]:
        """What is read from offset 0 on; GET_BY_KEY must find the same."""
        messages = read(self.broker)
        offsets = [message.queue_offset for message in messages]
        assert offsets == sorted(set(offsets))
        table = {message.properties["KEYS"]: message.body for message in messages}
        by_key = get(self.broker, *map(key, KEYS))
        for name, value in zip(KEYS, by_key, strict=True):
            assert table.get(name, NoRecord.NEVER) == value
        return table


def live(folder: Path, files: FaultyFiles, table: Table, rng: Random, clock: SetClock) -> None:
    """A life to its end, which may be a PowerCut."""
    life = Life(folder, files, table, rng, clock)
    try:
        table.settle(life.found())
        for _ in range(STEPS):
            rng.choice(life.steps)()
        life.flush()
        life.broker.close()
    except PowerCut:
        life.broker.store.abandon()
        raise
    files.stop()


def run(folder: Path, seed: int) -> None:
    """Some lives, the last of which has no faults."""
    rng, table, clock = Random(seed), Table(), SetClock()
    files = FaultyFiles(folder / "store", Random(seed))
    first = BrokerUnderTest(folder, broker_config(folder, **SIZES), clock, files=files)
    create(first)
    first.topics.saved.finish()
    first.topics.incarnations.saved.finish()
    first.close()
    files.stop()
    for number in range(LIVES):
        files = next_life(folder / "store", Random(rng.random()), before=files)
        if number < LIVES - 1:
            ending = rng.choice(["cut_after", "kill_after", ""])
            if ending:
                setattr(files, ending, rng.randrange(OPERATIONS_MAX))
        with suppress(PowerCut):
            live(folder, files, table, rng, clock)


@pytest.mark.parametrize("seed", range(12))
def test_no_newest_value_is_ever_lost(tmp_path: Path, seed: int) -> None:
    run(tmp_path, seed)


if __name__ == "__main__":
    start, count = map(int, sys.argv[1:])
    for seed in range(start, start + count):
        with tempfile.TemporaryDirectory() as folder:
            try:
                run(Path(folder), seed)
            except BaseException:
                sys.stderr.write(f"seed {seed}\n")
                raise
