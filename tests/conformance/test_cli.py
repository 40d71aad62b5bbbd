"""Commands about groups, timers and transactions against the real Apache RocketMQ broker."""

from __future__ import annotations

import random

import pytest

from tests.support.cli import fail, succeed

pytestmark = [pytest.mark.conformance, pytest.mark.slow]


@pytest.fixture(autouse=True)
def environment(nameserver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_NAMESERVER", nameserver)


@pytest.fixture
def topic() -> str:
    """A topic of the test's own, with two queues of five messages that a group has consumed."""
    name = f"T_{random.randrange(1 << 32)}"
    succeed("topic", "create", name, "--queues", "2")
    succeed("send", name, stdin=b"".join(b"%d\n" % number for number in range(10)))
    printed = succeed("consume", name, "--group", f"G_{name}", "--follow", "--max", "10").stdout
    assert len(printed.splitlines()) == 10
    return name


def positions(group: str, topic: str) -> list[int]:
    rows = succeed("group", "lag", group, "--topic", topic, "--json").json()
    return [row["committed_offset"] for row in rows]


def test_one_queue_is_reset_and_a_group_cloned(topic: str) -> None:
    group, other = f"G_{topic}", f"O_{topic}"
    before = positions(group, topic)
    reset = ("group", "reset", group, topic, "--queue", "1", "--to")
    (row,) = succeed(*reset, "1", "--json").json()
    assert (row["queue"], row["queue_offset"]) == (1, 1)
    assert positions(group, topic) == [before[0], 1]
    fail(1, *reset, "99")
    succeed("group", "clone", group, other)
    assert positions(other, topic) == [before[0], 1]


def test_a_group_is_described_as_far_as_the_broker_knows_it(topic: str) -> None:
    description = succeed("group", "describe", f"G_{topic}", "--json").json()
    queues = [row for row in description["queues"] if row["topic"] == topic]
    assert [(row["queue"], row["lag"], row["last_pull"], row["lock"]) for row in queues] == [
        (0, 0, None, None),
        (1, 0, None, None),
    ]
    assert description["dead_letters"] == 0


def test_what_waits_cannot_be_listed(topic: str) -> None:
    assert "cannot list timers; headrace's can" in fail(1, "timer", "list")
    assert "cannot list transactions" in fail(1, "transaction", "list")
    sent = succeed("send", topic, "later", "--delay", "1h", "--json").json()
    text = fail(1, "timer", "cancel", sent["message_id"])
    assert "operation is forbidden" in text, "it is found, and recalls are switched off by default"
    assert "not the id of a discarded" in fail(3, "transaction", "resume", sent["message_id"])
