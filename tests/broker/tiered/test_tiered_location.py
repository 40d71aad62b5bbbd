"""A tier whose location is away: unmounted, emptied, or another one. Nothing is written there."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest
import structlog
import trio

from headrace_broker.store.followers.following import Following
from headrace_broker.store.retention.topic_floors import TopicLimit
from headrace_broker.tiered.access.tiered_storage import TieredStorage
from headrace_broker.tiered.container.location_mark import Folder, read_mark
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.tier.driver import Driver, Failure, FailureKind
from headrace_protocol.tier.paths import Home
from tests.broker.tiered.test_tiered_status import ask
from tests.support.broker import BrokerUnderTest
from tests.support.object_server import ACCESS_KEY, BUCKET, SECRET_KEY, serving
from tests.support.object_tiers import FaultyDriver
from tests.support.stores import ready
from tests.support.tiered_broker import (
    TOPIC,
    expire_log,
    put,
    read_all,
    source,
    start,
    tier_of,
    upload,
    wrap_driver,
)
from tests.support.until import until

PROVIDERS = pytest.mark.parametrize("provider", ["posix", "file"])


def nothing(_root: Path) -> None:
    """The folder is below an unmounted one."""


def empty(root: Path) -> None:
    """The folder is where a file system is mounted."""
    root.mkdir()


def of_another(root: Path) -> None:
    """The folder has a tier of the same name."""
    for location in (root.parent / "mounted").rglob("place.json"):
        path = root / location.relative_to(root.parent / "mounted")
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({**json.loads(location.read_text()), "id": "0123456789abcdef"}))


AWAY = "lacks the mark of this broker's tier|is not there: mount its file system"
WAYS = pytest.mark.parametrize("leave", [nothing, empty, of_another])


def contents(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def take_away(folder: Path, leave: Callable[[Path], None]) -> None:
    (folder / "tier").rename(folder / "mounted")
    leave(folder / "tier")


def bring_back(folder: Path) -> None:
    shutil.rmtree(folder / "tier", ignore_errors=True)
    (folder / "mounted").rename(folder / "tier")


def begin(folder: Path, provider: str, clock: Any = None) -> BrokerUnderTest:
    return start(folder, clock, tiered_backend_service_provider=provider)


def try_everything(broker: BrokerUnderTest) -> None:
    tier = tier_of(broker)
    for operate in (
        partial(upload, broker),
        partial(tier.clean_up, dict.fromkeys((TOPIC, "Another"), TopicLimit(1 << 50, None))),
        partial(tier.access.look, 5),
        partial(tier.tables.save, broker.clock.ms),
    ):
        with pytest.raises(OSError, match=AWAY):
            operate()


@PROVIDERS
@WAYS
async def test_nothing_is_written_to_a_location_without_the_mark(
    tmp_path: Path, provider: str, leave: Callable[[Path], None]
) -> None:
    broker = begin(tmp_path, provider)
    put(broker, 0, 20)
    upload(broker)
    tier_of(broker).tables.save(0)
    local_min = await expire_log(broker)
    take_away(tmp_path, leave)
    before = contents(tmp_path / "tier")
    put(broker, 20, 20)
    broker.create_topic("Another")
    put(broker, 0, 3, "Another")
    for _ in range(2):
        try_everything(broker)
    assert await expire_log(broker) <= 20  # the log keeps what is not uploaded
    assert read_all(broker, offset=20) == [*range(20, 40)]
    with pytest.raises(RequestError, match=AWAY) as told:
        ready(lambda: source(broker).get(0, 3, 100_000, None))
    assert told.value.code == ResponseCode.SYSTEM_BUSY
    status = ask(broker)
    assert str(tmp_path / "tier") in status.place_problem
    assert (status.given_up_count, status.place_problem_seconds > 0) == (0, True)
    assert tier_of(broker).runtime_info()["tierPlaceProblem"] == status.place_problem
    broker.close()
    broker = begin(tmp_path, provider, broker.clock)
    tier_of(broker).load()
    assert not tier_of(broker).access.is_open
    try_everything(broker)
    assert contents(tmp_path / "tier") == before
    assert (tmp_path / "tier").exists() == (leave is not nothing)
    bring_back(tmp_path)
    tier_of(broker).access.look(5)
    tier_of(broker).reader.breaker.succeeded()
    upload(broker)
    assert ask(broker).place_problem == ""
    await expire_log(broker)
    assert read_all(broker) == [*range(40)]
    assert read_all(broker, "Another") == [*range(3)]
    assert local_min


class Unmounting(Folder):
    """A folder whose file system is another one at each look."""

    def __init__(self, before: Folder) -> None:
        self.root = before.root
        self.numbers = count()

    def device(self) -> int:
        return next(self.numbers)


@PROVIDERS
async def test_a_location_that_is_unmounted_during_an_upload_keeps_no_message(
    tmp_path: Path, provider: str
) -> None:
    broker = begin(tmp_path, provider)
    put(broker, 0, 5)
    upload(broker)
    mark = tier_of(broker).access.drivers.mark
    assert mark is not None
    assert mark.folder is not None
    before, mark.folder = mark.folder, Unmounting(mark.folder)
    put(broker, 5, 5)
    with pytest.raises(OSError, match="its file system was changed"):
        upload(broker)
    queue = tier_of(broker).access.queue(TOPIC, 0)
    assert queue is not None
    assert queue.commit_offset == 5
    mark.folder = before
    upload(broker)
    assert queue.commit_offset == 10
    await expire_log(broker)
    assert read_all(broker) == [*range(10)]


@PROVIDERS
async def test_a_store_that_lost_its_copy_takes_the_mark_over(
    tmp_path: Path, provider: str
) -> None:
    broker = begin(tmp_path, provider)
    put(broker, 0, 5)
    upload(broker)
    broker.close()
    marks = list((tmp_path / "tier").rglob("place.json"))
    before = [path.read_bytes() for path in marks]
    for path in (tmp_path / "store/config").glob("tieredPlace.json*"):
        path.unlink()
    broker = begin(tmp_path, provider, broker.clock)
    put(broker, 5, 5)
    upload(broker)
    assert [path.read_bytes() for path in marks] == before
    assert (tmp_path / "store/config/tieredPlace.json").exists()


@contextmanager
def another_bucket(folder: Path) -> Iterator[Path]:
    """An empty bucket behind the same name, for the length of a block."""
    parts = [folder / "objects" / BUCKET, folder / "attributes" / BUCKET]
    moved = [(part, folder / f"{part.parent.name}-away") for part in parts if part.exists()]
    for part, away in moved:
        part.rename(away)
        part.mkdir()
    yield parts[0]
    for part, away in moved:
        shutil.rmtree(part)
        away.rename(part)


@pytest.mark.slow
@pytest.mark.parametrize("is_used", [False, True], ids=["empty", "with another tier"])
async def test_nothing_is_written_to_another_bucket_behind_the_name(
    tmp_path: Path, *, is_used: bool
) -> None:
    with serving(tmp_path / "s3") as location:
        settings: dict[str, Any] = {
            "tiered_backend_service_provider": "s3",
            "object_store_endpoint": location.endpoint,
            "object_store_bucket": BUCKET,
            "object_store_access_key": ACCESS_KEY,
            "object_store_secret_key": SECRET_KEY,
        }
        broker = start(tmp_path, **settings)
        put(broker, 0, 20)
        upload(broker)
        assert await expire_log(broker)
        with another_bucket(tmp_path / "s3") as bucket:
            if is_used:
                other = start(tmp_path / "other", broker.clock, **settings)
                put(other, 100, 3)
                upload(other)
                other.close()
            before = contents(bucket)
            put(broker, 20, 20)
            broker.create_topic("Another")  # for the tables
            try_everything(broker)
            with pytest.raises(RequestError, match="the bucket lacks the mark"):
                ready(lambda: source(broker).get(0, 3, 100_000, None))
            broker.close()
            broker = start(tmp_path, broker.clock, **settings)
            tier_of(broker).load()
            with pytest.raises(OSError, match=AWAY):
                upload(broker)
            assert contents(bucket) == before
        tier_of(broker).access.look(5)
        tier_of(broker).reader.breaker.succeeded()
        upload(broker)
        assert ask(broker).place_problem == ""
        await expire_log(broker)
        assert read_all(broker) == [*range(40)]
        broker.close()


async def test_the_first_start_with_a_mark_makes_none_in_an_empty_folder(tmp_path: Path) -> None:
    """A store whose metadata, as Apache's broker wrote it, says that the tier has messages."""
    broker = begin(tmp_path, "posix")
    put(broker, 0, 5)
    upload(broker)
    broker.close()
    for path in (tmp_path / "store/config").glob("tieredPlace.json*"):
        path.unlink()
    take_away(tmp_path, empty)
    broker = begin(tmp_path, "posix", broker.clock)
    with pytest.raises(OSError, match="the store has messages in this tier, and it has none"):
        tier_of(broker).access.open()
    assert not contents(tmp_path / "tier")
    bring_back(tmp_path)
    (mark,) = (tmp_path / "tier").rglob("place.json")
    mark.unlink()
    tier_of(broker).access.open()
    assert mark.exists()


class Retried:
    """The runner of the upload, with a count of requests to retry at once."""

    def __init__(self, following: Following) -> None:
        self.following = following
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.following, name)

    def retry(self) -> None:
        self.count += 1


@asynccontextmanager
async def running(tier: TieredStorage) -> AsyncIterator[None]:
    """The tier's tasks."""
    async with trio.open_nursery() as nursery:
        for service in tier.services():
            assert service.run is not None
            nursery.start_soon(service.run)
        yield
        nursery.cancel_scope.cancel()


async def test_the_mark_is_looked_for_each_minute(tmp_path: Path, autojump_clock: object) -> None:
    broker = begin(tmp_path, "posix")
    put(broker, 0, 5)
    upload(broker)
    tier = tier_of(broker)
    retried = Retried(tier.state.following)
    tier.follow(cast("Following", retried))
    with structlog.testing.capture_logs() as lines:
        async with running(tier):
            take_away(tmp_path, empty)
            await until(lambda: "the location of the tier is unavailable" in str(lines))
            assert "lacks the mark" in ask(broker).place_problem
            bring_back(tmp_path)
            await until(lambda: ask(broker).place_problem == "" and retried.count > 0)


async def test_tables_merges_and_clean_up_report_one_outage(
    tmp_path: Path, autojump_clock: object
) -> None:
    first = begin(tmp_path, "file")
    put(first, 0, 5)
    upload(first)
    first.close()
    take_away(tmp_path, empty)
    broker = begin(tmp_path, "file")
    driver = wrap_driver(broker, FaultyDriver)

    def upkeep() -> list[str]:
        events = [re.sub(": .*| after .*", "", line["event"]) for line in lines]
        return [event for event in events if "the upkeep" in event]

    with structlog.testing.capture_logs() as lines:
        async with running(tier_of(broker)):
            await until(lambda: driver.calls["read"] > 12)
            bring_back(tmp_path)
            await until(lambda: len(upkeep()) > 1)
    assert upkeep() == [
        "the upkeep of the tier is unavailable, retrying",
        "the upkeep of the tier is available again",
    ]


@pytest.mark.parametrize("command", ["verify", "rebuild", "sweep"])
@PROVIDERS
async def test_commands_do_not_take_an_empty_folder_for_the_tier(
    tmp_path: Path, provider: str, command: str
) -> None:
    broker = begin(tmp_path, provider)
    put(broker, 0, 5)
    upload(broker)
    broker.close()
    config = tmp_path / "broker.conf"
    config.write_text(
        f"brokerName=broker-a\nstorePathRootDir={tmp_path}/store\n"
        f"messageStorePlugIn=tieredstore\ntieredBackendServiceProvider={provider}\n"
        f"tieredStoreFilePath={tmp_path}/tier\n"
    )
    take_away(tmp_path, empty)
    # A check of settings runs a loop of its own.
    checks = [("tier", command, "-c", str(config))]
    checks.append(("broker", "-c", str(config), "--check-config"))
    for arguments in checks:
        done = await trio.run_process(
            [sys.executable, "-m", "headrace", *arguments], capture_stderr=True, check=False
        )
        assert done.returncode in {1, 2}
        assert b"lacks the mark" in done.stderr
    assert not contents(tmp_path / "tier")


def test_a_mark_of_any_size_is_not_read() -> None:
    class Huge:
        def size(self, _path: str) -> int:
            return 1 << 40

        def read(self, path: str, _ranges: object) -> None:
            pytest.fail(f"{path} was read")

    found = read_mark(cast("Driver", Huge()), Home("cluster", "broker"))
    assert isinstance(found, Failure)
    assert found.kind is FailureKind.DAMAGED
