"""Compacted topics with unusual messages, and with a policy that was changed by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace_protocol.codes import ResponseCode
from tests.broker.compaction.test_compaction_lookups import get, key
from tests.broker.compaction.test_compaction_source import (
    C,
    compact_when_due,
    create,
    follow,
    log_end,
    pull,
    read,
    start,
)
from tests.support.broker import BrokerUnderTest, broker_config
from tests.support.stores import SetClock

LONG_KEY = "k" * 32_000
LARGE_BODY = bytes(range(256)) * (4 << 12)
Sent = tuple[str, bytes]


def start_roomy(folder: Path) -> BrokerUnderTest:
    """A broker whose files have room for the largest message."""
    return BrokerUnderTest(folder, broker_config(folder), commit_log_file_bytes=1 << 24)


def table_of(broker: BrokerUnderTest) -> dict[str, bytes]:
    return {message.properties["KEYS"]: message.body for message in read(broker)}


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param([("a", b"%d" % number) for number in range(300)], id="one key only"),
        pytest.param([(f"k{number}", b"b") for number in range(300)], id="no key twice"),
        pytest.param([("a", b""), ("a", b"1"), ("b", b"2")], id="a marker first"),
        pytest.param([(LONG_KEY, b"1"), (LONG_KEY, b"2"), ("k", b"3")], id="a long key"),
        pytest.param([("a", LARGE_BODY), ("b", LARGE_BODY), ("a", LARGE_BODY)], id="4 MiB"),
    ],
)
def test_unusual_messages_are_compacted(tmp_path: Path, messages: Sequence[Sent]) -> None:
    broker = start_roomy(tmp_path)
    create(broker)
    broker.topics.saved.finish()
    for name, body in messages:
        broker.store_message(C, 0, body, KEYS=name)
    expected = dict(messages)
    follow(broker)
    compact_when_due(broker)
    for life in range(2):
        assert table_of(broker) == expected
        assert len(read(broker)) == len(expected)
        assert get(broker, *map(key, expected)) == [*expected.values()]
        broker.close()
        if not life:
            broker = start_roomy(tmp_path)


def change_by_hand(folder: Path, attributes: dict[str, str]) -> None:
    path = folder / "store/config/topics.json"
    config = json.loads(path.read_text())
    config["topicConfigTable"][C]["attributes"] = attributes
    path.write_text(json.dumps(config))


def test_a_policy_that_was_changed_by_hand_loses_no_message(tmp_path: Path) -> None:
    clock = SetClock()
    broker = start(tmp_path, clock=clock)
    broker.create_topic(C, 1)
    for number in range(30):
        broker.store_message(C, 0, b"%d" % number, **({"KEYS": "k"} if number % 3 else {}))
    broker.close()

    change_by_hand(tmp_path, {"cleanup.policy": "COMPACTION"})
    broker = start(tmp_path, clock=clock)
    follow(broker)
    assert log_end(broker) == 30
    compact_when_due(broker)
    # A message without a key stays: none replaces it.
    kept = [message.queue_offset for message in read(broker)]
    assert kept == [*range(0, 30, 3), 29]
    assert get(broker, key("k")) == [b"29"]
    broker.close()

    change_by_hand(tmp_path, {})
    broker = start(tmp_path, clock=clock)
    assert [message.queue_offset for message in read(broker)] == list(range(30))
    for number in range(30, 40):
        broker.store_message(C, 0, b"%d" % number)
    assert pull(broker, 35)[0] == ResponseCode.SUCCESS
    broker.close()

    change_by_hand(tmp_path, {"cleanup.policy": "COMPACTION"})
    broker = start(tmp_path, clock=clock)
    follow(broker)
    kept += range(30, 40)
    assert [message.queue_offset for message in read(broker)] == kept
    assert get(broker, key("k")) == [b"29"]
