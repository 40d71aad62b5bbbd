"""A broker whose tier is in a bucket, or in a folder with the same layout; and its settings."""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace import blocking
from headrace_broker.config import ConfigError
from headrace_broker.settings.files import load_config
from headrace_broker.store.retention.topic_floors import TopicLimit
from headrace_protocol.admin_headers import DeleteTopicHeader
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import QueryMessageHeader
from headrace_protocol.message import decode_records
from headrace_protocol.tier.location import Location
from tests.broker.tiered.test_tiered_processes import read_all as consume_all
from tests.broker.tiered.test_tiered_processes import send, wait_until
from tests.support import tiered_broker
from tests.support.broker import BrokerUnderTest
from tests.support.cluster import Cluster
from tests.support.object_server import BUCKET, SECRET_KEY, bucket_settings, serving
from tests.support.stores import crash
from tests.support.tiered_broker import TOPIC, expire_log, put, read_all, tier_of, upload

YEAR_MS = 365 * 24 * 3_600_000


start = partial(tiered_broker.start, tiered_backend_service_provider="file")


def data_objects(folder: Path) -> list[Path]:
    return sorted((folder / "tier").rglob("data/*"))


async def test_a_deleted_topic_leaves_the_bucket(tmp_path: Path) -> None:
    broker = start(tmp_path)
    put(broker, 0, 20)
    upload(broker)
    await expire_log(broker)
    header = DeleteTopicHeader(topic=TOPIC)
    assert broker.ask(RequestCode.DELETE_TOPIC_IN_BROKER, header).code == ResponseCode.SUCCESS
    upload(broker)
    broker.create_topic(TOPIC)
    put(broker, 100, 3)
    upload(broker)
    tier_of(broker).clean_up({})
    broker.clock.ms += 3_600_000
    tier_of(broker).clean_up({TOPIC: TopicLimit(1 << 50, None)})
    assert len(data_objects(tmp_path)) == 1
    assert read_all(broker) == [100, 101, 102]


async def test_a_second_broker_of_the_same_name_takes_over(tmp_path: Path) -> None:
    first = start(tmp_path / "one", tiered_store_file_path=tmp_path / "tier")
    put(first, 0, 5)
    upload(first)
    second = start(tmp_path / "two", tiered_store_file_path=tmp_path / "tier")
    tier_of(second).load()
    put(first, 5, 5)
    with pytest.raises(OSError, match="has taken over the tier in epoch 2"):
        upload(first)
    # The log keeps what is not uploaded, and hot reads don't notice.
    assert await expire_log(first) == 0
    assert read_all(first) == [*range(10)]


def test_a_takeover_makes_no_single_queue_stuck(tmp_path: Path) -> None:
    first = start(tmp_path / "one", tiered_store_file_path=tmp_path / "tier")
    put(first, 0, 5)
    upload(first)
    second = start(tmp_path / "two", tiered_store_file_path=tmp_path / "tier")
    tier_of(second).load()
    first.clock.ms += YEAR_MS
    with pytest.raises(OSError, match="has taken over the tier"):
        tier_of(first).clean_up({})
    first.create_topic("Others")
    put(first, 0, 1, "Others")
    with pytest.raises(OSError, match="has taken over the tier"):
        upload(first)
    assert not tier_of(first).upload.standings.given_up


def test_a_queue_is_uploaded_further_after_all_its_messages_have_expired(tmp_path: Path) -> None:
    broker = start(tmp_path)
    put(broker, 0, 5)
    upload(broker)
    broker.clock.ms += YEAR_MS
    tier_of(broker).clean_up({})
    crash(broker.store)
    # As if the crash had come before the upload's position was saved.
    (tmp_path / "store" / "followers" / "tier.json").unlink()
    broker = start(tmp_path, broker.clock)
    put(broker, 5, 2)
    upload(broker)
    queue = tier_of(broker).access.tier.queues[TOPIC, 0]
    assert (queue.min_offset, queue.commit_offset) == (5, 7)
    assert read_all(broker) == [*range(7)]


def test_an_empty_store_begins_anew_where_all_messages_have_expired(tmp_path: Path) -> None:
    first = start(tmp_path / "one", tiered_store_file_path=tmp_path / "tier")
    put(first, 0, 5)
    upload(first)
    first.clock.ms += YEAR_MS
    tier_of(first).clean_up({})
    first.close()
    second = start(tmp_path / "two", first.clock, tiered_store_file_path=tmp_path / "tier")
    put(second, 0, 3)
    upload(second)
    queue = tier_of(second).access.tier.queues[TOPIC, 0]
    assert (queue.min_offset, queue.commit_offset) == (0, 3)


# -- settings --------------------------------------------------------------------------------------

BUCKET_SETTINGS = {
    "messageStorePlugIn": "tieredstore",
    "tieredBackendServiceProvider": "s3",
    "objectStoreBucket": "a-bucket",
    "objectStoreEndpoint": "http://127.0.0.1:1",
    "objectStoreAccessKey": "an-access-key",
    "objectStoreSecretKey": "a-secret-key",
}


def load_with(folder: Path, **changes: str) -> Any:
    settings = {**BUCKET_SETTINGS, "storePathRootDir": str(folder / "store"), **changes}
    path = folder / "broker.conf"
    path.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    return load_config(path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"objectStoreBucket": ""}, "objectStoreBucket=: expected the name of a bucket"),
        ({"objectStoreEndpoint": "here"}, "objectStoreEndpoint=here: expected http:// or https://"),
        ({"objectStoreSecretKey": ""}, "objectStoreSecretKey=: expected both keys or none"),
        ({"tieredBackendServiceProvider": "gcs"}, "from the environment"),
        ({"tieredBackendServiceProvider": "file"}, "tieredStoreFilePath=: expected a folder"),
        ({"tieredBackendServiceProvider": "ftp"}, "expected posix, s3, gcs, azure, file or memory"),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, changes: dict[str, str], reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_with(tmp_path, **changes)
    assert reason in str(refused.value)
    assert "a-secret-key" not in str(refused.value)
    assert "an-access-key" not in str(refused.value)


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "obstore", None)
        with pytest.raises(ConfigError, match=r"needs obstore.*pip install obstore"):
            load_with(tmp_path)
    assert importlib.util.find_spec("obstore") is not None


def test_secrets_are_shown_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, _ = load_with(tmp_path)
    broker = BrokerUnderTest(tmp_path, config)
    answer = broker.ask(RequestCode.GET_BROKER_CONFIG, DeleteTopicHeader(topic="x"))
    config.update({"fileReservedTime": "5"})
    tier = tier_of(broker)
    tier.load()
    with pytest.raises(OSError, match="vm/place") as refused:
        tier.clean_up({})
    logs = capsys.readouterr()
    bucket = tier.settings.bucket
    assert bucket is not None
    shown = f"{bytes(answer.body)!r} {config!r} {refused.value} {tier.settings!r} {bucket} {logs}"
    assert "a-bucket" in shown
    for secret in ("an-access-key", "a-secret-key"):
        assert secret not in shown
    # A change of other settings leaves them as they are.
    assert config.object_store_secret_key.get_secret_value() == "a-secret-key"
    assert ("secret_access_key", "a-secret-key") in bucket.config


# -- a real server ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_broker_serves_its_history_from_a_bucket(tmp_path: Path) -> None:
    (tmp_path / "s3").mkdir()
    with serving(tmp_path / "s3") as location, _cluster(tmp_path, location) as cluster:
        broker, nameserver = cluster.brokers["a"], cluster.nameserver.address
        with blocking.Admin(nameserver=nameserver) as admin:
            admin.create_topic(TOPIC, queues=2)
        data = tmp_path / "s3" / "objects" / BUCKET
        send(nameserver, 0, 3000)
        wait_until(lambda: any(data.rglob("*/data/*")), broker.said)
        broker.kill()
        broker.start()
        broker.wait_up()
        cluster.wait_registered()
        send(nameserver, 3000, 3000)
        assert consume_all(nameserver, 6000) == [*range(6000)]
        broker.stop()
        assert '"level": "error"' not in broker.said(), broker.said()
        assert SECRET_KEY not in broker.said()


def _cluster(folder: Path, location: Location) -> Cluster:
    return Cluster(
        folder,
        "a",
        tieredStorageLevel="FORCE",
        tieredStoreGroupCommitTimeout=200,
        flushIntervalCommitLog=50,
        **bucket_settings(location, "brokers"),
    )


async def test_a_topics_reserve_size_and_queries_by_key(tmp_path: Path) -> None:
    broker = start(tmp_path)
    topic, limit = "Small", 12_000
    broker.create_topic(topic, attributes={"reserve.size": str(limit)})
    for first in range(0, 20, 2):
        put(broker, first, 2, topic)
        upload(broker)
    cleaner = tier_of(broker)
    queue = cleaner.access.tier.queues[topic, 0]
    whole = queue.log_bytes
    cleaner.clean_up(cleaner.limits())
    assert limit <= queue.log_bytes < limit + whole // 5
    header: dict[str, Any] = {
        "topic": topic,
        "max_num": 9,
        "begin_timestamp": 0,
        "end_timestamp": 1 << 60,
    }
    put(broker, 20, 30, topic)
    upload(broker)
    await expire_log(broker)
    kept, gone = queue.min_offset, queue.min_offset - 1
    found = broker.ask(RequestCode.QUERY_MESSAGE, QueryMessageHeader(key=f"k{kept}", **header))
    assert [message.queue_offset for message in decode_records(found.body)] == [kept]
    missing = broker.ask(RequestCode.QUERY_MESSAGE, QueryMessageHeader(key=f"k{gone}", **header))
    assert missing.code == ResponseCode.QUERY_NOT_FOUND
    operations = cleaner.state.access.drivers.operations
    assert sum(operations.latencies_ms["write", True].counts) >= 11
    assert sum(operations.downloaded.counts) > 0
