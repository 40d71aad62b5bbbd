"""Static topics whose messages have left the log of their broker for its tier."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace_protocol.codes import RequestCode, ResponseCode
from tests.broker.statictopic.test_static_cleanup import chain, clean, expire
from tests.support.rescued_tiers import lose_disk
from tests.support.static_brokers import TOPIC, Brokers, item
from tests.support.wire import pull_header

FIRST, LEADER = item("a", 0, 0), item("b", 1, 4)
BODIES = [b"%d " % number + bytes(900) for number in range(8)]


def start(folder: Path, **settings: Any) -> Brokers:
    return Brokers(
        folder,
        message_store_plug_in="tieredstore",
        tiered_store_file_path=folder / "tier",
        delete_when="",
        **{"tiered_backend_service_provider": "posix", **settings},
    )


def filled(folder: Path, **settings: Any) -> Brokers:
    """A queue with four messages at a, and after its move four at b."""
    brokers = start(folder, **settings)
    for chain_now, bodies in (((FIRST,), BODIES[:4]), ((FIRST, LEADER), BODIES[4:])):
        brokers.map(chain_now, only="ab"[: len(chain_now)])
        for body in bodies:
            brokers.send("ab"[len(chain_now) - 1], body)
    return brokers


@pytest.fixture
def brokers(tmp_path: Path) -> Brokers:
    return filled(tmp_path)


async def leave_the_log(brokers: Brokers, name: str) -> None:
    """Have a broker's messages only in its tier."""
    store = brokers[name].store
    store.index_tick()
    store.flusher.flush_now()
    for following in store.followers.all:
        following.catch_up()
    await expire(brokers[name])


@pytest.mark.parametrize("names", ["a", "b", "ab"])
async def test_they_are_read_wherever_they_are(brokers: Brokers, names: str) -> None:
    for name in names:
        await leave_the_log(brokers, name)
    assert [body for _, body in brokers.read_all("b")] == BODIES


async def test_an_item_in_the_tier_is_kept(brokers: Brokers) -> None:
    for name in "ab":
        await leave_the_log(brokers, name)
    await clean(brokers, "ab")
    assert [chain(brokers, name) for name in "ab"] == [[0, 1], [0, 1]]


async def test_an_item_is_kept_while_the_tier_is_away(brokers: Brokers, tmp_path: Path) -> None:
    await leave_the_log(brokers, "a")
    brokers.close()
    (tmp_path / "tier").rename(tmp_path / "unmounted")
    again = start(tmp_path)
    await clean(again, "ab")
    assert [chain(again, name) for name in "ab"] == [[0, 1], [0, 1]]


# -- brokers that lost their disks -----------------------------------------------------------------


def upload(brokers: Brokers, name: str) -> None:
    store = brokers[name].store
    store.index_tick()
    store.flusher.flush_now()
    for following in store.followers.all:
        following.catch_up()


@pytest.mark.parametrize("layout", ["posix", "file"])
@pytest.mark.parametrize("names", ["a", "b", "ab"])
def test_a_restored_broker_has_its_mappings(tmp_path: Path, layout: str, names: str) -> None:
    brokers = filled(tmp_path, tiered_backend_service_provider=layout)
    for name in names:
        upload(brokers, name)
        assert not lose_disk(brokers[name]).problems
        brokers.start(name)
        assert brokers[name].mappings.is_static(TOPIC)
    assert [chain(brokers, name) for name in "ab"] == [[0, 1], [0, 1]]
    assert brokers.read_all("b") == [*enumerate(BODIES)]
    assert brokers.send("b", b"more") == (0, 8)
    assert [body for _, body in brokers.read_all("b")] == [*BODIES, b"more"]


@pytest.mark.parametrize("layout", ["posix", "file"])
def test_physical_queues_are_not_used_again(tmp_path: Path, layout: str) -> None:
    """Those of which nothing was uploaded neither: only the mapping knows them."""
    brokers = filled(tmp_path, tiered_backend_service_provider=layout)
    upload(brokers, "a")
    back = item("a", 2, 8, queue_id=5)
    brokers.map((FIRST, LEADER, back))
    saver = brokers["a"].tier
    assert saver is not None
    saver.tables.save(brokers["a"].clock.now_ms())
    lose_disk(brokers["a"])
    brokers.start("a")
    assert brokers["a"].topics.expect(TOPIC).write_queue_nums == 6
    assert brokers.send("a", b"more") == (0, 8)
    assert [body for _, body in brokers.read_all("a")] == [*BODIES, b"more"]


@pytest.mark.parametrize("damage", ["", "{", '{"topicQueueMappingInfoMap": {}}'])
def test_a_mapping_that_is_lost_in_the_tier_is_not_forgotten(tmp_path: Path, damage: str) -> None:
    brokers = filled(tmp_path)
    upload(brokers, "a")
    (path,) = (tmp_path / "tier").rglob("broker-a/tables.json")
    tables = json.loads(path.read_text())
    tables["files"]["topicQueueMapping.json"] = damage
    path.write_text(json.dumps(tables))
    lose_disk(brokers["a"])
    brokers.start("a")
    answer = brokers["a"].ask(RequestCode.PULL_MESSAGE, pull_header(0))
    assert answer.code == ResponseCode.NO_PERMISSION
    assert "is static" in answer.remark
