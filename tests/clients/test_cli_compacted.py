"""Commands for compacted topics, against a running broker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.cli import fail, succeed
from tests.support.running_brokers import brokers_in_thread

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def nameserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with brokers_in_thread(tmp_path_factory.mktemp("compacted"), ["a"]) as address:
        yield address


@pytest.fixture(autouse=True)
def environment(nameserver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_NAMESERVER", nameserver)


def test_a_topic_is_created_filled_compacted_and_described() -> None:
    succeed("topic", "create", "users", "--compacted", "--queues", "1")
    for value in ("1", "2", "3"):
        succeed("kv", "put", "users", "ann", value)
        succeed("kv", "put", "users", "bob", value)
    described = succeed("topic", "describe", "users", "--json").json()
    assert described["brokers"][0]["attributes"] == {"cleanup.policy": "COMPACTION"}
    while True:  # until the last messages are in the compaction log
        (row,) = succeed("topic", "compact", "users", "--json").json()
        if row["messages"] == 2:
            break
    assert row["bytes_after"] < row["bytes_before"]
    described = succeed("topic", "describe", "users", "--json").json()
    assert described["compaction"] == [row]
    assert succeed("kv", "get", "users", "ann").stdout.strip() == "3"


def test_the_number_of_queues_changes_only_by_force() -> None:
    succeed("topic", "create", "fixed", "--compacted", "--queues", "2")
    assert "force the change" in fail(1, "topic", "alter", "fixed", "--queues", "3")
    succeed("topic", "alter", "fixed", "--queues", "3", "--force")


def test_other_topics_are_not_compacted() -> None:
    succeed("topic", "create", "plain", "--queues", "1")
    assert "is not compacted" in fail(1, "topic", "compact", "plain")
