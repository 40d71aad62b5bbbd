"""``headrace group dlq`` against a real broker: what is listed and replayed, and how often."""

from __future__ import annotations

from itertools import count
from unittest.mock import patch

import pytest

from headrace import Message, ReceivedMessage, blocking
from headrace.admin.dead_letters import REPLAY_GROUP, DeadLetters
from headrace.embedded import Embedded
from headrace.errors import ConnectionLost
from tests.support.cli import fail, headrace, succeed

pytestmark = pytest.mark.usefixtures("environment")


def group_of(topic: str) -> str:
    return f"G_{topic}"


def bury(mq: Embedded, topic: str, *bodies: str, retried: bool = False) -> None:
    """Have the topic's group give up messages with these bodies."""
    with blocking.Producer(nameserver=mq.nameserver) as producer:
        for body in bodies:
            message = Message(topic, body.encode(), key=f"k-{body}", tag="t", properties={"p": "1"})
            producer.send(message)
    reject(mq, topic, *bodies, retried=retried)


def reject(mq: Embedded, topic: str, *bodies: str, retried: bool = False) -> None:
    waiting = set(bodies)
    with blocking.Consumer(group_of(topic), topic, nameserver=mq.nameserver) as consumer:
        for message in consumer:
            if retried and not message.reconsume_times:
                message.retry(after=1)
                continue
            message.reject()
            waiting.discard(message.body.decode())
            if not waiting:
                break


def read(mq: Embedded, topic: str) -> list[ReceivedMessage]:
    """All messages of a topic, in no particular order."""
    with blocking.PullConsumer(nameserver=mq.nameserver) as consumer:
        queues = consumer.queues(topic)
        ends = {queue: consumer.max_offset(queue) for queue in queues}
        consumer.assign(queue for queue in queues if ends[queue])
        messages: list[ReceivedMessage] = []
        while len(messages) < sum(ends.values()):
            messages += consumer.receive_many(timeout_ms=5000) or ()
    return messages


def bodies_of(mq: Embedded, topic: str) -> list[str]:
    return sorted(message.body.decode() for message in read(mq, topic))


def dlq(command: str, topic: str, *arguments: str) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = succeed(
        "group", "dlq", command, group_of(topic), *arguments, "--json"
    ).json()
    return rows


def test_dead_letters_are_listed(mq: Embedded, topic: str) -> None:
    bury(mq, topic, "one", "two", "three")
    letters = dlq("list", topic)
    assert [letter["body"] for letter in letters] == ["one", "two", "three"]
    assert {(letter["topic"], letter["tag"]) for letter in letters} == {(topic, "t")}
    assert [letter["body"] for letter in dlq("list", topic, "--max", "2")] == ["one", "two"]
    since = letters[1]["store_time"]
    expected = [each["body"] for each in letters if each["store_time"] >= since]
    assert [letter["body"] for letter in dlq("list", topic, "--from", since)] == expected
    table = succeed("group", "dlq", "list", group_of(topic)).rows()
    assert [row[0] for row in table] == [topic] * 3


def test_a_replay_sends_each_dead_letter_once(mq: Embedded, topic: str) -> None:
    bury(mq, topic, "one", "two")
    planned = dlq("replay", topic, "--dry-run")
    assert [(row["to"], row["body"]) for row in planned] == [(topic, "one"), (topic, "two")]
    assert bodies_of(mq, topic) == ["one", "two"], "nothing is sent yet"
    assert dlq("replay", topic) == planned
    assert dlq("replay", topic) == []
    assert bodies_of(mq, topic) == ["one", "one", "two", "two"]
    bury(mq, topic, "three")
    assert [row["body"] for row in dlq("replay", topic, "--dry-run")] == ["one", "two", "three"], (
        "what was sent again has been given up again"
    )


def test_a_replayed_message_is_as_it_was_sent(mq: Embedded, topic: str) -> None:
    bury(mq, topic, "one", retried=True)
    (letter,) = read(mq, f"%DLQ%{group_of(topic)}")
    assert letter.reconsume_times == 2
    dlq("replay", topic)
    first, again = sorted(read(mq, topic), key=lambda message: message.store_timestamp_ms)
    assert (again.body, again.key, again.tag) == (b"one", "k-one", "t")
    assert again.properties == first.properties == {"p": "1"}
    assert again.reconsume_times == 0
    assert again.message_id == first.message_id
    assert again.born_timestamp_ms == first.born_timestamp_ms
    added = again.system_properties.keys() - first.system_properties.keys()
    assert added == {"DLQ_ORIGIN_MESSAGE_ID", "RETRY_TOPIC"}
    reject(mq, topic, "one")
    assert [row["body"] for row in dlq("replay", topic)] == ["one"], "it may fail once more"


def test_an_interrupted_replay_continues(mq: Embedded, topic: str) -> None:
    names = [str(number) for number in range(6)]
    bury(mq, topic, *names)
    replay, commit = DeadLetters.replay, DeadLetters.commit
    lost = ConnectionLost("broker", "cut")
    calls = count()

    async def replay_or_lose(self: DeadLetters, letter: ReceivedMessage, target: str) -> None:
        """Neither the request nor the answer arrives, in turn."""
        number = next(calls)
        if number % 3 == 1:
            raise lost
        await replay(self, letter, target)
        if number % 3 == 2:
            raise lost

    async def commit_or_lose(self: DeadLetters, letter: ReceivedMessage) -> None:
        if next(calls) % 4 == 3:
            raise lost
        await commit(self, letter)

    attempts = 0
    with (
        patch.object(DeadLetters, "replay", replay_or_lose),
        patch.object(DeadLetters, "commit", commit_or_lose),
    ):
        while True:
            attempts += 1
            if headrace("group", "dlq", "replay", group_of(topic)).exit_code == 0:
                break
    assert attempts > 3
    assert bodies_of(mq, topic) == sorted(names * 2)


def test_one_dead_letter_is_replayed_once(mq: Embedded, topic: str) -> None:
    bury(mq, topic, "one", "two", "three")
    second = dlq("list", topic)[1]
    rows = dlq("replay", topic, "--message", second["offset_message_id"])
    assert [row["body"] for row in rows] == ["two"]
    assert dlq("replay", topic, "--message", second["message_id"]) == []
    assert [row["body"] for row in dlq("replay", topic)] == ["one", "three"]
    assert bodies_of(mq, topic) == sorted(["one", "two", "three"] * 2)
    text = fail(3, "group", "dlq", "replay", group_of(topic), "--message", "0" * 32)
    assert f"group {group_of(topic)} has no dead letter 000" in text


def test_a_replay_since_a_time_passes_over_older_ones(mq: Embedded, topic: str) -> None:
    bury(mq, topic, "old")
    bury(mq, topic, "new")
    since = dlq("list", topic)[1]["store_time"]
    assert [row["body"] for row in dlq("replay", topic, "--since", since)] == ["new"]
    assert dlq("replay", topic) == []
    letters = f"%DLQ%{group_of(topic)}"
    succeed("group", "reset", REPLAY_GROUP, letters, "--to", "earliest")
    assert [row["body"] for row in dlq("replay", topic)] == ["old"], "the other one is there"


def test_a_replay_to_another_topic(mq: Embedded, topic: str) -> None:
    other = f"{topic}_other"
    succeed("topic", "create", other)
    bury(mq, topic, "one")
    assert [row["to"] for row in dlq("replay", topic, "--to", other)] == [other]
    (message,) = read(mq, other)
    assert (message.topic, message.body) == (other, b"one")
    assert bodies_of(mq, topic) == ["one"]


def test_compressed_and_nameless_messages_are_replayed(mq: Embedded, topic: str) -> None:
    with blocking.Producer(nameserver=mq.nameserver) as producer:
        producer.send(Message(topic, b"x" * 10_000))
        producer.send_many([b"bulk"], topic=topic)
    reject(mq, topic, "x" * 10_000, "bulk")
    assert len(dlq("replay", topic)) == 2
    assert dlq("replay", topic) == []
    assert bodies_of(mq, topic) == ["bulk", "bulk", "x" * 10_000, "x" * 10_000]


def test_groups_without_dead_letters(mq: Embedded, topic: str) -> None:
    with blocking.Consumer(group_of(topic), topic, nameserver=mq.nameserver):
        pass
    for command in ("list", "replay"):
        assert dlq(command, topic) == []
        outcome = succeed("group", "dlq", command, group_of(topic))
        assert "no dead letters" in outcome.stderr
        assert "does not exist" in fail(3, "group", "dlq", command, "nobody")


def test_wrong_usage(topic: str) -> None:
    group = group_of(topic)
    assert "combined" in fail(2, "group", "dlq", "replay", group, "--message", "x", "--since", "2h")
    assert "not a time" in fail(2, "group", "dlq", "list", group, "--from", "noon")
    assert "not a valid topic" in fail(2, "group", "dlq", "replay", group, "--to", "a b")
