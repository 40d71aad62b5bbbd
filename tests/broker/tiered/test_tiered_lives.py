"""Topics that are deleted and made again, in a broker with a tier; it may be killed in between."""

from __future__ import annotations

import json
import time
from pathlib import Path
from random import Random

import pytest

from headrace_protocol.admin_headers import DeleteTopicHeader
from headrace_protocol.codes import RequestCode, ResponseCode
from tests.support.broker import BrokerUnderTest
from tests.support.faulty_files import FaultyFiles, PowerCut, next_life
from tests.support.stores import crash
from tests.support.tiered_broker import (
    TOPIC,
    expire_log,
    follow,
    put,
    read_all,
    source,
    start,
    tier_of,
    upload,
)

LEVELS = ("NOT_IN_DISK", "FORCE")


def upload_unsaved(broker: BrokerUnderTest) -> None:
    """Upload everything, but don't save the positions."""
    follow(broker)
    tier_of(broker).upload.sync()


def delete(broker: BrokerUnderTest) -> None:
    header = DeleteTopicHeader(topic=TOPIC)
    assert broker.ask(RequestCode.DELETE_TOPIC_IN_BROKER, header).code == ResponseCode.SUCCESS
    save_tables(broker)


def make_again(broker: BrokerUnderTest) -> None:
    broker.create_topic(TOPIC)
    save_tables(broker)


def save_tables(broker: BrokerUnderTest) -> None:
    broker.topics.incarnations.saved.finish()
    broker.topics.saved.finish()


def files(folder: Path) -> list[Path]:
    return list((folder / "tier").rglob("COMMIT_LOG/*"))


@pytest.mark.parametrize("level", LEVELS)
async def test_a_topic_deleted_before_its_first_position_was_saved(
    tmp_path: Path, level: str
) -> None:
    broker = start(tmp_path, tiered_storage_level=level)
    put(broker, 0, 20)
    upload_unsaved(broker)
    delete(broker)
    make_again(broker)
    put(broker, 100, 25)
    broker.store.flusher.flush_now()
    crash(broker.store)
    broker = start(tmp_path, broker.clock, tiered_storage_level=level)
    upload(broker)
    assert tier_of(broker).runtime_info()["tierStuckQueues"] == "0"
    assert await expire_log(broker) > 10
    assert read_all(broker) == [*range(100, 125)]


async def test_new_messages_are_not_taken_for_expired_ones(tmp_path: Path) -> None:
    """The deleted queue had offsets behind all those of the new one."""
    broker = start(tmp_path)
    put(broker, 0, 20)
    upload_unsaved(broker)
    tier_of(broker).access.tier.expire(TOPIC, 0, 1 << 60, 0)  # type: ignore[attr-defined]
    assert tier_of(broker).access.queue(TOPIC, 0).min_offset > 10  # type: ignore[union-attr]
    delete(broker)
    make_again(broker)
    put(broker, 100, 8)
    broker.store.flusher.flush_now()
    crash(broker.store)
    broker = start(tmp_path, broker.clock)
    upload(broker)
    assert await expire_log(broker) > 0
    assert read_all(broker) == [*range(100, 108)]


async def test_a_topic_made_again_never_shows_old_messages(tmp_path: Path) -> None:
    broker = start(tmp_path, tiered_storage_level="FORCE")
    put(broker, 0, 20)
    upload(broker)
    assert read_all(broker) == [*range(20)]
    delete(broker)
    make_again(broker)
    put(broker, 100, 3)
    assert source(broker).known_range() == (0, 3)
    assert read_all(broker) == [100, 101, 102]
    upload(broker)
    assert read_all(broker) == [100, 101, 102]


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_deleted_topic_does_not_return_after_a_crash(tmp_path: Path, *, is_saved: bool) -> None:
    broker = start(tmp_path)
    broker.create_topic("Kept")
    put(broker, 0, 20)
    (upload if is_saved else upload_unsaved)(broker)
    delete(broker)
    put(broker, 0, 1, "Kept")
    broker.store.flusher.flush_now()
    crash(broker.store)
    assert files(tmp_path)
    broker = start(tmp_path, broker.clock)  # which makes the topic again
    tier_of(broker).load()
    assert not files(tmp_path)
    assert json.loads((tmp_path / "store/config/tieredTopicIncarnation.json").read_text()) == {}


class KilledFiles(FaultyFiles):
    """Files of a process that is killed before the first name of a file is durable."""

    path = Path()

    def fsync_directory(self, path: Path) -> None:
        if path == self.path.parent and self.path.exists():
            self.kill()
        super().fsync_directory(path)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["config/tieredTopicIncarnation.json", "followers/tier.json"])
def test_a_power_cut_takes_nothing_back_that_a_start_has_read(
    tmp_path: Path, name: str, seed: int
) -> None:
    """A kill has left the new file before its name was durable."""
    path = tmp_path / "store" / name
    files = KilledFiles(tmp_path / "store", Random(seed))
    broker = start(tmp_path, files=files, tiered_backend_service_provider="memory")
    put(broker, 0, 20)
    files.path = path
    with pytest.raises(PowerCut):
        upload(broker)
    crash(broker.store)
    after = next_life(files.root, files.rng, before=files)
    broker = start(tmp_path, broker.clock, after, tiered_backend_service_provider="memory")
    found = path.read_bytes()
    after.cut_power()
    crash(broker.store)
    next_life(after.root, after.rng, before=after)
    assert path.exists(), f"seed {seed}"
    assert path.read_bytes() == found


async def test_a_lost_table_of_topics_costs_no_history(tmp_path: Path) -> None:
    broker = start(tmp_path)
    put(broker, 0, 20)
    upload(broker)
    broker.close()
    for path in (tmp_path / "store/config").glob("topics.json*"):
        path.unlink()
    broker = start(tmp_path, broker.clock)  # which makes the topic again
    put(broker, 20, 1)
    upload(broker)
    assert await expire_log(broker) > 10
    assert read_all(broker) == [*range(21)]


async def test_without_a_known_life_messages_tell(tmp_path: Path) -> None:
    """As with files that Apache's broker wrote."""
    broker = start(tmp_path, tiered_storage_level="FORCE")
    put(broker, 0, 20)
    upload(broker)
    broker.close()
    path = tmp_path / "store/config/tieredTopicIncarnation.json"
    path.unlink()
    broker = start(tmp_path, broker.clock, tiered_storage_level="FORCE")
    tier_of(broker).load()
    assert read_all(broker) == [*range(20)]
    put(broker, 20, 1)
    upload(broker)
    assert TOPIC in json.loads(path.read_text())
    assert await expire_log(broker) > 10
    assert read_all(broker) == [*range(21)]


@pytest.mark.parametrize("expired", [False, True])
async def test_without_a_known_life_other_messages_are_not_continued(
    tmp_path: Path, *, expired: bool
) -> None:
    broker = start(tmp_path, tiered_storage_level="FORCE")
    put(broker, 0, 20)
    upload(broker)
    if expired:
        tier_of(broker).access.tier.expire(TOPIC, 0, 1 << 60, 0)  # type: ignore[attr-defined]
    broker.close()
    (tmp_path / "store").rename(tmp_path / "lost")
    broker = start(tmp_path, tiered_storage_level="FORCE")
    broker.clock.ms += 123_456
    put(broker, 100, 8)
    tier_of(broker).load()
    assert read_all(broker) == [*range(100, 108)]
    upload(broker)
    assert tier_of(broker).runtime_info()["tierForeignQueues"] == "1"
    assert read_all(broker) == [*range(100, 108)]
    assert await expire_log(broker) == 0
    assert files(tmp_path)


def test_a_save_does_not_look_through_all_queues(broker: BrokerUnderTest) -> None:
    put(broker, 0, 3)
    upload(broker)
    tier = tier_of(broker)
    tier.state.upload.standings.trusted.update(("other", number) for number in range(300_000))
    began_s = time.thread_time()
    for _ in range(30):
        tier.state.upload.sync()
    assert time.thread_time() - began_s < 0.3  # 30 looks take seconds
