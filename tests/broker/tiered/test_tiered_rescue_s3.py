"""The rescue commands of ``headrace tier`` over a real S3 server."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from headrace import blocking
from headrace_protocol.tier.location import Location
from headrace_protocol.tier.objects import ObjectDriver, open_objects
from tests.broker.tiered.test_tiered_processes import TOPIC, read_all, send, wait_until
from tests.broker.tiered.test_tiered_restore import consume, is_uploaded
from tests.support import tiers
from tests.support.cli import headrace, succeed
from tests.support.cluster import Cluster
from tests.support.object_server import SECRET_KEY, below, bucket_settings
from tests.support.object_tiers import open_objects_tier
from tests.support.rescued_tiers import LIMITS, QUEUES, fill, fill_objects, write_config
from tests.support.tiers import open_tier

pytestmark = pytest.mark.slow
TOTAL = sum(QUEUES.values())
COMMANDS = (
    ("verify", "--deep"),
    ("rebuild",),
    ("restore",),
    ("sweep", "--yes"),
)


class Bucket(NamedTuple):
    """A broker's config file, whose tier is below a prefix of its own, and that prefix."""

    config: Path
    driver: ObjectDriver


@pytest.fixture
def filled(tmp_path: Path, bucket: Location) -> Bucket:
    found = empty(tmp_path / "a", bucket, tmp_path.name)
    fill_objects(found.driver)
    return found


def empty(root: Path, place: Location, prefix: str) -> Bucket:
    root.mkdir()
    config = write_config(root, "file", **bucket_settings(place, prefix))
    return Bucket(config, open_objects(below(place, prefix)))


def only(driver: ObjectDriver, ending: str) -> str:
    """The path of the only object whose path ends so."""
    paths = driver.entries("")
    assert isinstance(paths, list)
    (path,) = [entry.path for entry in paths if entry.path.endswith(ending)]
    return path


def messages(driver: ObjectDriver) -> dict[tuple[str, int], list[int]]:
    """The queue offsets of all records, each compared with its original."""
    queues = open_objects_tier(driver).queues
    return {name: tiers.read_all(queue) for name, queue in queues.items()}


ALL = {name: list(range(count)) for name, count in QUEUES.items()}


def test_verify_names_an_object_that_is_gone(filled: Bucket) -> None:
    done = succeed("tier", "verify", "-c", str(filled.config), "--deep", "--json").json()
    assert done == {"queues": len(QUEUES), "messages": TOTAL, "damaged": 0, "findings": []}
    entries = filled.driver.entries("")
    assert isinstance(entries, list)
    gone = next(entry.path for entry in entries if "/data/" in entry.path)
    filled.driver.delete([gone])
    found = headrace("tier", "verify", "-c", str(filled.config))
    assert found.exit_code == 1
    assert [row[:2] for row in found.rows()] == [["damage", gone]]


@pytest.mark.parametrize("loss", ["missing", "torn"])
def test_rebuild_writes_a_lost_manifest_anew(filled: Bucket, loss: str) -> None:
    path = only(filled.driver, "/manifest.json")
    filled.driver.delete([path])
    if loss == "torn":
        assert isinstance(filled.driver.put(path, b'{"format": 1, "clu'), str)
    done = succeed("tier", "rebuild", "-c", str(filled.config), "--json").json()
    assert done == {"queues": len(QUEUES), "messages": TOTAL, "left_out": 0}
    succeed("tier", "verify", "-c", str(filled.config), "--deep")
    assert messages(filled.driver) == ALL


def test_sweep_deletes_old_leftovers_only(filled: Bucket) -> None:
    folder = only(filled.driver, "/manifest.json").rpartition("/")[0]
    old, young = (f"{folder}/data/00000001-0000000099-{ms:014}" for ms in (1, 10**14 - 1))
    for path in (old, young):
        assert isinstance(filled.driver.put(path, b"left"), str)
    listed = succeed("tier", "sweep", "-c", str(filled.config))
    assert listed.rows() == [[old, "4", "no"]]
    assert filled.driver.size(old) == 4
    succeed("tier", "sweep", "-c", str(filled.config), "--yes")
    assert filled.driver.entries(old) == []
    assert filled.driver.size(young) == 4
    assert messages(filled.driver) == ALL


def test_copy_to_a_bucket_and_back(tmp_path: Path, bucket: Location) -> None:
    begin, middle = fill(tmp_path / "a", "posix"), empty(tmp_path / "b", bucket, tmp_path.name)
    (tmp_path / "c").mkdir()
    end = write_config(tmp_path / "c", "posix")
    for source, target in ((begin, middle.config), (middle.config, end)):
        way = ("--from", str(source), "--to", str(target))
        assert succeed("tier", "copy", *way, "--json").json()["copied"] == TOTAL
        assert succeed("tier", "copy", *way, "--json").json()["copied"] == 0
    assert messages(middle.driver) == ALL
    back = open_tier(tmp_path / "c", limits=LIMITS).queues
    assert {name: tiers.read_all(queue) for name, queue in back.items()} == ALL


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize(
    "wrong", ["objectStoreSecretKey", "objectStoreBucket", "objectStoreEndpoint"]
)
def test_a_bucket_that_refuses_shows_no_secret(
    tmp_path: Path, bucket: Location, command: tuple[str, ...], wrong: str
) -> None:
    (tmp_path / "a").mkdir()
    lines = bucket_settings(bucket) | {"objectStoreAccessKey": "an-access-key"}
    lines |= {wrong: "http://127.0.0.1:1" if wrong.endswith("Endpoint") else "another-one"}
    config = write_config(tmp_path / "a", "file", **lines)
    name, *flags = command
    said = headrace("tier", name, "-c", str(config), *flags)
    assert said.exit_code == 1
    assert said.stderr.startswith("headrace: ")
    for secret in (SECRET_KEY, "an-access-key"):
        assert secret not in said.stdout + said.stderr
    assert wrong == "objectStoreBucket" or "another-one" not in said.stdout + said.stderr


def test_a_broker_without_its_disk_continues_on_its_bucket(
    tmp_path: Path, bucket: Location
) -> None:
    settings = bucket_settings(bucket, tmp_path.name)
    with Cluster(tmp_path, "a", tieredStoreGroupCommitTimeout=200, **settings) as cluster:
        broker, nameserver = cluster.brokers["a"], cluster.nameserver.address
        with blocking.Admin(nameserver=nameserver) as admin:
            admin.create_topic(TOPIC, queues=2)
        send(nameserver, 0, 500)
        seen = consume(nameserver, 100)
        wait_until(lambda: is_uploaded(cluster, 500), broker.said)
        broker.stop()
        shutil.rmtree(tmp_path / "a")
        config = str(tmp_path / "a.conf")
        restored = succeed("tier", "restore", "-c", config, "--json")
        assert restored.json()["messages"] == 500
        start(cluster)
        assert read_all(nameserver, 500) == [*range(500)]
        send(nameserver, 500, 100)
        assert read_all(nameserver, 600) == [*range(600)]
        assert sorted(seen + consume(nameserver, 600 - len(seen))) == [*range(600)]
        wait_until(lambda: is_uploaded(cluster, 600), broker.said)
        # Now the manifest is lost as well.
        broker.kill()
        driver = open_objects(below(bucket, tmp_path.name))
        driver.delete([only(driver, "/manifest.json")])
        rebuilt = succeed("tier", "rebuild", "-c", config, "--json")
        assert rebuilt.json()["messages"] == 600
        start(cluster)
        assert read_all(nameserver, 600) == [*range(600)]
        broker.stop()
        checked = succeed("tier", "verify", "-c", config, "--deep")
        said = broker.said()
        assert '"level": "error"' not in said, said
        assert SECRET_KEY not in said + restored.stderr + rebuilt.stderr + checked.stderr


def start(cluster: Cluster) -> None:
    broker = cluster.brokers["a"]
    broker.start()
    broker.wait_up()
    cluster.wait_registered()
