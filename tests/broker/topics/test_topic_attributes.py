"""Changes of topic attributes."""

from __future__ import annotations

import pytest

from headrace_broker.topics.attributes import (
    CompactionPolicy,
    apply_changes,
    parse_changes,
    topic_limits,
)
from headrace_protocol.bodies import TopicConfig
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError


def test_changes_as_text() -> None:
    assert parse_changes("") == {}
    assert parse_changes("+a=1,-b,+c=x=y") == {"+a": "1", "-b": "", "+c": "x=y"}


@pytest.mark.parametrize("text", ["a=1", "-a=1", "a", "+a", "+a=1,+a=2", "+a=1,-a"])
def test_text_that_is_no_change(text: str) -> None:
    with pytest.raises(RequestError, match="topic attributes") as error:
        parse_changes(text)
    assert error.value.code == ResponseCode.INVALID_PARAMETER


def test_what_is_not_mentioned_stays() -> None:
    current = {"cleanup.policy": "DELETE", "message.type": "FIFO", "reserve.time": "5"}
    after = apply_changes(
        current, parse_changes("+message.type=NORMAL,-reserve.time"), is_new=False
    )
    assert after == {"cleanup.policy": "DELETE", "message.type": "NORMAL"}
    assert current["message.type"] == "FIFO"


@pytest.mark.parametrize(
    ("text", "is_new", "match"),
    [
        ("+colour=red", True, "unknown key 'colour': known are queue.type"),
        ("+cleanup.policy=SHRINK", True, "this broker accepts DELETE | COMPACTION"),
        ("+cleanup.policy=COMPACTION", False, "can't change after a topic's creation"),
        ("+cleanup.policy=COMPACTION,+reserve.time=5", True, "with cleanup.policy=DELETE"),
        ("+key.queue=java", True, "'key.queue' is for topics with cleanup.policy=COMPACTION"),
        ("+delete.retention.ms=-1", True, "a number of milliseconds from 0 to 92233"),
        ("+key.queue=python", True, "any | java | headrace"),
        ("+queue.type=RocksDBCQ", True, "this broker accepts SimpleCQ | BatchCQ"),
        ("+queue.type=BatchCQ", False, "can't change after a topic's creation"),
        ("+queue.type=BatchCQ,+tiered=true", True, "leave one of them out"),
        ("+cleanup.policy=DELETE", False, "can't change after a topic's creation"),
        ("-message.type", True, "a new topic has nothing to delete"),
        ("+message.type=OTHER", True, "UNSPECIFIED | NORMAL"),
        ("+reserve.time=long", True, "a number of hours from 1 on, or -1"),
        ("+reserve.time=9223372036854775808", True, "a number of hours from 1 on, or -1"),
        ("+reserve.time=0", True, "a number of hours from 1 on, or -1"),
        ("+reserve.size=-2", True, "a number of bytes from 1 on, or -1"),
        (
            "+cleanup.policy=COMPACTION,+min.compaction.lag.ms=3600001",
            True,
            "=3600001 is more than max.compaction.lag.ms=3600000, its default: lower the first or",
        ),
        (
            "+cleanup.policy=COMPACTION,+min.compaction.lag.ms=5,+max.compaction.lag.ms=4",
            True,
            "min.compaction.lag.ms=5 is more than max.compaction.lag.ms=4: lower the first",
        ),
    ],
)
def test_changes_that_are_refused(text: str, is_new: bool, match: str) -> None:
    with pytest.raises(RequestError) as error:
        apply_changes({}, parse_changes(text), is_new=is_new)
    assert match in error.value.remark


def test_keys_without_a_sign_come_from_a_body() -> None:
    with pytest.raises(RequestError, match=r"the key must begin with \+ or -"):
        apply_changes({}, {"message.type": "NORMAL"}, is_new=True)


def test_how_a_topic_is_compacted() -> None:
    text = "+cleanup.policy=COMPACTION,+min.compaction.lag.ms=5,+key.queue=java"
    attributes = apply_changes({}, parse_changes(text), is_new=True)
    topic = TopicConfig(topic_name="T", attributes=attributes)
    assert CompactionPolicy.of(topic) == CompactionPolicy(86_400_000, 5, 3_600_000, "java")
    assert CompactionPolicy.of(TopicConfig(topic_name="T")) is None
    # As another broker may have written it.
    attributes |= {"max.compaction.lag.ms": "soon", "reserve.time": "5"}
    assert CompactionPolicy.of(topic) == CompactionPolicy(86_400_000, 5, 3_600_000, "java")
    assert not topic_limits([topic])
    attributes |= {"max.compaction.lag.ms": "4"}
    assert CompactionPolicy.of(topic) == CompactionPolicy(86_400_000, 5, 5, "java")
