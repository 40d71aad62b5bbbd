"""Transactions: each half is decided once, its message is neither lost nor stored twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing

from headrace_broker.inner.delivery import REASON
from headrace_broker.transaction.halves import Decision
from headrace_daemon.host_log import LINES_MAX
from headrace_protocol.admin_headers import ResumeCheckHalfMessageHeader
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.header_codecs import SerializeType, encode_frame
from headrace_protocol.message import (
    TRANSACTION_COMMIT,
    TRANSACTION_ROLLBACK,
    encode_batch,
    encode_properties,
)
from headrace_protocol.system_topics import (
    CHECK_MAX_TIME_TOPIC,
    HALF_TOPIC,
    OP_HALF_TOPIC,
    SCHEDULE_TOPIC,
    UNDELIVERED_TOPIC,
)
from headrace_protocol.waiting import at_once
from tests.support.channel import MemoryChannel
from tests.support.ledger import GROUP, Half, Ledger, checks
from tests.support.stores import FaultyFiles, crash

COMMIT, ROLLBACK, UNKNOWN = TRANSACTION_COMMIT, TRANSACTION_ROLLBACK, 0


# --- decisions -----------------------------------------------------------------------------


async def test_a_half_is_seen_once_it_is_committed_as_it_was_sent(ledger: Ledger) -> None:
    async with ledger.running():
        half = ledger.send(b"paid", TAGS="a", KEYS="k", own="x")
        assert half.transaction_id == "A1"
        assert ledger.bodies() == []
        assert ledger.end(half, COMMIT).code == ResponseCode.SUCCESS
    (message,) = ledger.stored()
    (waited,) = ledger.stored(HALF_TOPIC, 0)
    assert (message.body, message.topic, message.queue_id) == (b"paid", "T", 1)
    assert (message.flag, message.born_timestamp, message.sys_flag) == (5, 17, COMMIT)
    assert message.prepared_transaction_offset == waited.physical_offset == half.physical_offset
    expected = {"TAGS": "a", "KEYS": "k", "own": "x", "TRAN_MSG": "true", "PGROUP": GROUP}
    assert expected.items() <= message.properties.items()
    assert message.properties["__transactionId__"] == "A1"
    assert not {"REAL_TOPIC", "REAL_QID"} & message.properties.keys()
    assert waited.sys_flag == 0
    assert (waited.properties["REAL_TOPIC"], waited.properties["REAL_QID"]) == ("T", "1")
    (op,) = ledger.stored(OP_HALF_TOPIC, 0)
    assert (op.body, op.properties) == (b"0,", {"TAGS": "d"})


async def test_what_is_rolled_back_is_never_seen(ledger: Ledger) -> None:
    async with ledger.running():
        half = ledger.send(b"not paid")
        assert ledger.end(half, ROLLBACK).code == ResponseCode.SUCCESS
        ledger.join()
        await ledger.check_later()
    assert ledger.bodies() == []
    assert ledger.named() == [0]
    assert len(ledger.stored(HALF_TOPIC, 0)) == 1


async def test_unknown_changes_nothing(ledger: Ledger) -> None:
    async with ledger.running():
        half = ledger.send(b"maybe")
        assert ledger.end(half, UNKNOWN).code == ResponseCode.SUCCESS
        assert ledger.bodies() == []
        assert ledger.end(half, COMMIT).code == ResponseCode.SUCCESS
    assert ledger.bodies() == [b"maybe"]


async def test_the_first_decision_wins(ledger: Ledger) -> None:
    async with ledger.running():
        kept, dropped = ledger.send(b"kept"), ledger.send(b"dropped")
        answers = [
            ledger.end(kept, COMMIT).code,
            ledger.end(kept, COMMIT).code,
            ledger.end(kept, ROLLBACK).code,
            ledger.end(dropped, ROLLBACK).code,
            ledger.end(dropped, ROLLBACK).code,
            ledger.end(dropped, COMMIT).code,
        ]
    assert answers == [0, 0, 604, 0, 0, 604]
    assert ledger.bodies() == [b"kept"]
    assert ledger.named() == [0, 1]


@pytest.mark.parametrize(
    ("change", "remark"),
    [
        ({"producer_group": "stranger"}, "The producer group wrong"),
        ({"tran_state_table_offset": 7}, "The transaction state table offset wrong"),
        ({"commit_log_offset": 1}, "Find prepared transaction message failed"),
        ({"commit_log_offset": -1}, "Find prepared transaction message failed"),
        ({"commit_log_offset": 1 << 60}, "Find prepared transaction message failed"),
        ({"commit_or_rollback": 4}, "commitOrRollback=4"),
        ({"commit_or_rollback": -8}, "commitOrRollback=-8"),
    ],
)
async def test_a_decision_about_something_else_is_refused(
    ledger: Ledger, change: dict[str, Any], remark: str
) -> None:
    async with ledger.running():
        half = ledger.send(b"mine")
        answer = ledger.end(half, COMMIT, **change)
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert remark in answer.remark
        assert ledger.bodies() == []
        assert ledger.end(half, COMMIT).code == ResponseCode.SUCCESS


async def test_no_plain_message_is_committed(ledger: Ledger) -> None:
    async with ledger.running():
        physical_offset = ledger.broker.store_message("T", 1, b"plain", PGROUP=GROUP)
        answer = ledger.end(Half(0, physical_offset, "A1"), COMMIT)
    assert "Find prepared transaction message failed" in answer.remark
    assert ledger.bodies() == [b"plain"]


async def test_a_forged_destination_is_replaced(ledger: Ledger) -> None:
    async with ledger.running():
        half = ledger.send(
            b"x",
            REAL_TOPIC="U",
            REAL_QID="9",
            TRANSACTION_CHECK_TIMES="15",
            TRAN_PREPARED_QUEUE_OFFSET="0",
            __transactionId__="B",
        )
        ledger.end(half, COMMIT, topic="U")
    (message,) = ledger.stored()
    assert message.properties["__transactionId__"] == "A1"
    assert "TRANSACTION_CHECK_TIMES" not in message.properties


async def test_decisions_of_a_turn_share_an_op_record(ledger: Ledger) -> None:
    async with ledger.running():
        sent = [ledger.send(b"%d" % number) for number in range(3)]
        frames = b""
        for half in sent:
            fields = {
                "producerGroup": GROUP,
                "tranStateTableOffset": half.queue_offset,
                "commitLogOffset": half.physical_offset,
                "commitOrRollback": COMMIT,
                "msgId": half.transaction_id,
            }
            frames += encode_frame(
                SerializeType.JSON, RequestCode.END_TRANSACTION, 1, flag=2, fields=fields
            )
        ledger.broker.take(frames, MemoryChannel())
    assert ledger.bodies(OP_HALF_TOPIC, 0) == [b"0,1,2,"]
    ends = [message.physical_offset for message in ledger.stored()]
    (op,) = ledger.stored(OP_HALF_TOPIC, 0)
    assert op.physical_offset > max(ends)


async def test_op_records_have_a_largest_size(ledger: Ledger) -> None:
    ledger.broker.config.transaction_op_msg_max_size = 100
    async with ledger.running():
        for half in [ledger.send(b"%d" % number) for number in range(100)]:
            first = half.queue_offset
            ledger.transactions.ended(first, first, Decision.ROLLBACK)
        ledger.transactions.write_ops()
        ledger.broker.store.write_path.publish()
    bodies = ledger.bodies(OP_HALF_TOPIC, 0)
    assert max(map(len, bodies)) <= 100
    assert len(bodies) == 3
    assert ledger.named() == list(range(100))


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"properties": {"TRAN_MSG": "yes"}}, ResponseCode.MESSAGE_ILLEGAL),
        ({"properties": {"PGROUP": ""}}, ResponseCode.MESSAGE_ILLEGAL),
        ({"f": 12, "properties": {"TRAN_MSG": ""}}, ResponseCode.MESSAGE_ILLEGAL),
        ({"properties": {"DELAY": "x"}}, ResponseCode.MESSAGE_ILLEGAL),
    ],
)
def test_a_half_that_can_not_be_decided_is_refused(
    ledger: Ledger, fields: dict[str, Any], code: int
) -> None:
    assert ledger.answer(b"x", **fields).code == code
    assert ledger.broker.store.commit_log.max_offset == 0


@pytest.mark.parametrize("taken", [0, 3])
def test_a_broker_may_take_no_transactions(ledger: Ledger, taken: int) -> None:
    for _ in range(taken):
        ledger.send(b"x")
    ledger.broker.config.reject_transaction_message = True
    answer = ledger.answer(b"x")
    assert answer.code == ResponseCode.NO_PERMISSION
    assert "rejectTransactionMessage" in answer.remark


def test_a_batch_with_a_half_is_refused_whole(ledger: Ledger) -> None:
    item = encode_properties({"UNIQ_KEY": "A1", "TRAN_MSG": "true", "PGROUP": GROUP})
    answer = ledger.answer(encode_batch([(0, b"x", item)]), m="true", f=0, i="")
    assert answer.code == ResponseCode.MESSAGE_ILLEGAL
    assert "item 1" in answer.remark


def test_a_committed_message_that_is_sent_back_is_no_half(ledger: Ledger) -> None:
    ledger.broker.join("g", "c", "T")
    ledger.broker.topics.create_retry_topic("g", 1)
    answer = ledger.answer(b"again", b="%RETRY%g", e=0, j=3, l=16, f=0)
    assert answer.code == ResponseCode.SUCCESS
    assert ledger.bodies("%RETRY%g", 0) == [b"again"]


@pytest.mark.parametrize(
    "delay", ["²", "9" * 5000, "-1", "+", "0", "000"], ids=lambda text: text[:4]
)
def test_no_delay_of_a_half_is_an_unexpected_error(ledger: Ledger, delay: str) -> None:
    answer = ledger.answer(b"x", j=1, properties={"DELAY": delay})
    assert answer.code in {ResponseCode.SUCCESS, ResponseCode.MESSAGE_ILLEGAL}
    assert ledger.broker.unexpected == 0
    assert bool(ledger.stored(HALF_TOPIC, 0)) is (answer.code == ResponseCode.SUCCESS)


@pytest.mark.parametrize("delay", ["3", "+3", "003"])
def test_a_retry_with_a_delay_is_no_half(ledger: Ledger, delay: str) -> None:
    assert ledger.answer(b"x", j=1, properties={"DELAY": delay}).code == ResponseCode.SUCCESS
    assert ledger.stored(HALF_TOPIC, 0) == []
    assert ledger.bodies(SCHEDULE_TOPIC, 2) == [b"x"]


# --- delay, and topics that are gone ---------------------------------------------------------


async def test_a_committed_message_with_a_delay_waits_then(
    ledger: Ledger, autojump_clock: trio.testing.MockClock
) -> None:
    async with ledger.running():
        half = ledger.send(b"late", DELAY="2")
        assert ledger.stored(SCHEDULE_TOPIC, 1) == []
        ledger.clock.ms += 60_000
        ledger.end(half, COMMIT)
        assert ledger.bodies() == []
        ledger.clock.ms += 5000
        await ledger.until(lambda: bool(ledger.bodies()))
    (waited,) = ledger.stored(SCHEDULE_TOPIC, 1)
    (message,) = ledger.stored()
    assert waited.prepared_transaction_offset == half.physical_offset
    assert message.body == b"late"


async def test_a_half_with_a_delay_does_not_count_as_delivered(
    ledger: Ledger, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with ledger.running():
        ledger.end(ledger.send(b"late", DELAY="2"), COMMIT)
    crash(ledger.broker.store)
    again = Ledger(tmp_path, ledger.clock.ms)
    async with again.running():
        again.clock.ms += 5000
        await again.until(lambda: again.bodies() == [b"late"])


async def test_a_message_to_a_deleted_topic_is_kept_with_the_reason(ledger: Ledger) -> None:
    async with ledger.running():
        half = ledger.send(b"paid")
        ledger.broker.topics.delete("T")
        assert ledger.end(half, COMMIT).code == ResponseCode.SUCCESS
    (message,) = ledger.stored(UNDELIVERED_TOPIC, 0)
    assert (message.body, message.sys_flag) == (b"paid", COMMIT)
    assert "topic[T] not exist" in message.properties[REASON]


# --- checks ----------------------------------------------------------------------------------


async def test_a_producer_that_says_nothing_is_asked(
    ledger: Ledger, autojump_clock: trio.testing.MockClock
) -> None:
    async with ledger.running():
        half = ledger.send(b"paid", KEYS="k")
        channel = ledger.join()
        await ledger.check_later(5)
        assert checks(channel) == []
        await ledger.check_later(1)
        (check,) = checks(channel)
        (op,) = ledger.stored(OP_HALF_TOPIC, 0)
        assert (op.body, op.properties) == (b"0,", {"TAGS": "d", "COPIED": "true"})
        assert (check.message.topic, check.message.queue_id) == ("T", 1)
        assert (check.message.body, check.message.flag) == (b"paid", 5)
        assert check.message.properties["TRANSACTION_CHECK_TIMES"] == "1"
        assert check.fields["topic"] == HALF_TOPIC
        assert check.fields["msgId"] == half.transaction_id
        assert check.half.queue_offset == check.message.queue_offset == 1
        assert check.half.physical_offset == check.message.physical_offset
        assert ledger.end(check.half, COMMIT).code == ResponseCode.SUCCESS
        await ledger.check_later()
        assert checks(channel) == []
    (message,) = ledger.stored()
    assert message.prepared_transaction_offset == check.half.physical_offset
    assert message.properties["TRANSACTION_CHECK_TIMES"] == "1"
    assert "TRAN_PREPARED_QUEUE_OFFSET" not in message.properties
    assert ledger.named() == [0, 1]


async def test_all_copies_are_one_transaction(
    ledger: Ledger, autojump_clock: trio.testing.MockClock
) -> None:
    async with ledger.running():
        first = ledger.send(b"paid")
        channel = ledger.join()
        copies = [first]
        for _ in range(3):
            await ledger.check_later()
            copies += [check.half for check in checks(channel)]
        assert len(set(copies)) == 4
        answers = [ledger.end(copies[1], COMMIT).code]
        answers += [ledger.end(copy, COMMIT).code for copy in copies]
        answers += [ledger.end(copy, ROLLBACK).code for copy in copies]
    assert answers == [0] * 5 + [604] * 4
    assert ledger.bodies() == [b"paid"]
    assert sorted(ledger.named()) == [0, 1, 2, 3]


async def test_only_checks_that_were_sent_count(
    ledger: Ledger, autojump_clock: trio.testing.MockClock
) -> None:
    ledger.broker.config.transaction_check_max = 2
    async with ledger.running():
        ledger.send(b"paid")
        for _ in range(5):
            await ledger.check_later()
        ledger.join(group="others")
        await ledger.check_later()
        channel = ledger.join()
        channel.is_open = False
        await ledger.check_later()
        assert len(ledger.stored(HALF_TOPIC, 0)) == 1
        channel.is_open = True
        for times in (1, 2):
            await ledger.check_later()
            (check,) = checks(channel)
            assert check.message.properties["TRANSACTION_CHECK_TIMES"] == str(times)
        await ledger.check_later()
        assert checks(channel) == []
    assert ledger.bodies(CHECK_MAX_TIME_TOPIC, 0) == [b"paid"]


async def test_each_producer_of_the_group_is_asked_in_turn(
    ledger: Ledger, autojump_clock: trio.testing.MockClock
) -> None:
    async with ledger.running():
        ledger.send(b"paid")
        channels = [ledger.join(client_id=name) for name in "abc"]
        asked = []
        for _ in range(6):
            await ledger.check_later()
            asked.append([len(checks(channel)) for channel in channels])
    assert [sum(one) for one in asked] == [1] * 6
    assert asked[:3] == asked[3:]
    assert [sum(one) for one in zip(*asked, strict=True)] == [2, 2, 2]


async def test_a_producer_that_never_answers_ends_in_a_topic_and_may_resume(
    ledger: Ledger, autojump_clock: trio.testing.MockClock
) -> None:
    async with ledger.running():
        half = ledger.send(b"paid", KEYS="k")
        channel = ledger.join()
        asked = []
        for _ in range(20):
            await ledger.check_later()
            asked += checks(channel)
        assert len(asked) == 15
        assert ledger.transactions.discarded == 1
        (kept,) = ledger.stored(CHECK_MAX_TIME_TOPIC, 0)
        assert kept.body == b"paid"
        assert ledger.end(half, COMMIT).code == ResponseCode.ILLEGAL_OPERATION
        assert ledger.end(asked[-1].half, ROLLBACK).code == ResponseCode.ILLEGAL_OPERATION
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(ledger.named()) == list(range(16))
        answer = await ledger.resume(kept.offset_message_id)
        assert answer.code == ResponseCode.SUCCESS, answer.remark
        answer = await ledger.resume(kept.offset_message_id)
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert "was resumed before" in answer.remark
        await ledger.check_later()
        (check,) = checks(channel)
        assert check.message.properties["TRANSACTION_CHECK_TIMES"] == "1"
        assert ledger.end(check.half, COMMIT).code == ResponseCode.SUCCESS
        assert ledger.end(half, COMMIT).code == ResponseCode.ILLEGAL_OPERATION
    assert ledger.bodies() == [b"paid"]


async def test_two_who_resume_a_half_at_once_resume_it_once(
    ledger: Ledger, autojump_clock: trio.testing.MockClock
) -> None:
    works: list[Iterator[None]] = []
    channels = [MemoryChannel(), MemoryChannel()]
    async with ledger.running():
        ledger.send(b"old")
        await ledger.check_later(73 * 3600)
        (kept,) = ledger.stored(CHECK_MAX_TIME_TOPIC, 0)
        header = ResumeCheckHalfMessageHeader(msg_id=kept.offset_message_id)
        ledger.broker.registry.run_long = works.append
        ledger.broker.registry.slice_s = 0.0
        for channel in channels:
            ledger.broker.send(RequestCode.RESUME_CHECK_HALF_MESSAGE, header, channel=channel)
        slices = [sum(1 for _ in work) for work in works]
        await trio.testing.wait_all_tasks_blocked()
        assert min(slices) > 1, "a search lets others have their turn"
        codes = [reply.code for channel in channels for reply, _ in channel.replies()]
        assert codes == [ResponseCode.SUCCESS, ResponseCode.SYSTEM_ERROR]
    assert ledger.bodies(HALF_TOPIC, 0) == [b"old", b"old"]


@pytest.mark.parametrize("message_id", ["", "x", "00" * 16, "7F" * 16])
def test_only_a_discarded_half_is_resumed(ledger: Ledger, message_id: str) -> None:
    ledger.broker.store_message("T", 0)
    header = ResumeCheckHalfMessageHeader(msg_id=message_id)
    answer = ledger.broker.ask(RequestCode.RESUME_CHECK_HALF_MESSAGE, header)
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "msgId" in answer.remark


async def test_a_half_may_ask_for_a_longer_time(
    ledger: Ledger, autojump_clock: trio.testing.MockClock
) -> None:
    async with ledger.running():
        ledger.send(b"slow", CHECK_IMMUNITY_TIME_IN_SECONDS="100")
        ledger.send(b"odd", CHECK_IMMUNITY_TIME_IN_SECONDS="x")
        channel = ledger.join()
        await ledger.check_later(99)
        assert [check.message.body for check in checks(channel)] == [b"odd"]
        await ledger.check_later(1)
        assert {check.message.body for check in checks(channel)} == {b"slow", b"odd"}


async def test_what_is_too_old_is_discarded_unasked(
    ledger: Ledger, autojump_clock: trio.testing.MockClock
) -> None:
    async with ledger.running():
        ledger.send(b"old")
        await ledger.check_later(72 * 3600)
        assert ledger.bodies(CHECK_MAX_TIME_TOPIC, 0) == []
        await ledger.check_later(1)
    assert ledger.bodies(CHECK_MAX_TIME_TOPIC, 0) == [b"old"]


async def test_a_half_that_is_never_due_is_discarded_when_it_is_too_old(
    ledger: Ledger, autojump_clock: trio.testing.MockClock
) -> None:
    async with ledger.running():
        ledger.send(b"pins the log", CHECK_IMMUNITY_TIME_IN_SECONDS="9" * 18)
        channel = ledger.join()
        await ledger.check_later(72 * 3600)
        assert checks(channel) == []
        await ledger.check_later(1)
        assert checks(channel) == []
        await trio.testing.wait_all_tasks_blocked()
        assert ledger.transactions.next_offset(0) == 1
    assert ledger.bodies(CHECK_MAX_TIME_TOPIC, 0) == [b"pins the log"]


async def test_no_host_floods_the_log_with_discarded_halves(
    ledger: Ledger, autojump_clock: trio.testing.MockClock
) -> None:
    async with ledger.running():
        for number in range(LINES_MAX + 5):
            ledger.send(b"%d" % number)
        with structlog.testing.capture_logs() as logs:
            await ledger.check_later(73 * 3600)
    assert ledger.transactions.discarded == LINES_MAX + 5
    assert len(logs) == LINES_MAX
    assert {line["event"] for line in logs} == {"transaction discarded, nobody decided it"}


async def test_a_half_that_nobody_is_asked_about_holds_up_no_start(
    ledger: Ledger, autojump_clock: trio.testing.MockClock
) -> None:
    ledger.transactions.behind_max = 10
    async with ledger.running():
        stuck = ledger.send(b"stuck")
        for number in range(12):
            ledger.end(ledger.send(b"%d" % number), COMMIT)
        assert ledger.transactions.next_offset(0) == 0
        await ledger.check_later()
        assert ledger.transactions.next_offset(0) == 13
        (copy,) = ledger.stored(HALF_TOPIC, 0)[13:]
        assert copy.properties["TRANSACTION_CHECK_TIMES"] == "0"
        assert ledger.end(stuck, COMMIT).code == ResponseCode.SUCCESS
    assert ledger.transactions.next_offset(0) == 14


async def test_a_damaged_half_stops_no_other(
    ledger: Ledger, autojump_clock: trio.testing.MockClock
) -> None:
    async with ledger.running():
        halves = [ledger.send(body) for body in (b"first", b"torn", b"last")]
        (path,) = (ledger.broker.config.store_path_root_dir / "commitlog").iterdir()
        with path.open("r+b") as file:
            file.seek(halves[1].physical_offset + 90)
            file.write(b"\xff" * 8)
        channel = ledger.join()
        await ledger.check_later()
        assert [check.message.body for check in checks(channel)] == [b"first", b"last"]
        assert ledger.transactions.unreadable == 1
        assert ledger.end(halves[1], COMMIT).code != ResponseCode.SUCCESS


async def test_a_half_whose_file_is_gone_is_reported(
    ledger: Ledger, autojump_clock: trio.testing.MockClock
) -> None:
    async with ledger.running():
        gone = ledger.send(b"gone")
        while len(ledger.broker.store.commit_log.files.files) < 3:
            ledger.broker.store_message("T", 0, bytes(1000))
        kept = ledger.send(b"kept")
        ledger.broker.store.write_path.drain_all()
        assert ledger.broker.store.commit_log.files.detach_first(1)
        answer = ledger.end(gone, COMMIT)
        assert "Find prepared transaction message failed" in answer.remark
        channel = ledger.join()
        await ledger.check_later()
        (check,) = checks(channel)
        assert check.message.body == b"kept"
        assert ledger.transactions.unreadable == 1
        assert ledger.end(kept, COMMIT).code == ResponseCode.SUCCESS
    assert ledger.bodies() == [b"kept"]


async def test_undecided_halves_keep_their_log_files(ledger: Ledger) -> None:
    async with ledger.running():
        unconsumed = ledger.broker.store.cleaner.unconsumed
        ledger.end(ledger.send(b"a"), COMMIT)
        half = ledger.send(b"b")
        assert at_once(unconsumed()(HALF_TOPIC, [0])) == {0: (1, "undecided transactions")}
        ledger.end(half, ROLLBACK)
        assert at_once(unconsumed()(HALF_TOPIC, [0])) == {0: (2, "undecided transactions")}


async def test_an_outage_lasts_until_checks_and_looks_both_work(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    files = FaultyFiles()
    ledger = Ledger(tmp_path, files=files)
    transactions = ledger.transactions
    transactions.unseen_max = 1
    ledger.runs = [transactions.run, transactions.run_looking]
    interval_s = ledger.broker.config.transaction_check_interval / 1000
    async with ledger.running():
        with structlog.testing.capture_logs() as logs:
            files.is_unreadable = True
            ledger.send(b"1")
            ledger.send(b"2")
            await trio.sleep(1.5 * interval_s)
            files.is_unreadable = False
            ledger.send(b"3")
            ledger.send(b"4")
            await trio.sleep(2 * interval_s)
    events = [entry["event"] for entry in logs if "half messages" in entry["event"]]
    assert ["available again" in event for event in events] == [False, True]
