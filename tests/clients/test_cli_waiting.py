"""``headrace timer`` and ``headrace transaction`` against a real broker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest

import headrace as library
from headrace import Message, blocking
from headrace.embedded import _SMALL_FILES, Embedded
from headrace.errors import BrokerError
from tests.support.cli import fail, succeed
from tests.support.until import wait_until

pytestmark = pytest.mark.usefixtures("environment")
# An undecided transaction is asked about after a millisecond, once.
SETTINGS = {
    "transaction_time_out": 1,
    "transaction_check_interval": 100,
    "transaction_check_max": 1,
}


@pytest.fixture(scope="module")
def mq() -> Iterator[Embedded]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setitem(_SMALL_FILES, name, value)
        with library.embedded() as mq:
            yield mq


# -- timers ----------------------------------------------------------------------------------------


def send_timers(mq: Embedded, topic: str, **delays: float) -> dict[str, library.SendResult]:
    with blocking.Producer(nameserver=mq.nameserver) as producer:
        sent = {
            body: producer.send(Message(topic, body.encode(), key=f"k-{body}", delay=delay))
            for body, delay in delays.items()
        }
    wait_until(lambda: len(timers("--topic", topic)) == len(delays))
    return sent


def timers(*options: str) -> list[str]:
    """The bodies of the listed timers."""
    return [row["body"] for row in succeed("timer", "list", *options, "--json").json()]


def test_timers_are_listed_in_the_order_of_their_times(mq: Embedded, topic: str) -> None:
    send_timers(mq, topic, late=7200, soon=600, middle=3600)
    other = f"{topic}_other"
    succeed("topic", "create", other)
    send_timers(mq, other, elsewhere=60)
    of_topic = ("--topic", topic)
    assert timers(*of_topic) == ["soon", "middle", "late"]
    assert timers(*of_topic, "--max", "10000") == ["soon", "middle", "late"]
    assert timers(*of_topic, "--max", "1") == ["soon"]
    assert timers(*of_topic, "--until", "2h") == ["soon", "middle", "late"]
    assert timers(*of_topic, "--until", "90m") == ["soon", "middle"]
    assert timers(*of_topic, "--until", "2026-01-01") == []
    assert set(timers()) >= {"soon", "elsewhere"}
    for limits, is_cut in ((("--max", "1"), True), (("--max", "2", "--until", "90m"), False)):
        cut = succeed("timer", "list", *of_topic, *limits, "--json").stderr
        assert ("only the next 1 timers are listed" in cut) == bool(cut) == is_cut
    outcome = succeed("timer", "list", *of_topic)
    assert [row[0] for row in outcome.rows()] == [topic] * 3
    assert outcome.rows()[0][4] == "k-soon"
    assert outcome.stderr == f"3 waiting timers for topic {topic}\n"
    assert succeed("timer", "list", "--topic", "none").stderr == "no timers wait\n"
    assert "is not a time" in fail(2, "timer", "list", "--until", "soon")


def test_timers_are_cancelled_by_id_and_by_handle(mq: Embedded, topic: str) -> None:
    sent = send_timers(mq, topic, a=600, b=601, c=602, d=603)
    rows = {row["body"]: row for row in succeed("timer", "list", "--topic", topic, "--json").json()}
    assert rows["a"]["id"] == sent["a"].message_id
    assert rows["b"]["recall_handle"] == sent["b"].recall_handle
    names = [rows["a"]["id"], rows["b"]["recall_handle"], rows["c"]["offset_message_id"]]
    for left, name in zip((3, 2, 1), names, strict=True):
        record = succeed("timer", "cancel", name, "--json").json()
        assert (record["topic"], record["still_waiting"]) == (topic, left)
    assert timers("--topic", topic) == ["d"]
    for name in names:
        assert "no such message waits" in fail(1, "timer", "cancel", name)
    with blocking.Producer(nameserver=mq.nameserver) as producer:
        plain = producer.send(Message(topic, b"plain"))
    for name in ("0" * 32, "nonsense", plain.message_id, plain.offset_message_id):
        assert "neither a recall handle nor the id of a timer" in fail(3, "timer", "cancel", name)


# -- transactions ----------------------------------------------------------------------------------


def states(group: str) -> dict[str, str]:
    """The listed transactions: state by body."""
    rows = succeed("transaction", "list", "--group", group, "--json").json()
    assert {row["group"] for row in rows} <= {group}
    return {row["body"]: row["state"] for row in rows}


@pytest.mark.slow
def test_a_transaction_waits_is_discarded_and_resumed(mq: Embedded, topic: str) -> None:
    group = f"shop_{topic}"
    decisions: dict[bytes, bool | None] = {}

    async def decide(message: library.ReceivedMessage) -> bool | None:
        return decisions.get(message.body)

    with blocking.Producer(group, nameserver=mq.nameserver, on_check=decide) as producer:
        with suppress(BrokerError), producer.transaction(topic) as transaction:
            transaction.send(Message(topic, b"order 7"))
            wait_until(lambda: states(group).get("order 7") == "discarded")
        (row,) = succeed("transaction", "list", "--group", group, "--json").json()
        assert (row["topic"], row["checks"]) == (topic, 1)
        decisions[b"order 7"] = True
        record = succeed("transaction", "resume", row["id"], "--json").json()
        assert record == {"resumed": row["id"], "message_id": row["message_id"]}
        assert succeed("consume", topic, "--follow", "--max", "1").stdout == "order 7\n"
        assert states(group) == {}
        assert "was resumed before" in fail(1, "transaction", "resume", row["id"])


@pytest.mark.slow
def test_open_transactions_are_listed(mq: Embedded, topic: str) -> None:
    succeed("broker", "config", "set", "transactionCheckMax=1000")
    with blocking.Producer("clerks", nameserver=mq.nameserver) as producer:
        with producer.transaction(topic) as transaction:
            transaction.send(Message(topic, b"order 8", key="8"))
            wait_until(lambda: states("clerks") == {"order 8": "open"})
            outcome = succeed("transaction", "list")
            assert [row[:3] for row in outcome.rows()] == [["clerks", topic, "open"]]
            assert outcome.stderr == "1 open transaction\n"
            assert states("others") == {}
            transaction.send(Message(topic, b"order 9", key="9"))
            wait_until(lambda: states("clerks") == {"order 8": "open", "order 9": "open"})
            cut = succeed("transaction", "list", "--max", "1", "--json")
            assert "only the oldest 1 open transactions are listed" in cut.stderr
        assert states("clerks") == {}
    succeed("broker", "config", "set", "transactionCheckMax=1")
    assert succeed("transaction", "list").stderr == "all transactions are decided\n"
    for name in ("0" * 32, "nonsense"):
        assert "not the id of a discarded" in fail(3, "transaction", "resume", name)
