"""The rescue commands of ``headrace tier`` over a real S3 server."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from headrace_protocol.tier.location import Location
from headrace_protocol.tier.objects import ObjectDriver, open_objects
from tests.support import tiers
from tests.support.cli import headrace, succeed
from tests.support.object_server import SECRET_KEY, below, bucket_settings
from tests.support.object_tiers import open_objects_tier
from tests.support.rescued_tiers import LIMITS, QUEUES, fill, write_config
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


def empty(root: Path, location: Location, prefix: str) -> Bucket:
    root.mkdir()
    config = write_config(root, "file", **bucket_settings(location, prefix))
    return Bucket(config, open_objects(below(location, prefix)))


def messages(driver: ObjectDriver) -> dict[tuple[str, int], list[int]]:
    """The queue offsets of all records, each compared with its original."""
    queues = open_objects_tier(driver).queues
    return {name: tiers.read_all(queue) for name, queue in queues.items()}


ALL = {name: list(range(count)) for name, count in QUEUES.items()}


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
