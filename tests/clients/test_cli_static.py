"""Commands for static topics, against running brokers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.support.cli import fail, succeed
from tests.support.running_brokers import brokers_in_thread

_numbers = count()


@pytest.fixture(scope="module")
def nameserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with brokers_in_thread(tmp_path_factory.mktemp("static"), ["a", "b", "c"]) as address:
        yield address


@pytest.fixture(autouse=True)
def environment(nameserver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_NAMESERVER", nameserver)


@pytest.fixture
def topic() -> str:
    """A static topic of two queues, both led by a."""
    name = f"static_{next(_numbers)}"
    succeed("topic", "create", name, "--static", "--queues", "2", "--broker", "a")
    return name


def test_create_shows_the_leaders() -> None:
    outcome = succeed("topic", "create", "new", "--static", "--queues", "4")
    assert outcome.rows() == [
        ["new", "0", "-", "a/0", "0"],
        ["new", "1", "-", "b/0", "0"],
        ["new", "2", "-", "c/0", "0"],
        ["new", "3", "-", "a/1", "0"],
    ]
    grown = succeed("topic", "create", "new", "--static", "--queues", "5", "--broker", "c,b")
    assert grown.rows() == [["new", "4", "-", "b/1", "0"]]
    assert "only added" in fail(1, "topic", "create", "new", "--static", "--queues", "5")


def test_a_dry_run_changes_nothing(
    topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    planned = succeed("topic", "create", "planned", "--static", "--dry-run", "--json").json()
    assert [row["after"] for row in planned[0]["leaders"]] == ["a/0", "b/0", "c/0", "a/1"]
    assert "does not exist" in fail(3, "topic", "delete", "planned", "--yes")
    remap = ("topic", "remap", topic, "--to", "b", "--queue", "1")
    assert succeed(*remap, "--dry-run").rows() == [[topic, "1", "a/1", "b/0", "-"]]
    (change,) = succeed(*remap, "--json").json()
    assert change["leaders"] == [
        {"topic": topic, "queue": 1, "before": "a/1", "after": "b/0", "from_offset": 0}
    ]
    assert change["before"]["brokerConfigMap"].keys() == {"a", "b", "c"}
    assert change["after"]["brokerConfigMap"].keys() == {"a", "b", "c"}
    assert list(tmp_path.iterdir()) == []


def test_mapping_of_other_topics_fails_by_name() -> None:
    succeed("topic", "create", "plain", "--queues", "1")
    assert "topic plain is not a static topic" in fail(3, "topic", "mapping", "plain")
    assert "missing" in fail(3, "topic", "mapping", "missing")


def test_describe_says_that_a_topic_is_static(topic: str) -> None:
    succeed("topic", "create", "normal", "--queues", "1")
    static = {
        name: succeed("topic", "describe", name, "--json").json()["static"]
        for name in (topic, "normal")
    }
    assert static == {topic: True, "normal": False}
    assert f"{topic} is a static topic" in succeed("topic", "describe", topic).stderr


def test_mapping_shows_each_chain(topic: str) -> None:
    for _ in range(4):
        succeed("send", topic, "hello")
    succeed("topic", "remap", topic, "--to", "c", "--mode", "available")
    rows = succeed("topic", "mapping", topic, "--json").json()
    assert [(row["queue"], row["broker"], row["leader"]) for row in rows] == [
        (0, "a", False),
        (0, "c", True),
        (1, "a", False),
        (1, "c", True),
    ]
    assert sum(row["messages"] for row in rows) == 4
    assert [row["min_offset"] for row in rows if row["leader"]] == [10_000, 10_000]
    assert all(row["led_until"].endswith("Z") for row in rows if not row["leader"])
    header, *lines = succeed("topic", "mapping", topic).stdout.splitlines()
    assert header.split("\t")[:5] == ["queue", "gen", "broker", "physical_queue", "leader"]
    assert len(lines) == 4


def test_describe_and_list_speak_of_logic_queues(topic: str) -> None:
    for _ in range(3):
        succeed("send", topic, "hello")
    succeed("topic", "remap", topic, "--to", "b", "--queue", "1")
    described = succeed("topic", "describe", topic, "--json").json()
    assert [(row["broker"], row["queue"]) for row in described["queues"]] == [("a", 0), ("b", 1)]
    assert sum(row["messages"] for row in described["queues"]) == 3
    listed = {row["topic"]: row for row in succeed("topic", "list", "--json").json()}
    assert (listed[topic]["queues"], listed[topic]["messages"]) == (2, 3)


def test_rebalance_spreads_the_queues(topic: str) -> None:
    moved = succeed("topic", "rebalance", topic).rows()
    assert [row[2] for row in moved] == ["a/1"]
    assert succeed("topic", "rebalance", topic).stderr == "nothing to change\n"
    assert succeed("topic", "remap", topic, "--to", "a,b").stderr == "nothing to change\n"
    assert [row[0] for row in succeed("topic", "rebalance").rows()].count(topic) == 0
    assert succeed("topic", "rebalance").stderr == "nothing to change\n"


def test_repair_of_a_whole_topic(topic: str) -> None:
    outcome = succeed("topic", "repair", topic)
    assert (outcome.stdout, outcome.stderr) == ("", f"topic {topic} is whole\n")
    assert "move its queues" in fail(1, "topic", "repair", topic, "--forget-broker", "b")


def test_options_that_do_not_go_together(topic: str) -> None:
    assert "--static can't" in fail(2, "topic", "create", "x", "--static", "--perm", "r")
    assert "unknown key" in fail(1, "topic", "create", "x", "--static", "--attribute", "a=b")
    assert "require --static" in fail(2, "topic", "create", "x", "--cluster", "c")
    assert "require --static" in fail(2, "topic", "create", "x", "--dry-run")
    assert "require --static" in fail(2, "topic", "create", "x", "--force")
    assert "no master named x" in fail(1, "topic", "remap", topic, "--to", "x")
    assert "queues 0 to 1, not 7" in fail(1, "topic", "remap", topic, "--to", "b", "--queue", "7")


def test_a_compacted_topic() -> None:
    succeed("topic", "create", "prices", "--static", "--queues", "2", "--compacted")
    for value in ("1", "2"):
        succeed("kv", "put", "prices", "tea", value)
        succeed("kv", "put", "prices", f"only {value}", value)
        succeed("topic", "remap", "prices", "--to", "c" if value == "1" else "a,b")
    succeed("kv", "delete", "prices", "only 2")
    assert succeed("kv", "get", "prices", "tea").stdout.strip() == "2"
    assert succeed("kv", "get", "prices", "only 1").stdout.strip() == "1"
    assert "only 2" not in succeed("kv", "dump", "prices").stdout
    grown = ("topic", "create", "prices", "--static", "--queues", "3")
    assert "force the change with --force" in fail(1, *grown)
    assert len(succeed(*grown, "--compacted", "--force").rows()) == 1
    described = succeed("topic", "describe", "prices", "--json").json()
    assert described["brokers"][0]["attributes"] == {"cleanup.policy": "COMPACTION"}
    assert sum(queue["messages"] for queue in described["queues"]) == 5


def test_a_topic_is_purged(topic: str) -> None:
    succeed("send", topic, "hello")
    succeed("topic", "purge", topic, "--yes")
    rows = succeed("topic", "mapping", topic, "--json").json()
    assert [(row["broker"], row["max_offset"]) for row in rows] == [("a", 0), ("a", 0)]


def test_a_topic_is_deleted_and_made_again(topic: str) -> None:
    succeed("send", topic, "hello")
    succeed("topic", "delete", topic, "--yes")
    succeed("topic", "create", topic, "--static", "--queues", "1")
    (row,) = succeed("topic", "mapping", topic, "--json").json()
    assert (row["max_offset"], row["messages"]) == (0, 0)


def test_a_compacted_topic_on_several_brokers_is_static() -> None:
    outcome = succeed("topic", "create", "rates", "--compacted", "--queues", "3")
    assert "rates is a static topic, with 3 queues on all brokers together" in outcome.stderr
    described = succeed("topic", "describe", "rates", "--json").json()
    assert len(described["queues"]) == 3
    assert {row["attributes"]["cleanup.policy"] for row in described["brokers"]} == {"COMPACTION"}
    succeed("topic", "create", "rates", "--compacted", "--queues", "3", "--if-not-exists")
    assert "--perm" in fail(2, "topic", "create", "odd", "--compacted", "--perm", "r")


def test_a_compacted_topic_on_one_broker_is_plain() -> None:
    outcome = succeed("topic", "create", "local", "--compacted", "--broker", "a")
    assert outcome.stderr == ""
    assert "is not a static topic" in fail(3, "topic", "mapping", "local")
