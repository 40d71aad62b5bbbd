"""Topics as the tier knows them, restored by a broker that lost its disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace_broker.tiered.access.saved_tables import SavedTables, read_tables
from headrace_broker.tiered.driver.posix import PosixDriver
from tests.broker.tiered.test_tiered_lives import delete, files, make_again, upload_unsaved
from tests.support.broker import BrokerUnderTest
from tests.support.object_tiers import FaultyDriver
from tests.support.rescued_tiers import lose_disk
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


@pytest.fixture(params=["posix", "file"])
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"tiered_backend_service_provider": request.param, "tiered_storage_level": "FORCE"}


def save_in_tier(broker: BrokerUnderTest) -> None:
    tier_of(broker).tables.save(broker.clock.now_ms())


def saved(folder: Path, broker: BrokerUnderTest) -> SavedTables:
    found = read_tables(PosixDriver(folder / "tier"), tier_of(broker).settings.home)
    assert isinstance(found, SavedTables)
    return found


async def test_what_is_uploaded_is_known_by_its_topic(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    """However long the tables are not saved for themselves."""
    broker = start(tmp_path, **settings)
    put(broker, 0, 20)
    upload(broker)
    broker.create_topic("New", attributes={"reserve.time": "7"})
    put(broker, 0, 3, "New")
    upload(broker)
    restored = lose_disk(broker)
    assert not restored.problems
    broker = start(tmp_path, broker.clock, **settings)
    assert broker.topics.expect("New").attributes == {"reserve.time": "7"}
    assert read_all(broker) == [*range(20)]
    assert read_all(broker, "New") == [*range(3)]
    put(broker, 20, 5)
    upload(broker)
    assert not tier_of(broker).upload.standings.given_up
    await expire_log(broker)
    assert read_all(broker) == [*range(25)]


def test_tables_are_saved_once_for_all_topics(tmp_path: Path, settings: dict[str, Any]) -> None:
    broker = start(tmp_path, **settings)
    names = [f"T{number}" for number in range(10)]
    for name in names:
        broker.create_topic(name)
        put(broker, 0, 2, name)
    store = wrap_driver(broker, FaultyDriver)
    upload(broker)
    for name in names:
        put(broker, 2, 2, name)
    upload(broker)
    tables = [path for path in store.paths["put"] if path.endswith("tables.json")]
    assert len(tables) == 1


def test_nothing_is_uploaded_of_a_topic_that_is_not_on_disk_yet(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Restored tables without it would say that it was deleted."""
    broker = start(tmp_path, **settings)
    ids = tmp_path / "store/config/topicIncarnation.json"
    before = ids.read_bytes()
    broker.create_topic("New")
    ids.write_bytes(before)
    put(broker, 0, 3, "New")
    with pytest.raises(OSError, match="topic New is new, and its id is not on disk yet"):
        upload(broker)
    broker.topics.incarnations.saved.changed()
    upload(broker)
    assert "New" in saved(tmp_path, broker).files["topicIncarnation.json"]


async def test_an_earlier_life_is_not_restored(tmp_path: Path, settings: dict[str, Any]) -> None:
    broker = start(tmp_path, **settings)
    put(broker, 0, 20)
    upload(broker)
    delete(broker)
    make_again(broker)
    put(broker, 100, 3)
    save_in_tier(broker)
    lose_disk(broker)
    assert files(tmp_path) or [*(tmp_path / "tier").rglob("data/*")]
    broker = start(tmp_path, broker.clock, **settings)
    assert source(broker).known_range() == (0, 0)
    tier_of(broker).load()
    assert not tier_of(broker).access.tier.queues
    put(broker, 200, 5)
    upload(broker)
    await expire_log(broker)
    assert read_all(broker) == [*range(200, 205)]


def test_a_deleted_topic_is_not_restored(tmp_path: Path, settings: dict[str, Any]) -> None:
    broker = start(tmp_path, **settings)
    broker.create_topic("Kept")
    put(broker, 0, 2, "Kept")
    put(broker, 0, 20)
    upload_unsaved(broker)
    delete(broker)
    save_in_tier(broker)
    lose_disk(broker)
    broker = BrokerUnderTest(tmp_path, broker.config, broker.clock)
    assert broker.topics.get(TOPIC) is None
    tier_of(broker).load()
    assert [*tier_of(broker).access.tier.queues] == [("Kept", 0)]
    assert read_all(broker, "Kept") == [0, 1]


@pytest.mark.parametrize("is_away", [False, True])
def test_files_that_a_deletion_left_are_not_restored(tmp_path: Path, *, is_away: bool) -> None:
    broker = start(tmp_path)
    driver = wrap_driver(broker, FaultyDriver)
    put(broker, 0, 20)
    upload(broker)
    delete(broker)
    driver.fail("delete")
    with pytest.raises(OSError, match="is away"):
        upload(broker)
    driver.fail()
    if not is_away:
        upload(broker)
    save_in_tier(broker)
    assert bool(files(tmp_path)) is is_away
    lose_disk(broker)
    broker = BrokerUnderTest(tmp_path, broker.config, broker.clock)
    assert broker.topics.get(TOPIC) is None
    tier_of(broker).load()
    assert not files(tmp_path)
