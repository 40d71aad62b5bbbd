"""A few simulations, and proof that they notice what is wrong; ``make sim`` runs more."""

from __future__ import annotations

import pytest

from headrace.messages import ReceivedMessage
from headrace_protocol.bodies import MessageQueue
from headrace_protocol.message import decode_record, encode_record
from tests.simulation.simulation import Ledger, PromiseBroken, run

QUEUE = MessageQueue("Simulated", "broker-a", 0)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "restarts"), [(1, 0), (7, 1), (5, 2)])
def test_what_is_acknowledged_is_consumed_in_order(seed: int, restarts: int) -> None:
    result = run(seed)
    assert result.sent // 2 < result.acked <= result.consumed <= result.sent
    assert result.broken_connections > 0
    assert result.restarts == restarts


def message(queue_offset: int, body: bytes) -> ReceivedMessage:
    key = body.split(b"/")[0]
    record = encode_record(
        topic="Simulated",
        queue_id=0,
        body=body,
        queue_offset=queue_offset,
        properties=b"KEYS\x01" + key + b"\x02",
    )
    return ReceivedMessage.from_stored(decode_record(record), QUEUE.broker_name)


def ledger(*messages: ReceivedMessage) -> Ledger:
    ledger = Ledger()
    for each in messages:
        ledger.received(each)
    return ledger


def test_doubles_and_repeats_are_fine() -> None:
    ledger(
        message(0, b"k/0"), message(1, b"k/1"), message(0, b"k/0"), message(2, b"k/1"),
        message(3, b"other/0"), message(4, b"k/0"),
    ).check_order()  # fmt: skip


def test_a_mixed_up_queue_is_noticed() -> None:
    with pytest.raises(PromiseBroken, match=r"order \[1, 0\]"):
        ledger(message(1, b"k/0"), message(0, b"k/1")).check_order()


def test_a_mixed_up_key_is_noticed() -> None:
    with pytest.raises(PromiseBroken, match="b'k/0' after number 1"):
        ledger(message(0, b"k/1"), message(1, b"k/0")).check_order()
