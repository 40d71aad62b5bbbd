"""Apache's client-go along the paths of its examples, against a broker: ours, or Apache's own.

``make conformance PEER=apache`` runs them against Apache's broker, which proves them.
"""

from __future__ import annotations

import os
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from headrace.blocking import Admin, Consumer
from tests.conformance.go_client import TIMEOUT_S, Event, GoClient, go_client
from tests.conformance.peer import START_TIMEOUT_S, quick_peer
from tests.support.until import wait_until

PEER = os.environ.get("CONFORMANCE_PEER", "headrace")
SETTINGS = {
    # Undecided transactions are checked soon.
    "transactionCheckInterval": "1000",
    "transactionTimeOut": "1000",
    # Apache's broker also checks decided ones until it writes the decisions, by default after 3 s.
    "transactionOpBatchInterval": "10",
    # The topic of traces.
    "traceTopicEnable": "true",
}
QUEUES = 4
LATE_MS = 20_000

pytestmark = [pytest.mark.conformance, pytest.mark.slow]


@pytest.fixture(scope="module")
def nameserver() -> Iterator[str]:
    with quick_peer(PEER, settings=SETTINGS) as peer:
        yield peer.nameserver


@dataclass(frozen=True)
class Case:
    """A topic and a group of a test's own.

    at: arguments of our clients. options: of each scenario.
    """

    nameserver: str
    home: Path
    topic: str
    group: str
    at: dict[str, Any]
    options: dict[str, object]

    @classmethod
    def made(
        cls, nameserver: str, home: Path, at: dict[str, Any] | None = None, **options: object
    ) -> Case:
        """One with a new topic. at: see above, with a user who may do everything."""
        number = random.randrange(1 << 32)
        topic, group = f"T_{number}", f"G_{number}"
        at = at or {"nameserver": nameserver}
        with Admin(**at) as admin:
            admin.create_topic(topic, queues=QUEUES)
        return cls(nameserver, home, topic, group, at, options)

    def run(self, scenario: str, **options: object) -> AbstractContextManager[GoClient]:
        options = {"group": self.group, "topic": self.topic, **self.options, **options}
        return go_client(scenario, self.nameserver, self.home, **options)

    def consume(self, *members: str, **options: object) -> AbstractContextManager[GoClient]:
        return self.run("consume", members=[f"{self.group}_{name}" for name in members], **options)

    def send(self, *bodies: str, **options: object) -> list[Event]:
        """The events of what client-go sent."""
        with self.run("send", bodies=bodies, **options) as client:
            client.until(lambda: len(client.of_kind("sent")) == len(bodies))
        sent = client.of_kind("sent")
        assert [(event["body"], event["status"]) for event in sent] == [(b, 0) for b in bodies]
        return client.events

    def make_retry_topic(self) -> None:
        """Client-go looks for it before its first heartbeat creates it, then every 30 s."""
        with Consumer(self.group, self.topic, **self.at):
            self.wait_for_topic(f"%RETRY%{self.group}")

    def dead_letters(self, count: int) -> list[str]:
        topic = f"%DLQ%{self.group}"
        reader = f"{self.group}_of_dead_letters"
        self.wait_for_topic(topic)
        with Consumer(reader, topic, **self.at, start="earliest") as consumer:
            return read_ours(consumer, count)

    def wait_for_topic(self, topic: str) -> None:
        with Admin(**self.at) as admin:
            wait_until(lambda: topic in admin.topics(system=True), limit_s=START_TIMEOUT_S)


@pytest.fixture
def case(nameserver: str, tmp_path: Path) -> Case:
    return Case.made(nameserver, tmp_path)


def read_ours(consumer: Consumer, count: int) -> list[str]:
    messages = islice(consumer.until(TIMEOUT_S * 1000), count)
    return [message.body.decode() for message in messages]


def numbered(count: int) -> list[str]:
    return [str(number) for number in range(count)]


def bodies(events: list[Event]) -> list[str]:
    return [event["body"] for event in events]


def test_simple(case: Case) -> None:
    sent = [event for event in case.send(*numbered(10)) if event["event"] == "sent"]
    with case.consume("a") as client:
        client.received(10)

    def place(event: Event) -> tuple[object, ...]:
        return tuple(event[key] for key in ("body", "message_id", "queue", "queue_offset"))

    assert sorted(map(place, client.of_kind("received"))) == sorted(map(place, sent))


def test_batch(case: Case) -> None:
    with case.run("send", bodies=numbered(10), batch=True) as client:
        client.until(lambda: bool(client.of_kind("sent")))
    (sent,) = client.of_kind("sent")
    assert sent["status"] == 0
    with case.consume("a") as client:
        received = client.received(10)
    assert sorted(bodies(received)) == numbered(10)
    assert {event["queue"] for event in received} == {sent["queue"]}


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_request_and_reply(case: Case, is_async: bool) -> None:
    replies = {"a": "re: a", "b": "re: b"}
    if PEER == "headrace":
        # As in the example, where Apache's broker refuses the reply: NullPointerException.
        replies["c"] = ""
    how = {"async": is_async, "bodies": [*replies]}
    with (
        case.run("answer", members=["a"], replies=replies) as replier,
        case.run("request", group=f"P_{case.group}", **how) as asker,
    ):
        asker.until(lambda: len(asker.of_kind("replied")) == len(replies))
        replier.until(lambda: len(replier.of_kind("answered")) == len(replies))
    assert {event["body"]: event["reply"] for event in asker.of_kind("replied")} == replies


def test_trace(case: Case) -> None:
    with (
        case.run("send", bodies=["0"], trace=True) as producer,
        case.consume("a", trace=True) as consumer,
        Admin(**case.at) as admin,
    ):
        consumer.received(1)
        producer.until(lambda: bool(producer.of_kind("sent")))
        (sent,) = producer.of_kind("sent")

        def steps() -> list[str]:
            """What the producer and the consumer have written of the message."""
            traced = admin.trace(sent["message_id"], case.topic)
            return sorted(each.event for each in traced if each.group == case.group)

        wait_until(lambda: steps() == ["delivered", "processed", "sent"], steps, TIMEOUT_S)


def delays_ms(case: Case, delivered: GoClient, **options: object) -> list[int]:
    """Milliseconds from the start of each send to the message's arrival."""
    events = case.send(*numbered(10), **options)
    began = {event["body"]: event["at_ms"] for event in events if event["event"] == "sending"}
    received = delivered.received(10)
    assert sorted(bodies(received)) == numbered(10)
    return [event["at_ms"] - began[event["body"]] for event in received]


@pytest.mark.parametrize(
    ("options", "delay_ms"),
    [
        pytest.param({"delay_level": 1}, 1000, id="level"),
        pytest.param({"properties": {"TIMER_DELAY_MS": "1500"}}, 1500, id="timer"),
    ],
)
def test_delay(options: dict[str, object], delay_ms: int, case: Case) -> None:
    with case.consume("a") as client:
        for waited_ms in delays_ms(case, client, **options):
            assert delay_ms <= waited_ms <= delay_ms + LATE_MS
    assert len(client.of_kind("received")) == 10


def test_transaction(case: Case) -> None:
    wanted = [
        *("rollback", "commit"),
        *("unknown-rollback", "unknown-commit"),
        *("unknown-unknown-rollback", "unknown-unknown-commit"),
    ]
    with (
        case.consume("a") as consumer,
        case.run("transaction", transactions=wanted) as producer,
    ):
        producer.until(lambda: len(producer.of_kind("checked")) >= 6)
        consumer.received(3)
    sent = {(event["body"], event["message_id"]) for event in producer.of_kind("sent")}
    answers = defaultdict(list)
    for event in producer.events:
        if event["event"] in {"executed", "checked"}:
            answers[event["body"], event["transaction_id"]].append(event["state"])
    assert {transaction: "-".join(states) for transaction, states in answers.items()} == {
        (body, id_): body for body, id_ in sent
    }
    received = [(event["body"], event["message_id"]) for event in consumer.of_kind("received")]
    assert sorted(received) == sorted(
        transaction for transaction in sent if transaction[0].endswith("commit")
    )


def attempts(events: list[Event]) -> dict[str, list[int]]:
    """The numbers of earlier deliveries that each delivery of a message had, by body."""
    found = defaultdict(list)
    for event in events:
        found[event["body"]].append(event["reconsumed"])
    return found


def test_retry_later(case: Case) -> None:
    case.make_retry_topic()
    with case.consume("a", failures=2, retry_level=1) as client:
        case.send(*numbered(3))
        received = client.received(9)
    assert attempts(received) == {body: [0, 1, 2] for body in numbered(3)}
    assert {event["topic"] for event in received} == {case.topic}
    times = sorted((event["body"], event["at_ms"]) for event in received)
    for (body, before_ms), (next_body, after_ms) in pairwise(times):
        assert body != next_body or after_ms - before_ms >= 1000
    assert len({event["message_id"] for event in received}) == 3


def test_dead_letters(case: Case) -> None:
    case.make_retry_topic()
    with case.consume("a", failures=9, retry_level=1, max_reconsumes=1) as client:
        case.send(*numbered(3))
        client.received(6)
        assert sorted(case.dead_letters(3)) == numbered(3)
    assert attempts(client.of_kind("received")) == {body: [0, 1] for body in numbered(3)}


def test_retry_in_order(case: Case) -> None:
    case.send(*numbered(3), keys=1)
    with case.consume("a", orderly=True, failures=9, max_reconsumes=1) as client:
        client.received(9)
        # It gives up when a message was retried more often than it may be.
        assert case.dead_letters(3) == numbered(3)
    deliveries = [(event["body"], event["reconsumed"]) for event in client.of_kind("received")]
    assert deliveries == [(body, earlier) for body in numbered(3) for earlier in (0, 1, 2)]


def shares(case: Case) -> dict[str, list[int]]:
    """The queue ids of each member, by client id."""
    with Admin(**case.at) as admin:
        found = {}
        connections = admin.members(case.group).get("broker-a")
        for connection in connections.connection_set if connections else ():
            report = admin.running_info(case.group, connection.client_id, "broker-a")
            queues = report.mq_table if report else ()
            mine = sorted(queue.queue_id for queue in queues if queue.topic == case.topic)
            found[connection.client_id] = mine
        return found


def until_shared(case: Case, count: int) -> dict[str, list[int]]:
    """Wait until each of so many members has queues, and each queue one member."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while True:
        found = shares(case)
        busy = [queues for queues in found.values() if queues]
        if len(busy) == len(found) == count and sorted(chain(*busy)) == list(range(QUEUES)):
            return found
        assert time.monotonic() < deadline_s, found
        time.sleep(0.05)


def test_orderly_hand_over(case: Case) -> None:
    with case.consume("a", orderly=True) as a:
        until_shared(case, 1)
        first = case.send(*numbered(40), keys=8)
        a.received(40)
        with case.consume("b", orderly=True) as b:
            a.finish()
            second = case.send(*(f"again {body}" for body in numbered(40)), keys=8)
            b.until(lambda: len(again(b)) >= 40)
    sent = by_queue([event for event in first + second if event["event"] == "sent"])
    assert len(sent) == QUEUES
    assert len(again(b)) == 40
    # A member leaves before it commits, so b may read its last messages again.
    for queue, by_a in by_queue(a.of_kind("received")).items():
        by_b = by_queue(b.of_kind("received"))[queue]
        assert sent[queue][: len(by_a)] == by_a
        assert sent[queue][-len(by_b) :] == by_b


def again(client: GoClient) -> list[Event]:
    return [event for event in client.of_kind("received") if event["body"].startswith("again")]


def by_queue(events: list[Event]) -> dict[int, list[str]]:
    found = defaultdict(list)
    for event in events:
        found[event["queue"]].append(event["body"])
    return found


def test_broadcast(case: Case) -> None:
    with case.consume("a", "b", broadcast=True) as client:
        case.send(*numbered(10))
        first = client.received(20)
    assert attempts(first) == {body: [0, 0] for body in numbered(10)}
    with case.consume("a", "b", broadcast=True) as client:
        case.send("more")
        client.until(lambda: bodies(client.of_kind("received")).count("more") == 2)
    received = read_by(client.of_kind("received"))
    new = [each for each in received if each[1] == "more"]
    assert sorted(new) == [(f"{case.group}_{name}", "more") for name in "ab"]
    # A member may end before it has noted the last message of each of its four queues.
    again = [each for each in received if each not in new]
    assert len(set(again)) == len(again) <= 8
    assert set(again) <= set(read_by(first))


def read_by(events: list[Event]) -> list[tuple[str, str]]:
    """Member and body of each."""
    return [(event["member"], event["body"]) for event in events]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [("averagely", [[0, 1], [2, 3]]), ("averagely_by_circle", [[0, 2], [1, 3]])],
)
def test_strategy(strategy: str, expected: list[list[int]], case: Case) -> None:
    with case.consume("a", "b", strategy=strategy) as client:
        found = until_shared(case, 2)
        case.send(*numbered(10))
        received = client.received(10)
    assert [found[client_id] for client_id in sorted(found)] == expected
    for event in received:
        (mine,) = (found[id_] for id_ in found if id_.endswith(f"@{event['member']}"))
        assert event["queue"] in mine
    assert sorted(bodies(received)) == numbered(10)


def test_consistent_hash(case: Case) -> None:
    case.send(*numbered(10))
    with case.consume("a", "b", strategy="consistent_hash") as client:
        # Queues that change hands may be read twice, and one member may have all.
        client.until(lambda: set(bodies(client.of_kind("received"))) == set(numbered(10)))


@pytest.mark.parametrize("strategy", ["averagely", "averagely_by_circle"])
def test_a_group_with_a_member_of_ours(strategy: str, case: Case) -> None:
    with (
        case.consume("a", "b", strategy=strategy) as client,
        Consumer(case.group, case.topic, **case.at, strategy=strategy) as consumer,
    ):
        until_shared(case, 3)
        sent = [event for event in case.send(*numbered(QUEUES * 5)) if event["event"] == "sent"]
        mine = {queue.queue_id for queue in consumer.assignment if queue.topic == case.topic}
        ours = [event for event in sent if event["queue"] in mine]
        assert sorted(read_ours(consumer, len(ours))) == sorted(bodies(ours))
        received = client.received(len(sent) - len(ours))
    assert sorted(bodies(received + ours)) == sorted(bodies(sent))
