"""Faults of the location: a proxy that fails, a full or read-only folder, files that are gone."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from random import Random
from typing import Any

import pytest

from headrace_broker.tiered.driver.metered import Metered, Operations
from headrace_broker.tiered.driver.posix import PosixDriver
from headrace_protocol.tier import objects
from headrace_protocol.tier.driver import Failure, FailureKind
from headrace_protocol.tier.location import Location
from headrace_protocol.tier.time_limits import TimeLimits
from tests.broker.tiered.test_tiered_bucket import start as start_objects
from tests.support.faulty_proxy import Fault, faulty_proxy
from tests.support.object_server import below
from tests.support.object_tiers import append_next, open_objects_tier
from tests.support.stores import FaultyFiles
from tests.support.tiered_broker import expire_log, put, read_all, tier_of, upload
from tests.support.tiered_broker import start as start_files
from tests.support.tiers import BEGIN_MS, TOPIC
from tests.support.tiers import read_all as read_queue

LAYOUTS = pytest.mark.parametrize("start", [start_files, start_objects], ids=["files", "objects"])


# -- a proxy in front of a real server -------------------------------------------------------------


class Weather:
    """Faults by a seed, as often as ``rate`` says."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.rate = 0.2

    def __call__(self, method: str) -> Fault:
        if self.rng.random() >= self.rate:
            return Fault.NONE
        fault = self.rng.choice([*Fault])
        # No server answers a read so.
        return Fault.BUSY if fault is Fault.CONFLICT and method != "PUT" else fault


@pytest.mark.slow
@pytest.mark.parametrize("retries", [0, 2])
@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_or_twice_behind_a_faulty_proxy(
    bucket: Location, seed: int, retries: int
) -> None:
    weather, counts = Weather(seed), dict.fromkeys([(TOPIC, number) for number in range(3)], 5)
    location = below(bucket, f"{seed}-{retries}")
    with faulty_proxy(bucket.endpoint) as (proxy, endpoint):
        inner = objects.open_objects(location._replace(endpoint=endpoint), retries=retries)
        driver = Metered(inner, Operations(), TimeLimits())
        tier = open_objects_tier(driver)
        proxy.choose = weather
        done = 0
        for number in range(40):
            done += append_next(tier, counts, BEGIN_MS + number) is None
            tier.merge(BEGIN_MS + number)
            for queue in tier.queues.values():
                found = queue.units(max(queue.commit_offset - 3, 0), 3)
                if not isinstance(found, Failure):
                    assert len(found.units) == min(queue.commit_offset, 3), f"seed {seed}"
        weather.rate = 0.0
        assert append_next(tier, counts) is None
        assert sum(count for fault, count in proxy.counts.items() if fault is not Fault.NONE) > 20
    again = open_objects_tier(objects.open_objects(location))
    for name in counts:
        assert again.queues[name].commit_offset == 5 * (done + 1), f"seed {seed}"
        assert read_queue(again.queues[name]) == [*range(5 * (done + 1))], f"seed {seed}"


# -- a folder --------------------------------------------------------------------------------------


class Refusing(FaultyFiles):
    """Files of a store, and those of its tier, of which writes are refused with an error, if any.

    On a full disk a part of the data is written.
    """

    error = 0

    def apart(self) -> Refusing:
        self.of_tier = Refusing()
        return self.of_tier

    def write(self, descriptor: int, data: Any, position: int) -> None:
        if self.error == errno.ENOSPC:
            super().write(descriptor, bytes(data)[: len(data) // 2], position)
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        super().write(descriptor, data, position)


@LAYOUTS
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EIO])
async def test_a_location_that_refuses_writes_is_still_read(
    tmp_path: Path, start: Any, error: int
) -> None:
    files = Refusing()
    broker = start(tmp_path, files=files)
    put(broker, 0, 20)
    upload(broker)
    await expire_log(broker)
    put(broker, 20, 20)
    files.of_tier.error = error
    for _ in range(3):
        with pytest.raises(OSError, match=os.strerror(error)):
            upload(broker)
    # What was uploaded is read, and the log keeps the rest.
    assert await expire_log(broker) <= 20
    assert read_all(broker) == [*range(40)]
    assert not list((tmp_path / "tier").rglob(".tmp"))
    assert tier_of(broker).runtime_info()["tierStuckQueues"] == "0"
    files.of_tier.error = 0
    upload(broker)
    queue = tier_of(broker).access.queue("Orders", 0)
    assert queue is not None
    assert queue.commit_offset == 40
    assert read_all(broker) == [*range(40)]


def test_a_put_that_fails_leaves_nothing(tmp_path: Path) -> None:
    files = Refusing()
    files.error = errno.ENOSPC
    driver = PosixDriver(tmp_path, files)
    failure = driver.put("a/b", b"12345")
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.UNREACHABLE
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_put_replaces_one_that_was_killed(tmp_path: Path) -> None:
    driver = PosixDriver(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".tmp").write_bytes(b"of a killed process")
    assert not driver.entries("a")
    assert isinstance(driver.put("a/b", b"12345"), str)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]
