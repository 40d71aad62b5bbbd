"""Staged writes at one broker: nothing is seen before the commit, all of it once after it."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from headrace_broker.staging import state as state_file
from headrace_broker.staging.blocks import CorruptStage, StagedBlock, read_blocks
from headrace_broker.staging.query import Phase
from headrace_broker.store.log.log_refusals import ROOM_RETRY_MS
from headrace_protocol.blocks import encode_records
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.columns import RecordColumns
from headrace_protocol.headers import (
    StageAbortHeader,
    StageCommitHeader,
    StageCommitResponseHeader,
    StageDecideHeader,
    StageQueryHeader,
    StageSealHeader,
    StageSealResponseHeader,
    StageSendHeader,
    StageStateResponseHeader,
)
from headrace_protocol.message_ids import encode_host
from headrace_protocol.staging import Decision, StagedAttempt, encode_names
from headrace_protocol.waiting import at_once
from tests.support.batches import block
from tests.support.broker import Answer, BrokerUnderTest, broker_config
from tests.support.channel import MemoryChannel
from tests.support.stores import HOST, FaultyFiles, crash

SUCCESS = ResponseCode.SUCCESS
REFUSED = ResponseCode.ILLEGAL_OPERATION
UNAVAILABLE = ResponseCode.SERVICE_NOT_AVAILABLE
QUERY = "query-1"


@pytest.fixture
def broker(broker: BrokerUnderTest) -> BrokerUnderTest:
    broker.create_topic("T")
    return broker


# --- what a task and a driver ask ----------------------------------------------------------


class Waiting(MemoryChannel):
    """A client that can wait for its answer."""

    def __init__(self) -> None:
        super().__init__()
        self.answered = trio.Event()
        self.when_written: Callable[[], object] = lambda: None

    def write(self, *buffers: Any) -> None:
        super().write(*buffers)
        self.answered.set()
        self.when_written()


def send_header(name: str, number: int, batch: int = 0, **changes: Any) -> StageSendHeader:
    fields: dict[str, Any] = {
        "producer_group": "spark",
        "topic": "T",
        "default_topic": "TBW102",
        "default_topic_queue_nums": 2,
        "queue_id": 0,
        "count": 1,
        "query_id": QUERY,
        "batch_id": batch,
        "attempt": name,
        "block_number": number,
    }
    return StageSendHeader(**{**fields, **changes})


def send(broker: BrokerUnderTest, attempt: str, number: int, *bodies: bytes, **changes: Any) -> Any:
    sent = block(*bodies)
    header = send_header(attempt, number, **{"count": sent.record_count, **changes})
    return broker.ask(RequestCode.STAGE_SEND, header, bytes(sent.body))


def seal(broker: BrokerUnderTest, attempt: str, blocks: int, batch: int = 0) -> Answer:
    header = StageSealHeader(query_id=QUERY, batch_id=batch, attempt=attempt, block_count=blocks)
    return broker.ask(RequestCode.STAGE_SEAL, header)


def stage(broker: BrokerUnderTest, attempt: str, *blocks: tuple[bytes, ...], batch: int = 0) -> Any:
    """Stage and seal an attempt whose blocks go to the queues 0 and 1 in turn."""
    for number, bodies in enumerate(blocks):
        answer = send(broker, attempt, number, *bodies, batch=batch, queue_id=number % 2)
        assert answer.code == SUCCESS, answer.remark
    sealed = seal(broker, attempt, len(blocks), batch)
    assert sealed.code == SUCCESS, sealed.remark
    header = sealed.command.header(StageSealResponseHeader)
    return StagedAttempt(attempt, header.file_bytes, header.record_count)


def decision(*attempts: StagedAttempt, batch: int = 0, name: str = "d", **parts: Any) -> Decision:
    return Decision(name, batch, {"broker-a": attempts, **parts})


def decide(broker: BrokerUnderTest, made: Decision, replaces: str | None = None) -> Answer:
    header = StageDecideHeader(query_id=QUERY, replaces=replaces)
    return broker.ask(RequestCode.STAGE_DECIDE, header, made.encode())


def held(answer: Answer) -> Decision:
    assert answer.code == SUCCESS, answer.remark
    return Decision.decode(answer.body)


def begin_commit(broker: BrokerUnderTest, batch: int = 0, name: str = "d") -> Waiting:
    channel = Waiting()
    header = StageCommitHeader(query_id=QUERY, batch_id=batch, decision_id=name)
    broker.send(RequestCode.STAGE_COMMIT, header, channel=channel)
    return channel


@asynccontextmanager
async def serving(broker: BrokerUnderTest) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        staging = broker.staging
        for run in (staging.run_flush, staging.settlements.run, staging.applying.run):
            nursery.start_soon(run)
        nursery.start_soon(broker.store.flusher.run_group_commit)
        yield
        nursery.cancel_scope.cancel()


async def answered(channel: Waiting) -> Answer:
    with trio.fail_after(5):
        await channel.answered.wait()
    return Answer(*channel.replies()[0])


async def commit(broker: BrokerUnderTest, batch: int = 0, name: str = "d") -> Answer:
    return await answered(begin_commit(broker, batch, name))


def state(broker: BrokerUnderTest) -> tuple[int, Decision | None]:
    answer = broker.ask(RequestCode.STAGE_STATE, StageQueryHeader(query_id=QUERY))
    header = answer.command.header(StageStateResponseHeader)
    assert header.broker_name == "broker-a"
    return header.applied_batch_id, held(answer) if answer.body else None


def abort(broker: BrokerUnderTest, *attempts: str, batch: int = 0) -> Answer:
    header = StageAbortHeader(query_id=QUERY, batch_id=batch)
    return broker.ask(RequestCode.STAGE_ABORT, header, encode_names(list(attempts)))


def bodies(broker: BrokerUnderTest, queue_id: int = 0) -> list[bytes]:
    return [m.body for m in broker.stored("T", queue_id)]


def staged_files(broker: BrokerUnderTest) -> list[str]:
    return sorted(path.name for path in (broker.store.root / "staged").glob("*/*.blocks"))


async def until_left(broker: BrokerUnderTest, *names: str) -> None:
    """Wait until these are all that the folder of staged writes holds, below each query."""
    folder = broker.store.root / "staged"
    with trio.fail_after(5):
        # Files tell nobody.
        while sorted(path.name for path in folder.rglob("*")) != sorted(names):  # noqa: ASYNC110
            await trio.sleep(0.001)


def restart(broker: BrokerUnderTest, tmp_path: Path, **store: Any) -> BrokerUnderTest:
    """Kill it and begin again with the same files."""
    crash(broker.store)
    return BrokerUnderTest(tmp_path, **store)


# --- stage, decide, commit -----------------------------------------------------------------


async def test_a_batch_is_seen_after_its_commit_and_in_its_order(broker: BrokerUnderTest) -> None:
    one = stage(broker, "one", (b"a", b"b"), (b"c",), (b"d",))
    two = stage(broker, "two", (b"e",), (b"f",))
    assert bodies(broker) == []
    assert held(decide(broker, decision(two, one))) == decision(two, one)
    assert bodies(broker) == []
    async with serving(broker):
        answer = await commit(broker)
    assert answer.code == SUCCESS, answer.remark
    assert not answer.command.header(StageCommitResponseHeader).already_done
    assert bodies(broker, 0) == [b"e", b"a", b"b", b"d"]
    assert bodies(broker, 1) == [b"f", b"c"]
    assert broker.store.commit_log.flushed_offset == broker.store.commit_log.max_offset
    assert state(broker) == (0, decision(two, one))
    assert staged_files(broker) == []
    assert broker.statistics.topic_puts["T"].count == 6


async def test_a_commit_is_answered_as_often_as_it_is_asked(broker: BrokerUnderTest) -> None:
    one = stage(broker, "one", (b"a",), (b"b",))
    decide(broker, decision(one))
    twice = [begin_commit(broker), begin_commit(broker)]
    async with serving(broker):
        assert [(await answered(channel)).code for channel in twice] == [SUCCESS, SUCCESS]
        again = await commit(broker)
    assert again.command.header(StageCommitResponseHeader).already_done
    assert (bodies(broker, 0), bodies(broker, 1)) == ([b"a"], [b"b"])


async def test_a_batch_that_comes_again_follows_its_first_decision(broker: BrokerUnderTest) -> None:
    one = stage(broker, "one", (b"a",))
    decide(broker, decision(one))
    other = stage(broker, "other", (b"a",))
    assert held(decide(broker, decision(other, name="e"))) == decision(one)
    assert commit_now(broker, name="e").code == REFUSED
    async with serving(broker):
        assert (await commit(broker)).code == SUCCESS
        # It comes once more, after Spark was killed before it noted the batch.
        third = stage(broker, "third", (b"a",))
        assert held(decide(broker, decision(third, name="f"))) == decision(one)
        assert commit_now(broker, name="f").command.header(StageCommitResponseHeader).already_done
        later = stage(broker, "later", (b"c",), batch=7)
        decide(broker, decision(later, batch=7, name="g"))
        assert (await commit(broker, 7, "g")).code == SUCCESS
    assert held(decide(broker, decision(third, name="f"))).batch_id == 7
    assert commit_now(broker, 3).command.header(StageCommitResponseHeader).already_done
    assert bodies(broker) == [b"a", b"c"]
    assert staged_files(broker) == []


def commit_now(broker: BrokerUnderTest, batch: int = 0, name: str = "d") -> Answer:
    """The answer of a commit that has nothing to append."""
    ((command, body),) = begin_commit(broker, batch, name).replies()
    return Answer(command, body)


async def test_attempts_that_lost_leave_nothing(broker: BrokerUnderTest) -> None:
    won = stage(broker, "won", (b"a",))
    stage(broker, "lost", (b"a",))
    send(broker, "unfinished", 0, b"a")
    decide(broker, decision(won))
    async with serving(broker):
        await commit(broker)
        await until_left(broker, QUERY, state_file.NAME)
    assert bodies(broker) == [b"a"]


async def test_an_attempt_that_begins_after_the_commit_is_kept(broker: BrokerUnderTest) -> None:
    """As of a driver that was killed before it noted the batch."""
    decide(broker, decision(stage(broker, "won", (b"a",))))
    async with serving(broker):
        channel = begin_commit(broker)
        channel.when_written = lambda: send(broker, "again", 0, b"a")
        assert (await answered(channel)).code == SUCCESS
        await until_left(broker, QUERY, state_file.NAME, "0.again.blocks")
        assert seal(broker, "again", 1).code == SUCCESS


async def test_a_decision_that_one_broker_does_not_hold_gives_way(broker: BrokerUnderTest) -> None:
    one, two = stage(broker, "one", (b"a",)), stage(broker, "two", (b"b",))
    decide(broker, decision(one))
    assert held(decide(broker, decision(two, name="e"), replaces="other")) == decision(one)
    made = decision(two, name="e")
    assert held(decide(broker, made, replaces="d")) == made
    async with serving(broker):
        assert (await commit(broker, name="e")).code == SUCCESS
    # What is in the log does not.
    assert held(decide(broker, decision(one, name="f"), replaces="e")) == made
    assert bodies(broker) == [b"b"]


def test_what_was_decided_can_not_be_aborted(broker: BrokerUnderTest) -> None:
    one, two = stage(broker, "one", (b"a",)), stage(broker, "two", (b"b",))
    assert abort(broker, "two", "never-there").code == SUCCESS
    assert staged_files(broker) == ["0.one.blocks"]
    answer = decide(broker, decision(one, two))
    assert (answer.code, "two" in answer.remark) == (REFUSED, True)
    assert state(broker) == (-1, None)
    decide(broker, decision(one))
    abort(broker, "one")
    assert staged_files(broker) == ["0.one.blocks"]
    # A task that goes on after its attempt was given up hears of it.
    assert send(broker, "two", 1, b"more").code == REFUSED
    assert seal(broker, "two", 1).code == REFUSED


async def test_a_query_that_is_done_for_good_is_forgotten(broker: BrokerUnderTest) -> None:
    one = stage(broker, "one", (b"a",))
    decide(broker, decision(one))
    forget = StageQueryHeader(query_id=QUERY)
    assert broker.ask(RequestCode.STAGE_FORGET, forget).code == REFUSED
    async with serving(broker):
        await commit(broker)
        # At once, while its blocks may still be there.
        assert broker.ask(RequestCode.STAGE_FORGET, forget).code == SUCCESS
        await until_left(broker)
    assert state(broker) == (-1, None)


# --- blocks that come twice, late or not at all --------------------------------------------


def test_a_block_may_come_twice_but_none_may_be_left_out(broker: BrokerUnderTest) -> None:
    assert send(broker, "one", 0, b"a").code == SUCCESS
    assert send(broker, "one", 0, b"a").code == SUCCESS
    assert send(broker, "one", 2, b"c").code == REFUSED
    assert send(broker, "one", 1, b"b").code == SUCCESS
    assert seal(broker, "one", 3).code == REFUSED
    header = seal(broker, "one", 2).command.header(StageSealResponseHeader)
    assert header.record_count == 2
    (path,) = (broker.store.root / "staged" / QUERY).iterdir()
    assert path.stat().st_size == header.file_bytes
    assert [len(found.body) for found in read_blocks(path)] == [len(block(b"a").body)] * 2


ILLEGAL, INVALID = ResponseCode.MESSAGE_ILLEGAL, ResponseCode.INVALID_PARAMETER


@pytest.mark.parametrize(
    ("changes", "code", "remark"),
    [
        ({"count": 2}, ILLEGAL, "torn"),
        ({"topic": "U"}, ILLEGAL, "of topic U"),
        ({"queue_id": 2}, INVALID, "there are 2"),
        ({"query_id": "../../etc"}, INVALID, "queryId"),
        ({"attempt": "a.b"}, INVALID, "attempt"),
        ({"attempt": ""}, INVALID, "attempt"),
        ({"batch_id": -1}, INVALID, "batchId"),
        ({"block_number": -1}, INVALID, "blockNumber"),
    ],
)
def test_a_block_is_checked_when_it_comes(
    broker: BrokerUnderTest, changes: dict[str, Any], code: int, remark: str
) -> None:
    header = send_header("one", 0, **changes)
    answer = broker.ask(RequestCode.STAGE_SEND, header, bytes(block(b"a").body))
    assert (answer.code, remark in answer.remark) == (code, True), answer.remark
    assert not (broker.store.root / "staged").exists()


def test_what_the_log_would_not_take_is_refused_before_it_is_kept(broker: BrokerUnderTest) -> None:
    answer = send(broker, "one", 0, bytes(4096))
    assert (answer.code, "block has" in answer.remark) == (ILLEGAL, True)
    answer = send(broker, "one", 0, bytes(5 << 20))
    assert (answer.code, "body has" in answer.remark) == (ILLEGAL, True)


@pytest.mark.parametrize("body", [b"", b"{", b'{"decisionId":"d"}', b"[1]"])
def test_a_decision_that_can_not_be_read_is_refused(broker: BrokerUnderTest, body: bytes) -> None:
    decide = StageDecideHeader(query_id=QUERY)
    assert broker.ask(RequestCode.STAGE_DECIDE, decide, body).code == INVALID
    abort = StageAbortHeader(query_id=QUERY, batch_id=0)
    assert broker.ask(RequestCode.STAGE_ABORT, abort, b'["../state"]').code == INVALID
    assert state(broker) == (-1, None)


def test_a_broker_with_an_ipv6_address_stages_nothing(tmp_path: Path) -> None:
    broker = BrokerUnderTest(tmp_path, store_host=encode_host("::1", 10911))
    broker.create_topic("T")
    assert send(broker, "one", 0, b"a").code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED


# --- disks ---------------------------------------------------------------------------------


def test_a_disk_that_takes_nothing_is_named_and_may_heal(tmp_path: Path) -> None:
    files = FaultyFiles()
    broker = BrokerUnderTest(tmp_path, files=files)
    broker.create_topic("T")
    send(broker, "one", 0, b"a")
    files.is_unwritable = True
    answer = send(broker, "one", 1, b"b")
    assert (answer.code, "staged" in answer.remark) == (UNAVAILABLE, True)
    files.is_unwritable = False
    assert send(broker, "one", 1, b"b").code == SUCCESS
    files.is_broken = True
    assert seal(broker, "one", 2).code == UNAVAILABLE
    files.is_broken = False
    # Its pages may be gone, so it is not tried again.
    assert seal(broker, "one", 2).code == REFUSED
    one = stage(broker, "another", (b"a",))
    files.is_broken = True
    assert decide(broker, decision(one)).code == UNAVAILABLE
    files.is_broken = False
    assert state(broker) == (-1, None)
    assert held(decide(broker, decision(one))) == decision(one)


async def test_a_log_that_is_full_keeps_a_batch_waiting(broker: BrokerUnderTest) -> None:
    one = stage(broker, "one", (b"a",), (b"b",), (b"c",))
    decide(broker, decision(one))
    broker.store.commit_log.refuse("full", broker.store.root)
    async with serving(broker):
        answer = await commit(broker)
        assert (answer.code, "full" in answer.remark) == (UNAVAILABLE, True)
        assert bodies(broker) == []
        broker.store.commit_log.resume()
        assert (await commit(broker)).code == SUCCESS
    assert (bodies(broker, 0), bodies(broker, 1)) == ([b"a", b"c"], [b"b"])


def test_a_full_disk_takes_staged_blocks_as_little_as_messages(broker: BrokerUnderTest) -> None:
    assert send(broker, "one", 0, b"before").code == SUCCESS
    retention = broker.store.cleaner.retention
    broker.store.cleaner.retention = replace(retention, force_ratio=0.0, refuse_ratio=0.0)
    for attempt, number in (("one", 1), ("two", 0)):
        answer = send(broker, attempt, number, b"not taken")
        assert answer.code == UNAVAILABLE
        assert "messages are refused above 0%" in answer.remark
    broker.store.cleaner.retention = retention
    broker.clock.ms += ROOM_RETRY_MS
    for attempt, number in (("one", 1), ("two", 0)):
        assert send(broker, attempt, number, b"taken").code == SUCCESS


async def test_a_write_that_fails_in_the_middle_is_made_up_for(tmp_path: Path) -> None:
    files = FaultyFiles()
    broker = BrokerUnderTest(tmp_path, files=files)
    broker.create_topic("T")
    one = stage(broker, "one", *[(b"%d" % n,) for n in range(8)])
    decide(broker, decision(one))
    async with serving(broker):
        channel = begin_commit(broker)
        while broker.store.commit_log.max_offset == 0:
            await trio.lowlevel.checkpoint()
        files.is_unwritable = True
        assert (await answered(channel)).code == UNAVAILABLE
        files.is_unwritable = False
        broker.clock.ms += 2000
        assert (await commit(broker)).code == SUCCESS
    assert bodies(broker, 0) == [b"0", b"2", b"4", b"6"]
    assert bodies(broker, 1) == [b"1", b"3", b"5", b"7"]


async def test_with_synchronous_flush_more_than_the_ring_is_applied(tmp_path: Path) -> None:
    config = broker_config(tmp_path, flush_disk_type="SYNC_FLUSH")
    broker = BrokerUnderTest(tmp_path, config, flush="sync")
    broker.create_topic("T")
    blocks = [tuple(b"%d" % (10 * n + m) for m in range(10)) for n in range(30)]
    one = stage(broker, "one", *blocks)
    decide(broker, decision(one))
    async with serving(broker):
        assert (await commit(broker)).code == SUCCESS
    broker.store.write_path.publish()
    assert sorted(map(int, bodies(broker, 0) + bodies(broker, 1))) == list(range(300))


# --- kill -9 -------------------------------------------------------------------------------


def test_a_killed_broker_goes_on_with_what_was_staged(tmp_path: Path) -> None:
    broker = BrokerUnderTest(tmp_path)
    broker.create_topic("T")
    send(broker, "one", 0, b"a")
    send(broker, "one", 1, b"b")
    (path,) = (broker.store.root / "staged" / QUERY).iterdir()
    os.truncate(path, path.stat().st_size - 3)
    broker = restart(broker, tmp_path)
    assert send(broker, "one", 2, b"c").code == REFUSED
    assert send(broker, "one", 1, b"b").code == SUCCESS
    assert send(broker, "one", 2, b"c").code == SUCCESS
    header = seal(broker, "one", 3).command.header(StageSealResponseHeader)
    assert header.record_count == 3


async def test_a_decision_survives_and_waits_for_its_commit(tmp_path: Path) -> None:
    broker = BrokerUnderTest(tmp_path)
    broker.create_topic("T")
    one = stage(broker, "one", (b"a",))
    decide(broker, decision(one))
    broker = restart(broker, tmp_path)
    assert state(broker) == (-1, decision(one))
    async with serving(broker):
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert bodies(broker) == []  # another broker may not hold it
        assert (await commit(broker)).code == SUCCESS
    broker = restart(broker, tmp_path)
    assert state(broker) == (0, decision(one))
    assert commit_now(broker).command.header(StageCommitResponseHeader).already_done
    assert bodies(broker) == [b"a"]


ROWS = [b"%d" % number for number in range(24)]


@pytest.mark.parametrize("applied", range(len(ROWS) + 1))
async def test_a_broker_killed_while_applying_appends_the_rest(
    tmp_path: Path, applied: int
) -> None:
    """The log ends after any number of the batch's records, or within one."""
    broker = BrokerUnderTest(tmp_path)
    broker.create_topic("T")
    broker.store_message("T", 0, b"before")
    blocks = [tuple(ROWS[at : at + 4]) for at in range(0, len(ROWS), 4)]
    decide(broker, decision(*[stage(broker, f"a{n}", *blocks[n : n + 2]) for n in (0, 2, 4)]))
    broker.store_message("T", 1, b"between")
    root = broker.store.root
    shutil.copytree(root / "staged", tmp_path / "decided")
    first = broker.store.commit_log.max_offset
    async with serving(broker):
        await commit(broker)
    broker.store_message("T", 1, b"lost with the end of the log")
    cut_log(broker, first, applied)
    shutil.rmtree(root / "staged")
    shutil.copytree(tmp_path / "decided", root / "staged")
    broker = restart(broker, tmp_path)
    # What has begun needs nobody to tell it again.
    assert broker.staging.queries[QUERY].phase is (Phase.APPLYING if applied else Phase.DECIDED)
    async with serving(broker):
        assert (await commit(broker)).code == SUCCESS
    assert bodies(broker, 0) == [b"before", *[row for n in (0, 2, 4) for row in blocks[n]]]
    assert bodies(broker, 1) == [b"between", *[row for n in (1, 3, 5) for row in blocks[n]]]
    assert staged_files(broker) == []


def cut_log(broker: BrokerUnderTest, physical_offset: int, records: int) -> None:
    """Zeros from the end of so many records on, or from within the next one."""
    log = broker.store.commit_log
    for _ in range(records):
        physical_offset += len(log.record_at(physical_offset) or b"")
    torn_bytes = 50 if records % 2 else 0
    (file,) = log.files.files
    with file.path.open("r+b") as raw:
        raw.seek(physical_offset + torn_bytes)
        raw.write(bytes(file.file_bytes - raw.tell()))


async def test_a_log_that_lost_its_end_with_the_power_is_searched_from_there(
    tmp_path: Path,
) -> None:
    broker = BrokerUnderTest(tmp_path)
    broker.create_topic("T")
    for number in range(5):
        broker.store_message("T", 0, b"lost %d" % number)
    decide(broker, decision(stage(broker, "one", (b"a",), (b"b",))))
    cut_log(broker, 0, 0)
    broker = restart(broker, tmp_path)
    assert at_once(broker.staging.state(QUERY)).from_offset == 0


async def test_a_torn_state_stops_its_query_and_no_other(tmp_path: Path) -> None:
    broker = BrokerUnderTest(tmp_path)
    broker.create_topic("T")
    decide(broker, decision(stage(broker, "one", (b"a",))))
    path = broker.store.root / "staged" / QUERY / state_file.NAME
    path.write_bytes(path.read_bytes().replace(b"one", b"two"))
    # A new state that was not finished is nobody's.
    path.with_name("state.json.tmp").write_bytes(b"{")
    broker = restart(broker, tmp_path)
    answer = broker.ask(RequestCode.STAGE_STATE, StageQueryHeader(query_id=QUERY))
    assert (answer.code, str(path) in answer.remark) == (ResponseCode.SYSTEM_ERROR, True)
    assert send(broker, "one", 1, b"b").code == ResponseCode.SYSTEM_ERROR
    assert send(broker, "one", 0, b"b", query_id="another").code == SUCCESS
    assert staged_files(broker) == ["0.one.blocks", "0.one.blocks"]
    # It is refused as long as the broker runs, not until the next look for leftovers.
    await broker.staging.expire()
    assert broker.ask(RequestCode.STAGE_STATE, StageQueryHeader(query_id=QUERY)).code == (
        ResponseCode.SYSTEM_ERROR
    )


@pytest.mark.parametrize("lost", ["staged", f"staged/{QUERY}", f"staged/{QUERY}/state.json"])
async def test_a_query_whose_state_is_not_mounted_is_not_a_new_one(
    tmp_path: Path, lost: str
) -> None:
    broker = BrokerUnderTest(tmp_path)
    broker.create_topic("T")
    decide(broker, decision(stage(broker, "one", (b"a",))))
    path, mounted = broker.store.root / lost, tmp_path / "mounted"
    state_path = broker.store.root / "staged" / QUERY / state_file.NAME
    asks = StageQueryHeader(query_id=QUERY)
    path.rename(mounted)
    broker = restart(broker, tmp_path)
    for _ in range(2):
        answer = broker.ask(RequestCode.STAGE_STATE, asks)
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert f"{state_path}: missing" in answer.remark
        assert "mount its disk" in answer.remark
        assert send(broker, "two", 0, b"b").code == ResponseCode.SYSTEM_ERROR
        assert send(broker, "one", 0, b"b", query_id="another").code == SUCCESS
        broker = restart(broker, tmp_path)
    shutil.rmtree(path, ignore_errors=True)
    mounted.rename(path)
    broker = restart(broker, tmp_path)
    assert broker.staging.queries[QUERY].phase is Phase.DECIDED
    async with serving(broker):
        assert (await commit(broker)).code == SUCCESS
    assert bodies(broker) == [b"a"]


async def test_a_query_that_is_forgotten_needs_no_state(tmp_path: Path) -> None:
    broker = BrokerUnderTest(tmp_path)
    broker.create_topic("T")
    decide(broker, decision(stage(broker, "one", (b"a",))))
    async with serving(broker):
        assert (await commit(broker)).code == SUCCESS
    assert broker.ask(RequestCode.STAGE_FORGET, StageQueryHeader(query_id=QUERY)).code == SUCCESS
    shutil.rmtree(broker.store.root / "staged", ignore_errors=True)
    broker = restart(broker, tmp_path)
    assert broker.ask(RequestCode.STAGE_STATE, StageQueryHeader(query_id=QUERY)).code == SUCCESS


async def test_a_damaged_block_is_named_and_not_appended(broker: BrokerUnderTest) -> None:
    decide(broker, decision(stage(broker, "one", (b"a",), (b"b",))))
    (path,) = (broker.store.root / "staged" / QUERY).glob("*.blocks")
    good = path.read_bytes()
    for position in range(len(good)):
        path.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        with pytest.raises(CorruptStage, match="damaged at byte"):
            list(read_blocks(path))
    async with serving(broker):
        answer = await commit(broker)
        assert (answer.code, str(path) in answer.remark) == (UNAVAILABLE, True)
        path.write_bytes(good)
        assert (await commit(broker)).code == SUCCESS
    assert (bodies(broker, 0), bodies(broker, 1)) == ([b"a"], [b"b"])


# --- expiry --------------------------------------------------------------------------------


async def test_what_nobody_decided_on_expires(broker: BrokerUnderTest) -> None:
    kept = stage(broker, "kept", (b"a",))
    decide(broker, decision(kept))
    send(broker, "left", 0, b"b")
    send(broker, "left", 0, b"b", query_id="dead")
    young = send(broker, "young", 0, b"b")
    assert young.code == SUCCESS
    old = broker.clock.ms / 1000 - broker.config.staged_reserved_ms / 1000 - 1
    for path in (broker.store.root / "staged").glob("*/*.blocks"):
        if "young" not in path.name:
            os.utime(path, (old, old))
    await broker.staging.expire()
    assert staged_files(broker) == ["0.kept.blocks", "0.young.blocks"]
    assert not (broker.store.root / "staged" / "dead").exists()
    assert seal(broker, "left", 1).code == REFUSED
    assert send(broker, "left", 0, b"b", query_id="dead").code == SUCCESS


# --- cost ----------------------------------------------------------------------------------


def test_blocks_are_read_back_without_their_first_records(tmp_path: Path) -> None:
    made = encode_records(
        "T", [b"a", b"bb", b"ccc"], [b"", b"k\x01v\x02", b""], born_timestamp=1, born_host=HOST
    )
    whole = StagedBlock("T", 3, 3, 0, bytes(made.body))
    for count in range(3):
        rest = whole.without(count)
        columns = RecordColumns.from_records(bytes(rest.body)[4 * rest.record_count :])
        assert columns.bodies() == [b"a", b"bb", b"ccc"][count:]
        assert rest.record_count == len(columns) == 3 - count
