"""Commands for compacted topics, against a running broker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from headrace.blocking import Admin
from headrace_protocol.bodies import SubscriptionGroupConfig
from tests.support.cli import fail, succeed
from tests.support.running_brokers import brokers_in_thread
from tests.support.until import wait_until


@pytest.fixture(scope="module")
def nameserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with brokers_in_thread(tmp_path_factory.mktemp("compacted"), ["a"]) as address:
        yield address


@pytest.fixture(autouse=True)
def environment(nameserver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_NAMESERVER", nameserver)


def compacted(topic: str, put_count: int, message_count: int) -> dict[str, Any]:
    """The state of a topic's queue, compacted from so many messages to so many.

    The last messages may take a moment to get into the compaction log: without them there might be
    as many by chance.
    """
    wait_until(lambda: messages_of(described(topic)["compaction"]) == [put_count])
    while True:
        rows: list[dict[str, Any]] = succeed("topic", "compact", topic, "--json").json()
        if messages_of(rows) == [message_count]:
            return rows[0]


def described(topic: str) -> Any:
    return succeed("topic", "describe", topic, "--json").json()


def messages_of(rows: list[dict[str, Any]]) -> list[int]:
    return [row["messages"] for row in rows]


def test_a_topic_is_created_filled_compacted_and_described() -> None:
    succeed("topic", "create", "users", "--compacted", "--queues", "1")
    for value in ("1", "2", "3"):
        succeed("kv", "put", "users", "ann", value)
        succeed("kv", "put", "users", "bob", value)
    assert described("users")["brokers"][0]["attributes"] == {"cleanup.policy": "COMPACTION"}
    row = compacted("users", 6, 2)
    assert row["bytes_after"] < row["bytes_before"]
    assert described("users")["compaction"] == [row]
    assert messages_of(described("users")["queues"]) == [2]
    assert succeed("kv", "get", "users", "ann").stdout.strip() == "3"


def test_contradictions_are_refused() -> None:
    policy = ("--attribute", "cleanup.policy=DELETE")
    problem = fail(2, "topic", "create", "odd", "--compacted", *policy)
    assert "--compacted contradicts cleanup.policy=DELETE: leave one of them out" in problem
    lag = ("--attribute", "min.compaction.lag.ms=7200000")
    assert "is more than max" in fail(1, "topic", "create", "odd", "--compacted", *lag)
    succeed("topic", "create", "odd", "--compacted", "--attribute", "cleanup.policy=COMPACTION")


def test_lag_counts_messages_and_keys_are_found_with_spaces(nameserver: str) -> None:
    succeed("topic", "create", "states", "--compacted", "--queues", "1")
    for value in ("1", "2", "3"):
        succeed("kv", "put", "states", "New York", value)
    with Admin(nameserver=nameserver) as admin:
        admin.create_group(SubscriptionGroupConfig(group_name="readers"))
    succeed("group", "reset", "readers", "states", "--to", "earliest")

    def lags() -> list[tuple[int, int]]:
        rows = succeed("group", "lag", "readers", "--json").json()
        return [(row["max_offset"], row["lag"]) for row in rows]

    assert lags() == [(3, 3)]
    compacted("states", 3, 1)
    assert lags() == [(3, 1)]
    found = succeed("message", "query", "states", "New York", "--json").json()
    assert "3" in [message["body"] for message in found]
    succeed("topic", "create", "cities", "--queues", "1")
    assert "spaces" in fail(2, "message", "query", "cities", "New York")


def test_the_number_of_queues_changes_only_by_force() -> None:
    succeed("topic", "create", "fixed", "--compacted", "--queues", "2")
    assert "force the change" in fail(1, "topic", "alter", "fixed", "--queues", "3")
    succeed("topic", "alter", "fixed", "--queues", "3", "--force")


def test_other_topics_are_not_compacted() -> None:
    succeed("topic", "create", "plain", "--queues", "1")
    assert "is not compacted" in fail(1, "topic", "compact", "plain")


def test_a_rebuild_names_what_is_missing() -> None:
    succeed("topic", "create", "lost", "--compacted", "--queues", "1")
    succeed("kv", "put", "lost", "ann", "1")
    rows = succeed("topic", "rebuild", "lost", "--from", "127.0.0.1:1", "--json").json()
    assert len(rows) <= 1, "its first message is there, so nobody is asked"
    assert "expected HOST:PORT" in fail(1, "topic", "rebuild", "lost", "--from", "nowhere")
    assert "on the brokers a:" in fail(
        2, "topic", "rebuild", "lost", "--from", "127.0.0.1:1", "--broker", "b"
    )
    succeed("topic", "create", "simple", "--queues", "1")
    assert "is not compacted" in fail(1, "topic", "rebuild", "simple", "--from", "127.0.0.1:1")
