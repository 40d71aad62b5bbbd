"""Transactions between two records: a decision or a second chance counts once the log says so."""

from __future__ import annotations

from pathlib import Path

from headrace_broker.store.write.confirmation import Gate
from headrace_protocol.admin_headers import ResumeCheckHalfMessageHeader
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.message import TRANSACTION_COMMIT as COMMIT
from headrace_protocol.message import TRANSACTION_ROLLBACK as ROLLBACK
from headrace_protocol.system_topics import CHECK_MAX_TIME_TOPIC
from tests.support.channel import MemoryChannel
from tests.support.ledger import Ledger
from tests.support.stores import crash


async def test_a_rollback_succeeds_only_once_the_log_says_so(ledger: Ledger) -> None:
    async with ledger.running():
        half = ledger.send(b"dropped")
        ledger.transactions.is_naming = True  # somebody else writes the op records, later
        for _ in range(2):
            assert ledger.end(half, ROLLBACK).code == ResponseCode.SYSTEM_BUSY
        ledger.transactions.is_naming = False
        assert ledger.end(half, ROLLBACK).code == ResponseCode.SUCCESS
        assert ledger.named() == [0]


async def test_a_discarded_half_is_resumed_once_before_it_is_indexed(
    ledger: Ledger, autojump_clock: object
) -> None:
    store, channel = ledger.broker.store, MemoryChannel()
    ledger.broker.config.transaction_check_max = 0
    async with ledger.running():
        ledger.send(b"forgotten")
        await ledger.check_later()
        (discarded,) = ledger.stored(CHECK_MAX_TIME_TOPIC, 0)
        end = store.commit_log.max_offset
        shut = Gate(lambda: end, lambda: None, lambda _end, _callback: None)
        store.write_path.confirmation.add(shut)
        header = ResumeCheckHalfMessageHeader(msg_id=discarded.offset_message_id)
        for _ in range(2):
            ledger.broker.send(RequestCode.RESUME_CHECK_HALF_MESSAGE, header, b"", channel)
        ((answer, _),) = channel.replies()  # the first waits for its gate
        assert "was resumed before" in (answer.remark or "")


async def test_a_half_is_given_up_once_across_a_kill(
    ledger: Ledger, tmp_path: Path, autojump_clock: object
) -> None:
    ledger.broker.store_message("U", 0)  # at the offset that stands for none
    half = ledger.send(b"forgotten")
    ledger.broker.config.transaction_check_max = 0
    await ledger.check_later()  # and no task writes the op record
    assert ledger.bodies(CHECK_MAX_TIME_TOPIC, 0) == [b"forgotten"]
    assert ledger.named() == []
    crash(ledger.broker.store)
    again = Ledger(tmp_path, ledger.clock.ms)
    again.broker.config.transaction_check_max = 0
    async with again.running():
        await again.check_later()
        assert again.end(half, COMMIT).code == ResponseCode.ILLEGAL_OPERATION
        assert again.named() == [0]
    assert again.bodies(CHECK_MAX_TIME_TOPIC, 0) == [b"forgotten"]
    assert again.bodies() == []
