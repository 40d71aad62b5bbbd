"""Commands for tiered storage, against a running broker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import Message
from headrace.blocking import Admin, Producer
from tests.support.cli import fail, succeed
from tests.support.running_brokers import brokers_in_thread


@pytest.fixture(scope="module")
def nameserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("tier")
    settings = {
        "message_store_plug_in": "tieredstore",
        "tiered_backend_service_provider": "posix",
        "tiered_store_file_path": folder / "tier",
        "tiered_store_group_commit_timeout": 100,
    }
    with brokers_in_thread(folder, ["a"], **settings) as address:
        yield address


@pytest.fixture(autouse=True)
def environment(nameserver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_NAMESERVER", nameserver)


def status(topic: str) -> dict[str, Any]:
    found: dict[str, Any] = succeed("tier", "status", "--topic", topic, "--json").json()
    return found


def uploaded(topic: str) -> dict[str, Any]:
    """The status of a topic once nothing is behind."""
    while True:
        found = status(topic)
        if not any(queue["behind_messages"] for queue in found["queues"]):
            return found


def test_status_of_a_topic(nameserver: str) -> None:
    succeed("topic", "create", "Orders", "--queues", "1")
    assert status("Orders")["queues"] == []
    shown = succeed("tier", "status", "--topic", "Orders")
    assert "no tiered topic has messages" in shown.stderr
    for number in range(3):
        succeed("send", "Orders", f"order {number}")
    found = uploaded("Orders")
    (queue,) = found["queues"]
    assert (queue["topic"], queue["queue"], queue["broker"]) == ("Orders", 0, "a")
    assert (queue["local_min"], queue["local_max"]) == (0, 3)
    assert (queue["tier_min"], queue["tier_end"]) == (0, 3)
    assert queue["tier_bytes"] > 0
    assert (queue["behind_bytes"], queue["behind_seconds"], queue["problem"]) == (0, 0.0, None)
    (broker,) = found["brokers"]
    assert (broker["broker"], broker["is_open"], broker["queue_count"]) == ("a", True, 1)
    lines = succeed("tier", "status").stdout.splitlines()
    assert lines[0].split("\t")[:5] == ["topic", "queue", "broker", "local", "tier"]
    assert lines[1].split("\t")[:5] == ["Orders", "0", "a", "0-3", "0-3"]
    with Admin(nameserver=nameserver) as admin:
        assert admin.tier_status()["a"].queues[0].tier_end == 3


def test_status_without_a_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with brokers_in_thread(tmp_path, ["plain"]) as address:
        monkeypatch.setenv("HEADRACE_NAMESERVER", address)
        assert "has no tiered storage" in fail(1, "tier", "status")


@pytest.mark.slow
def test_queues_that_are_given_up_are_resumed_or_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        "message_store_plug_in": "tieredstore",
        "tiered_backend_service_provider": "posix",
        "tiered_store_file_path": tmp_path / "tier",
        "tiered_store_group_commit_timeout": 100,
    }
    with brokers_in_thread(tmp_path, ["a"], **settings) as address:
        monkeypatch.setenv("HEADRACE_NAMESERVER", address)
        succeed("topic", "create", "Orders", "--queues", "1")
        succeed("send", "Orders", "order")
        uploaded("Orders")
        assert "no queue was given up" in succeed("tier", "resume").stderr
        forget = ("tier", "forget", "Orders", "--queue", "0", "--broker", "a")
        assert "is not given up" in fail(1, *forget, "--yes")
        (segment,) = (tmp_path / "tier").rglob("COMMIT_LOG/*")
        segment.write_bytes(segment.read_bytes() + b"?")
        succeed("send", "Orders", "another")
        while not (problem := status("Orders")["queues"][0]["problem"]):
            pass
        assert "bytes instead of" in problem
        shown = succeed("tier", "status")
        assert "uploads of 1 queue are given up, so the log fills" in shown.stderr
        assert "nothing was dropped: --yes drops queue offsets 0 to 1" in succeed(*forget).stderr
        assert succeed("tier", "resume", "--json").json()[0]["problem"] == problem
        assert uploaded("Orders")["queues"][0]["tier_end"] == 2


def test_status_says_that_there_are_more_queues(nameserver: str) -> None:
    succeed("topic", "create", "Wide", "--queues", "3")
    with Producer(nameserver=nameserver) as producer:
        for queue in producer.queues("Wide"):
            producer.send(Message("Wide", b"x"), queue=queue)
    while len(status("Wide")["queues"]) < 3:
        pass
    shown = succeed("tier", "status", "--topic", "Wide", "--max", "2", "--json")
    assert len(shown.json()["queues"]) == 2
    assert "a: only the 2 queues that are furthest behind are listed" in shown.stderr
    assert "are listed" not in succeed("tier", "status", "--topic", "Wide", "--max", "3").stderr
