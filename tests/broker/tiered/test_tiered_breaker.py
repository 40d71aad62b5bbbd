"""Pauses in reading, and a broker whose tier hangs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace_broker.cold.breaker import Breaker
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import NotReady, RequestError
from headrace_protocol.tier.driver import Failure, FailureKind
from tests.support.broker import BrokerUnderTest
from tests.support.hanging import Hanging, Patience, When
from tests.support.stores import FaultyFiles
from tests.support.tiered_broker import (
    expire_log,
    put,
    read_all,
    source,
    start,
    tier_of,
    upload,
    wrap_driver,
)

AWAY = Failure(FailureKind.UNREACHABLE, "a/b", "away")


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker("the tier", clock)


def wait_s(breaker: Breaker) -> int:
    """The wait that a read is told; 0 if it may try."""
    try:
        breaker.check()
    except RequestError as error:
        return int(error.remark.rsplit(" ", 2)[1])
    return 0


def test_after_three_failures_reads_fail_at_once(breaker: Breaker, clock: Clock) -> None:
    for _ in range(2):
        breaker.failed(AWAY)
        assert wait_s(breaker) == 0
    assert "next try in 1 s" in breaker.failed(AWAY).remark
    assert breaker.is_paused
    assert wait_s(breaker) == 1
    clock.now_s += 1
    assert not breaker.is_paused


def test_reads_that_fail_together_are_one_failure(breaker: Breaker) -> None:
    for _ in range(50):
        breaker.failed(AWAY)
    assert wait_s(breaker) == 1


def test_one_read_tries_whether_the_store_is_back(breaker: Breaker, clock: Clock) -> None:
    for _ in range(3):
        breaker.failed(AWAY)
    pauses = []
    for _ in range(8):
        clock.now_s += 60
        assert wait_s(breaker) == 0
        assert wait_s(breaker) == 10  # while it tries
        breaker.failed(AWAY)
        pauses.append(wait_s(breaker))
    assert all(
        0.74 * most <= pause <= most for pause, most in zip(pauses, (2, 4, 8, 16, 32), strict=False)
    )
    assert 45 <= pauses[-1] <= 60
    clock.now_s += 60
    assert wait_s(breaker) == 0
    # One that never ends is followed by another.
    clock.now_s += 10
    assert wait_s(breaker) == 0
    breaker.succeeded()
    assert (breaker.problem, wait_s(breaker), wait_s(breaker)) == ("", 0, 0)


def test_an_answer_that_is_an_error_is_an_answer(breaker: Breaker) -> None:
    for _ in range(9):
        error = breaker.failed(Failure(FailureKind.DAMAGED, "a/b", "torn"))
        assert error.code == ResponseCode.SYSTEM_ERROR
    assert (breaker.problem, wait_s(breaker)) == ("", 0)


# -- a broker --------------------------------------------------------------------------------------


def fetch(broker: BrokerUnderTest, location: Hanging, patience: Patience) -> RequestError:
    """The error of a pull of the oldest messages, which is held until the location is given up."""
    with pytest.raises(NotReady) as waits:
        source(broker).get(0, 3, 100_000, None)
    with pytest.raises(RequestError) as refused:
        patience.abandon(location, waits.value.fetch)
    return refused.value


async def test_a_location_that_hangs_fails_only_reads_of_the_tier(
    broker: BrokerUnderTest,
) -> None:
    location = wrap_driver(broker, Hanging)
    put(broker, 0, 20)
    upload(broker)
    local_min = await expire_log(broker)
    patience = Patience(tier_of(broker).access.drivers.limits)
    location.hang("append", "entries", "cut", when=When.LATE)
    put(broker, 20, 5)
    with pytest.raises(OSError, match="no answer to write in 1000 s"):
        patience.abandon(location, lambda: upload(broker))
    location.hang("read", "append", "entries", "cut", when=When.LATE)
    for _ in range(3):
        error = fetch(broker, location, patience)
        assert error.code == ResponseCode.SYSTEM_BUSY
        assert "the tier is unreachable since 2" in error.remark
        assert "no answer to read in 1000 s; next try in " in error.remark
    with pytest.raises(RequestError, match="next try in 1 s"):
        source(broker).get(0, 3, 100_000, None)
    assert read_all(broker, offset=local_min) == [*range(local_min, 25)]
    with pytest.raises(OSError, match=r"place.json: no answer to read in 1000 s"):
        patience.abandon(location, lambda: upload(broker))
    assert tier_of(broker).runtime_info()["tierUnansweredOperations"] == "5"
    # It is back: what hung takes effect, and the upload resumes.
    location.release_all()
    patience.settle()
    tier_of(broker).reader.breaker.succeeded()
    upload(broker)
    await expire_log(broker)
    assert read_all(broker) == [*range(25)]


async def test_a_start_does_not_wait_for_a_location_that_hangs(tmp_path: Path) -> None:
    broker = start(tmp_path)
    put(broker, 0, 20)
    upload(broker)
    local_min = await expire_log(broker)
    broker.close()
    broker = start(tmp_path, broker.clock)
    location, tier = wrap_driver(broker, Hanging), tier_of(broker)
    tier.reader.open_s = 0.01
    location.hang("entries")
    tier.load()
    assert read_all(broker, offset=local_min) == [*range(local_min, 20)]
    with pytest.raises(NotReady) as waits:
        source(broker).get(0, 3, 100_000, None)
    with pytest.raises(RequestError, match=r"unreachable since .* still being opened") as refused:
        waits.value.fetch()
    assert refused.value.code == ResponseCode.SYSTEM_BUSY
    location.release_all()
    tier_of(broker).access.open()
    assert read_all(broker) == [*range(20)]


async def test_a_close_does_not_wait_for_a_location_that_hangs(broker: BrokerUnderTest) -> None:
    location = wrap_driver(broker, Hanging)
    put(broker, 0, 20)
    tier_of(broker).access.drivers.limits.end_by(0.0)
    location.hang("append", "entries")
    broker.close()
    location.release_all()


class UnsyncedNames(FaultyFiles):
    """Files of a store, and those of its tier, whose names can't be synced while ``is_failing``."""

    is_failing = False

    def apart(self) -> UnsyncedNames:
        self.of_tier = UnsyncedNames()
        return self.of_tier

    def fsync_directory(self, path: Path) -> None:
        if self.is_failing:
            raise OSError(os.strerror(5))
        super().fsync_directory(path)


async def test_names_in_the_tier_are_synced_apart_from_the_store(tmp_path: Path) -> None:
    """A folder of the tier that can't be synced must not make a flush of the log fail."""
    files = UnsyncedNames()
    broker = start(tmp_path, files=files)
    put(broker, 0, 20)
    files.of_tier.is_failing = True
    with pytest.raises(OSError, match=os.strerror(5)):
        upload(broker)
    broker.store.fs.sync_names()
    put(broker, 20, 20)
    broker.store.flusher.flush_now()
    assert read_all(broker) == [*range(40)]
    files.of_tier.is_failing = False
    upload(broker)
