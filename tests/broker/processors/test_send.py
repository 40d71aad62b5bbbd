"""Sends that come at once are stored and answered as each alone would be."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.header_codecs import SerializeType, encode_frame
from headrace_protocol.message import encode_batch
from headrace_protocol.system_topics import HALF_TOPIC, SCHEDULE_TOPIC
from tests.support.broker import BrokerUnderTest, broker_config
from tests.support.channel import MemoryChannel
from tests.support.running import in_background
from tests.support.stores import FaultyFiles
from tests.support.until import until

UNIQ_KEYS = st.sampled_from(["7F00000133E730946E0967FBFA710001", "A", "no letters", "é", ""])
BEFORE = st.lists(
    st.sampled_from(["KEYS\x01k1", "KEYS\x01k1 k2", "a\x01b", "TAGS\x01T1", "nothing", "x\x01"]),
    max_size=2,
)
AFTER = st.lists(
    st.sampled_from(
        [
            "WAIT\x01true",
            "WAIT\x01false",
            "TAGS\x01T1",
            "TAGS\x01T2",
            "CLUSTER\x01elsewhere",
            "__CRC32#\x010123456789",
            "TRACE_ON\x01false",
            "DELAY\x010",
            "DELAY\x013",
            "TRAN_MSG\x01true",
            "UNIQ_KEY\x01twice",
            "user\x01value",
            "ключ\x01значение",
        ]
    ),
    max_size=3,
)


@st.composite
def properties(draw: st.DrawFn) -> str:
    items = draw(BEFORE)
    if uniq_key := draw(UNIQ_KEYS):
        items.append(f"UNIQ_KEY\x01{uniq_key}")
    items += draw(AFTER)
    return "\x02".join(items) + draw(st.sampled_from(["", "\x02"]))


MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "b": st.sampled_from(["T", "T", "T", "Other"]),
            "e": st.sampled_from([0, 1, 3, 7, -1]),
            "f": st.sampled_from([0, 0, 0, 1, 8]),
            "h": st.sampled_from([0, 5, -1]),
            "i": properties(),
            "j": st.sampled_from([0, 2, None]),
            "body": st.sampled_from([b"", b"body", b"x" * 3000, b"x" * 70_000]),
        }
    ),
    min_size=1,
    max_size=12,
)


@st.composite
def half_properties(draw: st.DrawFn) -> str:
    """Most are of a few layouts, so that most layouts come several times."""
    keys = draw(st.sampled_from(["", "KEYS\x01k1\x02", "KEYS\x01k2\x02"]))
    start = draw(
        st.sampled_from(
            ["TRAN_MSG\x01true\x02"] * 8 + ["TRAN_MSG\x01false\x02", "", "MY_UNIQ_KEY\x01x\x02"]
        )
    )
    uniq_key = draw(st.sampled_from(["A", "B", "7F00000133E730946E0967FBFA710001", "é", "a\x01b"]))
    tail = draw(st.sampled_from(["WAIT\x01true\x02", "", "TAGS\x01T1\x02"]))
    odd = [
        "DELAY\x013\x02",
        "UNIQ_KEY\x01C\x02",
        "REAL_TOPIC\x01x\x02",
        "WAIT\x01false\x02",
        "x\x01\x00\x02",
    ]
    tail += draw(st.sampled_from([""] * 10 + odd))
    tail += draw(st.sampled_from(["PGROUP\x01g\x02"] * 8 + ["PGROUP\x01g", ""]))
    return f"{keys}{start}UNIQ_KEY\x01{uniq_key}\x02{tail}"


HALVES = st.lists(
    st.fixed_dictionaries(
        {
            "b": st.just("T"),
            "e": st.sampled_from([0, 0, 0, 1]),
            "f": st.sampled_from([4, 4, 4, 4, 0, 5, 12]),
            "h": st.sampled_from([0, 5]),
            "i": half_properties(),
            "j": st.sampled_from([0, 0, 0, 0, 2]),
            "body": st.sampled_from([b"body", b"body", b"x" * 3000, b""]),
        }
    ),
    min_size=4,
    max_size=16,
)


def frame(message: dict[str, Any], opaque: int) -> bytes:
    fields = {"a": "group", "c": "TBW102", "d": 4, "g": 1_700_000_000_000 + opaque, **message}
    body = fields.pop("body")
    sent = encode_frame(
        SerializeType.JSON,
        RequestCode.SEND_MESSAGE_V2,
        opaque,
        fields={name: value for name, value in fields.items() if value is not None},
        body_bytes=len(body),
    )
    return sent + body


def outcome(messages: list[dict[str, Any]], *, at_once: bool) -> tuple[object, ...]:
    """Answers by opaque, and what the log holds, when messages are sent at once or one by one."""
    with tempfile.TemporaryDirectory() as folder:
        broker = BrokerUnderTest(Path(folder), commit_log_file_bytes=1 << 17)
        channel = MemoryChannel()
        channel.is_greeted = at_once  # who is not is served one by one
        frames = [frame(message, opaque) for opaque, message in enumerate(messages)]
        if at_once:
            broker.take(b"".join(frames), channel)
        else:
            for sent in frames:
                channel.is_greeted = False
                broker.take(sent, channel)
        answers = {
            command.opaque: (command.code, command.remark, command.ext())
            for command, _ in channel.replies()
            if command.is_response
        }
        stored = [
            (
                message.topic,
                message.stored_body,
                message.raw_properties,
                message.flag,
                message.sys_flag,
                message.physical_offset,
            )
            for queue_id in range(8)
            for topic in ("T", "Other", HALF_TOPIC, SCHEDULE_TOPIC)
            for message in broker.stored(topic, queue_id)
        ]
        puts = broker.statistics.puts
        broker.close()
    assert not broker.unexpected
    return answers, stored, puts.count, puts.body_bytes


@pytest.mark.slow
@settings(max_examples=60)
@given(MESSAGES)
def test_sends_at_once_are_as_sends_one_by_one(messages: list[dict[str, Any]]) -> None:
    # Where the broker chooses, it chooses by chance.
    chosen = [
        {**message, "e": max(message["e"], 0)} for message in messages if "UNIQ_KEY" in message["i"]
    ]
    assert outcome(chosen, at_once=True) == outcome(chosen, at_once=False)


@pytest.mark.slow
@settings(max_examples=60)
@given(HALVES)
def test_halves_at_once_are_as_halves_one_by_one(messages: list[dict[str, Any]]) -> None:
    assert outcome(messages, at_once=True) == outcome(messages, at_once=False)


def test_a_message_without_room_is_refused_among_others(broker: BrokerUnderTest) -> None:
    channel = MemoryChannel()
    channel.is_greeted = True
    message = {"b": "T", "e": 0, "f": 0, "h": 0, "i": "UNIQ_KEY\x01A\x02"}
    too_large = b"x" * (broker.store.settings.body_bytes_max + 1)
    bodies = [b"first", b"second", too_large, b"third"]
    broker.take(
        b"".join(frame({**message, "body": body}, number) for number, body in enumerate(bodies)),
        channel,
    )
    codes = {
        command.opaque: command.code for command, _ in channel.replies() if command.is_response
    }
    assert codes == {
        0: ResponseCode.SUCCESS,
        1: ResponseCode.SUCCESS,
        2: ResponseCode.MESSAGE_ILLEGAL,
        3: ResponseCode.SUCCESS,
    }
    stored = broker.stored("T", 0)
    assert [message.body for message in stored] == [b"first", b"second", b"third"]


@pytest.mark.parametrize("batch", [False, True])
async def test_with_sync_flush_an_answer_waits_for_the_disk_unless_the_message_says_no(
    batch: bool, tmp_path: Path
) -> None:
    config = broker_config(tmp_path, flush_disk_type="SYNC_FLUSH")
    broker = BrokerUnderTest(tmp_path, config, flush="sync")
    channel = MemoryChannel()
    message = {"b": "T", "e": 0, "f": 0, "h": 0, "m": batch}
    body = encode_batch([(0, b"one", b""), (0, b"two", b"")]) if batch else b"one"
    for opaque, wait in enumerate(["", "WAIT\x01true\x02", "WAIT\x01false\x02"]):
        broker.take(
            frame({**message, "i": f"UNIQ_KEY\x01A\x02{wait}", "body": body}, opaque), channel
        )
    assert [command.opaque for command, _ in channel.replies() if command.is_response] == [2]
    queue = broker.store.queue("T", 0)
    assert broker.store.source(queue).max_offset() == 0  # nor does anybody read what is not on disk
    async with in_background(broker.store.flusher.run_group_commit):
        await until(lambda: bool(channel.written))
    broker.store.write_path.publish()
    assert [command.opaque for command, _ in channel.replies()] == [0, 1]
    assert broker.store.source(queue).max_offset() == (6 if batch else 3)


async def test_with_sync_flush_a_failed_one_is_told(tmp_path: Path) -> None:
    config, disk = broker_config(tmp_path, flush_disk_type="SYNC_FLUSH"), FaultyFiles()
    broker = BrokerUnderTest(tmp_path, config, flush="sync", files=disk)
    channel = MemoryChannel()
    # The first one is served by itself, as its topic is new; then those that come at once.
    fields = {"b": "T", "e": 0, "f": 0, "h": 0, "i": "UNIQ_KEY\x01A\x02", "body": b"one"}
    broker.take(frame(fields, 0), channel)
    broker.take(frame(fields, 1) + frame(fields, 2), channel)
    assert [command for command, _ in channel.replies() if command.is_response] == []
    disk.is_broken = True
    async with in_background(broker.store.flusher.run_group_commit):
        await until(lambda: bool(channel.written))
    answers = [command for command, _ in channel.replies()]
    assert [(each.opaque, each.code, each.remark) for each in answers] == [
        (opaque, ResponseCode.FLUSH_DISK_TIMEOUT, "stored, but not known to be on disk")
        for opaque in range(3)
    ]
    assert {each.ext()["transactionId"] for each in answers} == {"A"}
