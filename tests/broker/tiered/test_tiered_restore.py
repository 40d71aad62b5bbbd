"""``headrace tier restore``: a broker that has lost its disk continues on its tier."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from headrace import blocking
from headrace_broker.store.files.config_file import ConfigFile
from headrace_broker.tiered.container.location_mark import MARK_FILE
from tests.broker.tiered.test_tiered_processes import TOPIC, read_all, send, wait_until
from tests.support.cli import fail, headrace, succeed
from tests.support.cluster import Cluster
from tests.support.object_server import SECRET_KEY, bucket_settings
from tests.support.rescued_tiers import QUEUES, Layout, fill, folder, mark, write_config

both_layouts = pytest.mark.parametrize("layout", ["posix", "file"])
GROUP = "shop"


def cluster_of(tmp_path: Path, provider: str, request: pytest.FixtureRequest) -> Cluster:
    settings: dict[str, Any] = {
        "messageStorePlugIn": "tieredstore",
        "tieredBackendServiceProvider": provider,
        "tieredStoreFilePath": tmp_path / "tier",
        "tieredStoreGroupCommitTimeout": 200,
        "tieredStoreIndexFileMaxHashSlotNum": 1000,
        "tieredStoreIndexFileMaxIndexNum": 5000,
        "flushIntervalCommitLog": 50,
    }
    if provider == "s3":
        settings |= bucket_settings(request.getfixturevalue("bucket"), tmp_path.name)
    return Cluster(tmp_path, "a", **settings)


def is_uploaded(cluster: Cluster, count: int) -> bool:
    with blocking.Admin(nameserver=cluster.nameserver.address) as admin:
        queues = admin.tier_status(TOPIC)["a"].queues
        return sum(queue.tier_end or 0 for queue in queues) == count


def consume(nameserver: str, count: int) -> list[int]:
    """Read some messages as a group and commit them."""
    numbers: list[int] = []
    with blocking.PullConsumer(group=GROUP, nameserver=nameserver) as consumer:
        consumer.assign(consumer.queues(TOPIC))
        while len(numbers) < count:
            found = consumer.receive_many(timeout_ms=1000) or ()
            numbers += [int(message.body.split()[0]) for message in found]
        consumer.commit()
    return numbers


@pytest.mark.slow
@pytest.mark.parametrize("provider", ["posix", "file", "s3"])
def test_a_broker_without_its_disk_continues_on_its_tier(
    tmp_path: Path, provider: str, request: pytest.FixtureRequest
) -> None:
    with cluster_of(tmp_path, provider, request) as cluster:
        broker, nameserver = cluster.brokers["a"], cluster.nameserver.address
        config = str(tmp_path / "a.conf")

        def start() -> None:
            broker.start()
            broker.wait_up()
            cluster.wait_registered()

        with blocking.Admin(nameserver=nameserver) as admin:
            admin.create_topic(TOPIC, queues=2)
        send(nameserver, 0, 500)
        seen = consume(nameserver, 100)
        wait_until(lambda: is_uploaded(cluster, 500), broker.said)
        broker.stop()
        shutil.rmtree(tmp_path / "a")
        restored = succeed("tier", "restore", "-c", config, "--json")
        assert restored.json()["messages"] == 500
        start()
        assert read_all(nameserver, 500) == [*range(500)]
        send(nameserver, 500, 100)
        assert read_all(nameserver, 600) == [*range(600)]
        assert sorted(seen + consume(nameserver, 600 - len(seen))) == [*range(600)]
        wait_until(lambda: is_uploaded(cluster, 600), broker.said)
        broker.kill()
        rebuilt = succeed("tier", "rebuild", "-c", config, "--json")
        assert rebuilt.json()["messages"] == 600
        start()
        assert read_all(nameserver, 600) == [*range(600)]
        broker.stop()
        checked = succeed("tier", "verify", "-c", config, "--deep")
        said = broker.said()
        assert '"level": "error"' not in said, said
        assert SECRET_KEY not in said + restored.stderr + rebuilt.stderr + checked.stderr


@both_layouts
def test_not_into_a_store_with_anything_in_it(tmp_path: Path, layout: Layout) -> None:
    config = fill(tmp_path / "a", layout)
    (tmp_path / "a" / "commitlog").mkdir()
    assert "is not empty, it has commitlog" in fail(1, "tier", "restore", "-c", str(config))


@both_layouts
def test_nothing_to_restore(tmp_path: Path, layout: Layout) -> None:
    (tmp_path / "a").mkdir()
    config = write_config(tmp_path / "a", layout)
    fail(1, "tier", "restore", "-c", str(config))
    assert not (tmp_path / "a" / "config").exists()


@both_layouts
def test_a_restored_store_expects_the_mark_of_its_tier(tmp_path: Path, layout: Layout) -> None:
    root = tmp_path / "a"
    config = fill(root, layout)
    text = mark(root)
    for path in root.iterdir():
        if path != folder(root):
            shutil.rmtree(path)
    headrace("tier", "restore", "-c", str(config))
    assert ConfigFile(root / "config" / MARK_FILE).load() == text
    mark(root, id_="fedcba9876543210")
    assert "it is that of another tier" in fail(1, "tier", "verify", "-c", str(config))


@both_layouts
@pytest.mark.parametrize("moved", [None, 0, 1, 2, 3])
def test_a_restore_that_was_cut_short_is_completed(
    tmp_path: Path, layout: Layout, moved: int | None
) -> None:
    """moved: how many of its folders were in place; None before they were complete."""
    root = tmp_path / "a"
    config = fill(root, layout)
    for path in root.iterdir():
        if path != folder(root):
            shutil.rmtree(path)
    built = root / "restore.unfinished"
    if moved is None:
        (built / "commitlog").mkdir(parents=True)
    else:
        headrace("tier", "restore", "-c", str(config))
        built.mkdir()
        (built / "built").touch()
        for name in ("commitlog", "consumequeue", "tiered_index_file", "config")[moved:]:
            if (root / name).exists():
                (root / name).rename(built / name)
    done = headrace("tier", "restore", "-c", str(config))
    said = "not restored: no groups" if moved is None else "completed"
    assert said in done.stderr
    assert {path.name for path in root.iterdir()} >= {"commitlog", "config", "consumequeue"}
    assert not built.exists()
    assert {path.parts[-3] for path in root.glob("consumequeue/*/*/*")} == {
        topic for topic, _ in QUEUES
    }
