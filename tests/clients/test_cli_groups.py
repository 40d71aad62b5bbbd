"""``headrace group`` against a real broker with members: what it shows, and what it moves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

import headrace as library
from headrace import blocking
from headrace.admin.group_view import strategy_of
from headrace.admin.groups import MemberReport
from headrace.admin.member_view import MemberView
from headrace.consumer import strategies
from headrace.embedded import Embedded
from headrace.errors import RequestTimeout
from headrace_protocol import __version__
from headrace_protocol.bodies import ClientConnection, ConsumerRunningInfo, MessageQueue
from headrace_protocol.codes import RequestCode
from tests.support.cli import fail, headrace, succeed
from tests.support.until import wait_until

pytestmark = pytest.mark.usefixtures("environment")


@pytest.fixture(scope="module")
def mq() -> Iterator[Embedded]:
    # A look at the pulls each 50 ms, so an alarm takes 0.2 s.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace_broker.consumer.pull_watch._LOOK_S", 0.05)
        with library.embedded() as mq:
            yield mq


@pytest.fixture
def topic(topic: str) -> str:
    """A topic of the test's own, with two queues."""
    succeed("topic", "alter", topic, "--queues", "2")
    return topic


def described(group: str) -> dict[str, Any]:
    description: dict[str, Any] = succeed("group", "describe", group, "--json").json()
    return description


# -- describe --------------------------------------------------------------------------------------


def queues_of(description: dict[str, Any], topic: str) -> list[dict[str, Any]]:
    return [row for row in description["queues"] if row["topic"] == topic]


@pytest.mark.slow
def test_describe_shows_members_queues_locks_and_strategy(mq: Embedded, topic: str) -> None:
    group = f"group_{topic}"
    succeed("send", topic, stdin=b"1\n2\n3\n")
    with blocking.Consumer(
        group, topic, ordered=True, strategy="averagely_by_circle", nameserver=mq.nameserver
    ) as consumer:
        batch = consumer.receive()
        assert batch
        wait_until(lambda: all(row["owner"] for row in queues_of(described(group), topic)))
        description = described(group)
        table = succeed("group", "describe", group).stdout
    (row,) = description["members"]
    assert row["strategy"] == "averagely_by_circle"
    assert row["member"] in table
    queues = queues_of(description, topic)
    assert [(row["queue"], row["owner"], row["alarm"]) for row in queues] == [
        (0, row["member"], None),
        (1, row["member"], None),
    ]
    assert all(each["lock"].startswith(f"{row['member']} for ") for each in queues)
    assert (description["retries"], description["dead_letters"]) == (0, 0)


@pytest.mark.slow
def test_describe_counts_retries_and_dead_letters(mq: Embedded, topic: str) -> None:
    group = f"group_{topic}"
    succeed("send", topic, stdin=b"1\n2\n3\n")
    with blocking.Consumer(group, topic, nameserver=mq.nameserver) as consumer:
        for number, message in enumerate(consumer):
            if number == 2:
                message.retry(after=1)
                break
            message.reject()
    assert described(group)["dead_letters"] == 2
    wait_until(lambda: bool(described(group)["retries"] == 1))


@pytest.mark.slow
def test_a_queue_that_nobody_pulls_is_an_alarm(mq: Embedded, topic: str) -> None:
    group = f"group_{topic}"

    def first_only(queues: Any, _members: Any, _me: Any) -> Any:
        return queues[:1]

    with blocking.Consumer(group, topic, strategy=first_only, nameserver=mq.nameserver):
        wait_until(lambda: any(row["alarm"] for row in queues_of(described(group), topic)))
        first, second = queues_of(described(group), topic)
        assert (first["alarm"], second["owner"]) == (None, None)
        assert second["alarm"].startswith("no pull for 30 s")
        outcome = headrace("doctor", "--json")
        assert outcome.exit_code == 1
        (problem,) = [row["problem"] for row in outcome.json() if row["problem"]]
        assert problem.startswith("nobody has pulled 1 queue for 30 s")
        assert f"`headrace group describe {group}`" in problem
    wait_until(lambda: headrace("doctor").exit_code == 0)


@pytest.mark.slow
def test_different_subscriptions_are_shown(mq: Embedded, topic: str) -> None:
    group = f"group_{topic}"
    with (
        blocking.Consumer(group, {topic: "a"}, nameserver=mq.nameserver),
        blocking.Consumer(group, {topic: "b"}, nameserver=mq.nameserver),
    ):
        outcome = succeed("group", "describe", group, "--json")
        (conflict,) = outcome.json()["conflicts"]
    assert "all members of a group must have the same subscriptions" in conflict
    assert conflict in outcome.stderr


@pytest.mark.slow
def test_members_report_about_themselves(mq: Embedded, topic: str) -> None:
    group = f"group_{topic}"
    succeed("send", topic, stdin=b"1\n2\n3\n")
    with blocking.Consumer(group, {topic: "a"}, nameserver=mq.nameserver, start="latest"):
        (member,) = succeed("group", "members", group, "--json").json()

        def reported() -> dict[str, Any]:
            found: dict[str, Any] = succeed("group", "members", group, "--running", "--json").json()
            return found

        wait_until(lambda: sum(row["topic"] == topic for row in reported()["queues"]) == 2)
        found = reported()
        text = succeed("group", "members", group, "--running").stdout
    assert member.items() <= found["members"][0].items()
    (row,) = found["members"]
    assert (row["version"], row["strategy"], row["ordered"]) == (
        f"headrace {__version__}",
        "averagely",
        False,
    )
    assert (row["problem"], row["queues"], row["started"][:2]) == (None, 3, "20")
    queues = [each for each in found["queues"] if each["topic"] == topic]
    assert [(each["queue"], each["offset"], each["cached"]) for each in queues] == [
        (0, queues[0]["offset"], 0),
        (1, queues[1]["offset"], 0),
    ]
    assert ("a", topic) in [(each["tag"], each["topic"]) for each in found["topics"]]
    assert [line.split("\t")[0] for line in text.splitlines()].count(row["member"]) == 6
    assert headrace("group", "members", group).stderr == "no members are connected\n"
    assert "does not exist" in fail(3, "group", "members", "nobody", "--running")


def test_reports_of_javas_members_and_of_none() -> None:
    queue = MessageQueue("T", "b", 0)
    measured = {"consumeOKTPS": 2.5, "consumeFailedMsgs": 3, "pullRT": 1.5}
    report = ConsumerRunningInfo(
        properties={"PROP_CONSUMEORDERLY": "true", "PROP_CONSUMER_START_TIMESTAMP": "soon"},
        mq_table={queue: {"commitOffset": 7, "cachedMsgCount": 2, "locked": True}},
        subscription_set=[{"topic": "T", "subString": "a || b"}, "odd"],
        status_table={"T": measured, "U": None},
    )
    clients = [ClientConnection(client_id=name, language="JAVA") for name in ("a", "b")]
    error = RequestTimeout("127.0.0.1:1", RequestCode.GET_CONSUMER_RUNNING_INFO, 2000)
    rows = MemberView([MemberReport(clients[0], report), MemberReport(clients[1], error)]).rows()
    first, second = rows["members"]
    assert (first["ordered"], first["started"], first["queues"]) == (True, None, 1)
    assert (second["queues"], second["problem"]) == (None, str(error))
    (of_queue,) = rows["queues"]
    assert (of_queue["offset"], of_queue["cached"], of_queue["locked"]) == (7, 2, True)
    topics = {row["topic"]: row for row in rows["topics"]}
    assert (topics["T"]["tag"], topics["T"]["processed_per_s"]) == ("a || b", 2.5)
    assert (topics["T"]["failed_in_hour"], topics["T"]["pull_ms"]) == (3, 1.5)
    assert topics["U"]["processed_per_s"] is None


def test_strategies_of_javas_members_have_our_names() -> None:
    package = "org.apache.rocketmq.client.consumer.rebalance"
    for text, name in {
        f"{package}.AllocateMessageQueueAveragely@1b2c3d": "averagely",
        f"{package}.AllocateMachineRoomNearby@1": "machine_room_nearby",
        "com.example.Mine@1": "Mine",
        "": None,
        strategies.name_of(strategies.config([])): "config",
    }.items():
        report = ConsumerRunningInfo(properties={"allocateMessageQueueStrategy": text})
        assert strategy_of(report) == name
    assert strategy_of(None) is None


# -- reset and clone -------------------------------------------------------------------------------


def fill(mq: Embedded, topic: str, messages: int) -> None:
    """So many messages in each queue of a topic: their bodies are their queue and offset."""
    with blocking.Producer(nameserver=mq.nameserver) as producer:
        for queue in producer.queues(topic):
            bodies = [b"%d/%d" % (queue.queue_id, offset) for offset in range(messages)]
            producer.send_many(bodies, topic=topic, queue=queue)


@pytest.mark.slow
def test_lag_shows_what_is_taken_out(mq: Embedded, topic: str) -> None:
    group = f"group_{topic}"
    fill(mq, topic, 2)
    lag = ("group", "lag", group, "--topic", topic)
    with blocking.SimpleConsumer(group, topic, nameserver=mq.nameserver) as consumer:
        messages = consumer.receive(max=4)
        consumer.ack(messages[1:])
        rows = succeed(*lag, "--json").json()
        assert sum(row["out"] for row in rows) == 1
        assert succeed(*lag).stderr.endswith(", 1 of it taken out\n")


def positions(group: str, topic: str) -> dict[int, int]:
    rows = succeed("group", "lag", group, "--topic", topic, "--json").json()
    return {row["queue"]: row["committed_offset"] for row in rows}


@pytest.mark.slow
def test_one_queue_is_reset_without_members(mq: Embedded, topic: str) -> None:
    group = f"group_{topic}"
    fill(mq, topic, 4)
    succeed("consume", topic, "--group", group)
    reset = ("group", "reset", group, topic)
    (row,) = succeed(*reset, "--queue", "1", "--to", "3", "--json").json()
    assert (row["broker"], row["queue"], row["queue_offset"]) == ("broker-a", 1, 3)
    assert positions(group, topic) == {0: 4, 1: 3}
    assert succeed("consume", topic, "--group", group).stdout == "1/3\n"
    (row,) = succeed(*reset, "--queue", "0", "--to", "earliest", "--json").json()
    assert (row["queue"], row["queue_offset"]) == (0, 0)
    assert positions(group, topic) == {0: 0, 1: 4}
    assert "Target offset 9 not in" in fail(1, *reset, "--queue", "1", "--to", "9")
    assert f"topic {topic} has no queue 7" in fail(3, *reset, "--queue", "7", "--to", "1")
    assert "on broker b" in fail(3, *reset, "--queue", "1", "--broker", "b", "--to", "1")
    assert "add --queue" in fail(2, *reset, "--to", "1")
    assert "requires --queue" in fail(2, *reset, "--broker", "b", "--to", "earliest")


@pytest.mark.slow
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("is_clone", [False, True])
def test_a_busy_member_continues_where_a_reset_puts_it(
    mq: Embedded, topic: str, ordered: bool, is_clone: bool
) -> None:
    group, source = f"group_{topic}", f"source_{topic}"
    succeed("topic", "alter", topic, "--queues", "1")
    fill(mq, topic, 100)
    with blocking.Consumer(
        group, topic, ordered=ordered, queue_messages_max=50, nameserver=mq.nameserver
    ) as consumer:
        messages = iter(consumer)
        assert next(messages).body == b"0/0"
        # All room of the queue is taken, so no pull can tell the member.
        if is_clone:
            succeed("consume", topic, "--group", source, "--max", "90")
            succeed("group", "clone", source, group)
        else:
            succeed("group", "reset", group, topic, "--queue", "0", "--to", "90")
        began_s = time.monotonic()
        while next(messages).body != b"0/90":
            assert time.monotonic() < began_s + 1
            time.sleep(0.05)
        assert [next(messages).body for _ in range(9)] == [b"0/%d" % n for n in range(91, 100)]
    assert positions(group, topic)[0] == 100


@pytest.mark.slow
def test_a_clone_to_a_new_group(mq: Embedded, topic: str) -> None:
    source, target = f"source_{topic}", f"target_{topic}"
    fill(mq, topic, 3)
    succeed("consume", topic, "--group", source, "--max", "5")
    rows = succeed("group", "clone", source, target, "--json").json()
    assert {row["queue"]: row["committed_offset"] for row in rows} == positions(source, topic)
    assert len(succeed("consume", topic, "--group", target).stdout.splitlines()) == 1
    assert "does not exist" in fail(3, "group", "clone", "nobody", target)
    assert "to itself" in fail(2, "group", "clone", source, source)
    assert "a b" in fail(2, "group", "clone", source, "a b")
