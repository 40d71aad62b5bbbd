"""Recorded requests of clients and mqadmin, sent again: the answers must say the same."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest

from headrace_protocol import fastjson
from headrace_protocol.codes import RequestCode, ResponseCode
from tests.support.broker import Answer, BrokerUnderTest
from tests.support.channel import MemoryChannel
from tests.support.golden_frames import GoldenFrame, golden_frames

# Requests that change only tables, so that the recorded run can be repeated without its messages.
REPLAYED = {
    RequestCode.QUERY_CONSUMER_OFFSET,
    RequestCode.UPDATE_CONSUMER_OFFSET,
    RequestCode.UPDATE_AND_CREATE_TOPIC,
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP,
    RequestCode.GET_MAX_OFFSET,
    RequestCode.GET_MIN_OFFSET,
    RequestCode.HEART_BEAT,
    RequestCode.UNREGISTER_CLIENT,
    RequestCode.GET_CONSUMER_LIST_BY_GROUP,
    RequestCode.LOCK_BATCH_MQ,
    RequestCode.UNLOCK_BATCH_MQ,
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
    RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
    RequestCode.GET_TOPIC_STATS_INFO,
    RequestCode.GET_CONSUMER_CONNECTION_LIST,
    RequestCode.GET_CONSUME_STATS,
    RequestCode.DELETE_TOPIC_IN_BROKER,
    RequestCode.INVOKE_BROKER_TO_RESET_OFFSET,
    RequestCode.QUERY_TOPIC_CONSUME_BY_WHO,
    RequestCode.GET_TOPIC_CONFIG,
}
# What depends on the clock or on rates.
CLOCK_FIELDS = {"lastUpdateTimestamp", "lastTimestamp", "topicPutTps", "consumeTps", "dataVersion"}


def plain(value: Any) -> Any:
    """A body without what depends on the clock; lists that are sets come in any order."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if key not in CLOCK_FIELDS}
    if isinstance(value, list):
        return sorted(map(plain, value), key=repr)
    return value


def body_value(body: bytes) -> Any:
    return plain(fastjson.loads(body)) if body else None


def shown(code: int, ext: dict[str, str] | None, body: bytes) -> tuple[int, dict[str, str], Any]:
    """An answer as it is compared: without the fields that only our broker adds."""
    theirs = {name: value for name, value in (ext or {}).items() if name != "incarnation"}
    return code, theirs, body_value(body)


class Replay:
    """Asks our broker what the frames ask, a channel for each recorded connection."""

    def __init__(self, broker: BrokerUnderTest) -> None:
        self.broker = broker
        self.channels: defaultdict[int, MemoryChannel] = defaultdict(MemoryChannel)
        self.notices: list[tuple[int, str]] = []

    def ask(self, frame: GoldenFrame) -> Answer | None:
        channel = self.channels[frame.conn]
        self.broker.take(frame.data, channel)
        answer = None
        for conn, other in self.channels.items():
            for command, body in other.replies():
                if command.is_response:
                    assert (conn, command.opaque) == (frame.conn, frame.opaque)
                    answer = Answer(command, body)
                else:
                    self.notices.append((conn, command.ext()["consumerGroup"]))
        return answer

    def fill(self, topic: str, *counts: int) -> None:
        """Bring queues to as many messages as they had in the recorded run."""
        for queue_id, count in enumerate(counts):
            queue = self.broker.store.queue(topic, queue_id)
            while self.broker.store.source(queue).max_offset() < count:
                self.broker.store_message(topic, queue_id)


@pytest.fixture
def replay(broker: BrokerUnderTest) -> Replay:
    broker.clock.ms = 1_795_235_900_000
    return Replay(broker)


def answers() -> dict[tuple[int, int], GoldenFrame]:
    return {(f.conn, f.opaque): f for f in golden_frames() if f.response and f.dir == "s2c"}


def starts_at_zero(frame: GoldenFrame, expected: GoldenFrame, answer: Answer) -> bool:
    """True if a group without an offset gets 0 of an empty queue, where the peer answers 22.

    A client that then asks for the end loses what arrives between the two requests.
    """
    is_unknown = expected.code == ResponseCode.QUERY_NOT_FOUND
    is_query = frame.code == RequestCode.QUERY_CONSUMER_OFFSET
    return is_query and is_unknown and answer.command.ext() == {"offset": "0"}


def test_the_recorded_run(replay: Replay) -> None:
    recorded, compared = answers(), 0
    for frame in golden_frames():
        if frame.response or frame.dir != "c2s" or frame.code not in REPLAYED:
            continue
        prepare(replay, frame)
        answer = replay.ask(frame)
        if frame.oneway:
            assert answer is None
            continue
        expected = recorded[frame.conn, frame.opaque]
        assert answer is not None, frame.label
        if starts_at_zero(frame, expected, answer):
            continue
        assert shown(answer.code, answer.command.ext(), answer.body) == shown(
            expected.code, expected.ext, expected.body
        ), (frame.seq, frame.label, frame.name, answer.remark)
        compared += 1
    assert compared == 146
    golden = [
        (f.conn, (f.ext or {})["consumerGroup"])
        for f in golden_frames()
        if f.code == RequestCode.NOTIFY_CONSUMER_IDS_CHANGED
    ]
    # Ours also reports the end of a lock, so that the other members need not wait for it.
    extra = Counter(replay.notices) - Counter(golden)
    assert {group for _, group in extra} <= {"w_orderly"}
    remaining = iter(replay.notices)
    assert all(notice in remaining for notice in golden)


def prepare(replay: Replay, frame: GoldenFrame) -> None:
    """Do what other requests had done by then."""
    broker = replay.broker
    if frame.label == "lite":
        replay.fill("W_TOPIC", 4, 3)
    elif frame.label == "push-retry+binary" and frame.code == RequestCode.HEART_BEAT:
        replay.fill("%RETRY%w_push_retry", 1)
    elif frame.label.startswith("mqadmin topicStatus"):
        replay.fill("W_TOPIC", 8, 6)
    elif frame.code == RequestCode.QUERY_TOPIC_CONSUME_BY_WHO:
        broker.offsets.commit("w_pop", "W_TOPIC", 0, 1)
    elif frame.code == RequestCode.GET_CONSUME_STATS:
        broker.offsets.commit_pull("w_push", "W_TOPIC", 0, 8)
        broker.offsets.commit_pull("w_push", "W_TOPIC", 1, 6)
