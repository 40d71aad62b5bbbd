"""A static topic with one of its brokers away: each row of docs/static-topics.md "Failures"."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace import Message, MessageQueue, blocking
from headrace.errors import NoQueue, QueuePartAway
from tests.support.cli import IMPATIENT, fail, headrace, succeed
from tests.support.running_brokers import running_in_thread

T = "T"
STAYED, MOVED, LED_BY_B = (MessageQueue(T, "__syslo__global__", queue) for queue in (0, 1, 3))
ROUNDS = 3

pytestmark = pytest.mark.slow


def bodies(first: int, *queues: int) -> list[str]:
    """The bodies that the rounds from ``first`` on sent to these queues."""
    return sorted(f"{number}-{queue}" for number in range(first, 2 * ROUNDS) for queue in queues)


def send_rounds(first: int) -> None:
    with blocking.Producer() as producer:
        for number in range(first, first + ROUNDS):
            for queue in range(4):
                body = f"{number}-{queue}".encode()
                producer.send(Message(T, body), queue=MessageQueue(T, STAYED.broker_name, queue))


@pytest.fixture(scope="module")
def nameserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Queues 0 and 2 are a's, 3 is b's, and 1 has moved from b to a. Then b goes.

    Group `known` was at the end when queue 1 moved.
    """
    environment = pytest.MonkeyPatch()
    with running_in_thread(tmp_path_factory.mktemp("away"), "abc") as running:
        environment.setenv("HEADRACE_NAMESERVER", running.nameserver)
        succeed("topic", "create", T, "--static", "--queues", "4", "--broker", "a,b")
        send_rounds(0)
        succeed("consume", T, "--group", "known")
        succeed("topic", "remap", T, "--to", "a", "--queue", "1")
        send_rounds(ROUNDS)
        running.stop("b")
        yield running.nameserver
    environment.undo()


def test_another_topic_is_created_without_the_broker(nameserver: str) -> None:
    rows = succeed("topic", "create", "new", "--static", "--queues", "2").rows()
    assert [row[3] for row in rows] == ["a/0", "c/0"]


@pytest.mark.parametrize(
    "change",
    [("create", T, "--static", "--queues", "5"), ("remap", T, "--to", "c", "--queue", "0")],
    ids=["grow", "remap"],
)
def test_changes_are_refused(nameserver: str, change: tuple[str, ...]) -> None:
    assert "one is away" in fail(1, "topic", *change)


def test_repair_names_the_broker_and_the_way_out(nameserver: str) -> None:
    assert "--forget-broker b" in fail(1, "topic", "repair", T)


def test_sends_reach_the_queues_of_the_others(nameserver: str) -> None:
    with blocking.Producer(delivery_timeout_ms=0) as producer:
        sent = [producer.send(Message("new", b"body")).queue.queue_id for _ in range(4)]
        assert len(set(sent)) == 2
        with pytest.raises(NoQueue, match=r"(broker|leader) b"):
            producer.send(Message(T, b"body"), queue=LED_BY_B)


def test_offsets_that_the_leader_knows_need_nobody_else(nameserver: str) -> None:
    with blocking.PullConsumer("known") as consumer:
        assert consumer.committed(MOVED) == ROUNDS
        assert (consumer.min_offset(MOVED), consumer.max_offset(MOVED)) == (0, 2 * ROUNDS)
    with blocking.PullConsumer("unknown") as consumer:
        assert consumer.committed(STAYED) is None
        with pytest.raises(QueuePartAway, match=f"from 0 to {ROUNDS} are on broker b") as refused:
            consumer.committed(MOVED)
        assert refused.value.next_offset == ROUNDS


def test_a_command_prints_what_is_there_and_names_the_rest(nameserver: str) -> None:
    outcome = headrace("consume", T, patience=IMPATIENT)
    assert sorted(outcome.stdout.split()) == sorted(bodies(0, 0, 2) + bodies(ROUNDS, 1))
    assert f"not read: {T}/__syslo__global__/1 from offset 0 to {ROUNDS}: " in outcome.stderr
    assert f"the offsets from 0 to {ROUNDS} are on broker b: " in outcome.stderr
    assert f"not read: {T}/__syslo__global__/3: " in outcome.stderr
    assert outcome.exit_code == 3


def test_a_group_that_was_at_the_end_goes_on(nameserver: str) -> None:
    outcome = headrace("consume", T, "--group", "known", patience=IMPATIENT)
    assert sorted(outcome.stdout.split()) == bodies(ROUNDS, 0, 1, 2)
    assert f"not read: {T}/__syslo__global__/3: " in outcome.stderr
    assert outcome.exit_code == 3
    assert headrace("consume", T, "--group", "known", patience=IMPATIENT).stdout == "", (
        "all is committed"
    )
    lag = headrace("group", "lag", "known", "--topic", T, "--json").json()
    assert [row["lag"] for row in lag] == [0, 0, 0, None]
    assert "broker b" in lag[-1]["problem"]


def test_a_new_group_gets_what_is_there_and_commits_nothing_behind_a_gap(nameserver: str) -> None:
    outcome = headrace("consume", T, "--group", "new", patience=IMPATIENT)
    assert sorted(outcome.stdout.split()) == sorted(bodies(0, 0, 2) + bodies(ROUNDS, 1))
    assert "1 from 0" in outcome.stderr
    assert outcome.exit_code == 3
    again = headrace("consume", T, "--group", "new", patience=IMPATIENT)
    assert sorted(again.stdout.split()) == bodies(ROUNDS, 1)
    assert again.exit_code == 3


def test_lag_shows_the_queues_whose_progress_is_known(nameserver: str) -> None:
    outcome = headrace("group", "lag", "new", "--topic", T, "--json")
    assert "are on broker b" in outcome.stderr
    assert outcome.exit_code == 3
