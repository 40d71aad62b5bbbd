"""A compaction log that is not mounted: every reader fails by name, and none gives a part."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from headrace import blocking
from headrace.errors import HeadraceError
from tests.support.cli import IMPATIENT, headrace, succeed
from tests.support.running_brokers import BrokersInThread, running_in_thread

pytestmark = pytest.mark.slow

LOST = "the compaction log of queue 0 of topic users is lost"
# Two files of the log, of which the first is removed. Compressed they are half as long.
KEYS = [f"key{number}" for number in range(30)]
VALUE = Random(1).randbytes(50_000).hex()


@contextlib.contextmanager
def unmounted(folder: Path) -> Iterator[BrokersInThread]:
    """A broker that was started without its compaction logs."""
    with running_in_thread(folder, ["a"]) as running:
        where = ("-n", running.nameserver)
        succeed("topic", "create", "users", "--compacted", "--queues", "1", *where)
        rows = [json.dumps({"key": key, "value": VALUE}) for key in KEYS]
        succeed("kv", "load", "users", *where, stdin="\n".join(rows).encode())
        running.stop("a")
        (folder / "a/compaction").rename(folder / "unmounted")
        min((folder / "a/commitlog").iterdir()).unlink()
        running.start("a")
        yield running


@pytest.fixture(scope="module")
def mq(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokersInThread]:
    with unmounted(tmp_path_factory.mktemp("store")) as running:
        yield running


@pytest.mark.parametrize(
    "command",
    [
        ("kv", "get", "users", KEYS[0]),
        ("kv", "get", "users", KEYS[-1]),
        ("kv", "get", "users", "nobody"),
        ("kv", "dump", "users"),
        ("consume", "users"),
        ("message", "query", "users", "nobody"),
        ("message", "get", "7F" * 16, "--topic", "users"),
    ],
)
def test_commands(mq: BrokersInThread, command: tuple[str, ...]) -> None:
    outcome = headrace(*command, "-n", mq.nameserver, patience=IMPATIENT)
    assert outcome.exit_code == (3 if "consume" in command else 1)
    assert LOST in outcome.stderr
    assert not outcome.stdout


@pytest.mark.parametrize("local", [True, False])
def test_a_table(mq: BrokersInThread, local: bool) -> None:
    with (
        pytest.raises(HeadraceError, match=LOST),
        blocking.Table(
            "users", model=str, local=local, nameserver=mq.nameserver, delivery_timeout_ms=300
        ) as table,
    ):
        table.get("nobody")


def test_doctor_has_a_row(mq: BrokersInThread) -> None:
    outcome = headrace("doctor", "--json", "-n", mq.nameserver)
    assert outcome.exit_code == 1
    (row,) = [row for row in outcome.json() if row["role"] == "compaction"]
    assert row["problem"].startswith(LOST)


def test_it_is_whole_once_it_is_mounted(tmp_path: Path) -> None:
    with unmounted(tmp_path) as mq:
        where = ("-n", mq.nameserver)
        succeed("kv", "put", "users", KEYS[0], "meanwhile", *where)
        mq.stop("a")
        shutil.rmtree(tmp_path / "a/compaction")
        (tmp_path / "unmounted").rename(tmp_path / "a/compaction")
        mq.start("a")
        assert succeed("kv", "get", "users", KEYS[0], *where).stdout == "meanwhile\n"
        assert succeed("kv", "get", "users", KEYS[1], *where).stdout == f"{VALUE}\n"
        assert len(succeed("kv", "dump", "users", *where).stdout.splitlines()) == len(KEYS)
