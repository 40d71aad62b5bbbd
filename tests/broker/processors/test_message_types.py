"""enforceMessageType=true: a topic takes messages of its ``message.type`` only."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace_broker.processors.message_types import kind_of
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.message import encode_batch, encode_properties
from tests.support.batches import block
from tests.support.broker import BrokerUnderTest, broker_config
from tests.support.wire import bulk_send_header, send_header

UNIQ_KEY = "UNIQ_KEY\x017F00000133E730946E0967FBFA710001\x02"
# Properties of a message of each kind.
MARKS = {
    "NORMAL": "TAGS\x01a\x02",
    "FIFO": "__SHARDINGKEY\x010\x02",
    "DELAY": "DELAY\x013\x02",
    "TRANSACTION": "TRAN_MSG\x01true\x02PGROUP\x01g\x02",
}
ALL = ["UNSPECIFIED", "MIXED", None]


@pytest.fixture
def broker(tmp_path: Path) -> BrokerUnderTest:
    return with_topic(tmp_path, "NORMAL")


def with_topic(folder: Path, kind: str | None, *, is_enforced: bool = True) -> BrokerUnderTest:
    config = broker_config(folder, enforce_message_type=is_enforced)
    broker = BrokerUnderTest(folder, config, commit_log_file_bytes=1 << 16)
    broker.create_topic("T", attributes={} if kind is None else {"message.type": kind})
    return broker


@pytest.mark.parametrize(
    ("properties", "kind"),
    [
        ("", "NORMAL"),
        (UNIQ_KEY, "NORMAL"),
        *((UNIQ_KEY + mark, kind) for kind, mark in MARKS.items()),
        *((mark.removesuffix("\x02"), kind) for kind, mark in MARKS.items()),
        *((f"{name}\x0199\x02", "DELAY") for name in ("TIMER_DELIVER_MS", "TIMER_DELAY_SEC")),
        ("TIMER_DELAY_MS\x019\x02", "DELAY"),
        ("DELAY\x010\x02TRAN_MSG\x01false\x02__SHARDINGKEY\x01\x02", "NORMAL"),
        ("xDELAY\x013\x02a\x01DELAY\x02", "NORMAL"),
        (MARKS["FIFO"] + MARKS["DELAY"], "DELAY"),
        (MARKS["FIFO"] + MARKS["DELAY"] + MARKS["TRANSACTION"], "TRANSACTION"),
    ],
)
def test_properties_tell_the_kind(properties: str, kind: str) -> None:
    assert kind_of(properties) == kind


@pytest.mark.parametrize("wanted", [*MARKS, *ALL])
@pytest.mark.parametrize("kind", MARKS)
def test_a_topic_takes_messages_of_its_type(tmp_path: Path, wanted: str | None, kind: str) -> None:
    """Singly and in a turn with others; a refusal names both kinds."""
    broker = with_topic(tmp_path, wanted)
    for count in (1, 2):
        answers = broker.send_at_once(*[UNIQ_KEY + MARKS[kind]] * count)
        if wanted in {*ALL, kind}:
            assert answers == [(0, "")] * count
            continue
        for code, remark in answers:
            assert code == ResponseCode.MESSAGE_ILLEGAL
            assert f"takes {wanted} messages" in remark
            assert f"a {kind} one" in remark
        assert broker.store.commit_log.max_offset == 0


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("properties", "code"),
    [
        ("KEYS\x014711\x02", 0),
        ("KEYS\x01\x02", 13),
        ("xKEYS\x014711\x02", 13),
        ("KEYS\x014711\x02" + MARKS["DELAY"], 13),
    ],
)
def test_a_topic_in_order_takes_messages_with_a_key(
    tmp_path: Path, properties: str, code: int, count: int
) -> None:
    answers = with_topic(tmp_path, "FIFO").send_at_once(*[UNIQ_KEY + properties] * count)
    assert [answer[0] for answer in answers] == [code] * count


@pytest.mark.parametrize("kind", MARKS)
def test_without_the_setting_a_topic_takes_all(tmp_path: Path, kind: str) -> None:
    broker = with_topic(tmp_path, "FIFO", is_enforced=False)
    assert broker.send_at_once(UNIQ_KEY + MARKS[kind]) == [(0, "")]


def test_a_type_that_changes_holds_for_the_next_message(broker: BrokerUnderTest) -> None:
    assert broker.send_at_once(UNIQ_KEY) == [(0, "")]
    broker.create_topic("T", attributes={"message.type": "FIFO"})
    ((code, _),) = broker.send_at_once(UNIQ_KEY)
    assert code == ResponseCode.MESSAGE_ILLEGAL


@pytest.mark.parametrize(("second", "code"), [("", 0), ("__SHARDINGKEY", 13)])
def test_a_batch_with_a_message_of_another_kind_is_refused(
    broker: BrokerUnderTest, second: str, code: int
) -> None:
    properties = encode_properties({second: "k"} if second else {})
    body = encode_batch([(0, b"a", b""), (0, b"b", properties)])
    header = send_header(batch=True)
    assert broker.ask(RequestCode.SEND_BATCH_MESSAGE, header, body).code == code
    bulk = bytes(block(b"a", properties=properties).body)
    assert broker.ask(RequestCode.BULK_SEND, bulk_send_header(count=1), bulk).code == code
    assert len(broker.stored()) == (3 if code == 0 else 0)
