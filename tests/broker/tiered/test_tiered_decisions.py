"""Queues that are not uploaded: why, what readers are told, and what a person decides."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest

from headrace_broker.queue_directory import Use
from headrace_broker.store.store_source import GetStatus
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.message import decode_records
from headrace_protocol.tier_bodies import TierStatus
from headrace_protocol.tier_headers import TierForgetHeader, TierResumeHeader
from tests.broker.tiered.test_tiered_status import ask
from tests.support.broker import BrokerUnderTest
from tests.support.object_tiers import Fault, FaultyDriver
from tests.support.stores import ready
from tests.support.tiered_broker import (
    TOPIC,
    body,
    expire_log,
    put,
    read_all,
    source,
    start,
    tier_of,
    upload,
    wrap_driver,
)

PROVIDERS = ("posix", "file")


def decide(
    broker: BrokerUnderTest, code: int, header: TierResumeHeader | TierForgetHeader
) -> TierStatus:
    answer = broker.ask(code, header)
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return TierStatus.decode(answer.body)


def forget(broker: BrokerUnderTest, from_offset: int) -> TierStatus:
    header = TierForgetHeader(topic=TOPIC, queue_id=0, from_offset=from_offset)
    return decide(broker, RequestCode.TIER_FORGET, header)


def restored(
    folder: Path, provider: str, *, before: int, lost: int, again: int, level: str = "NOT_IN_DISK"
) -> BrokerUnderTest:
    """A broker whose store is a back-up of ``before`` messages, and ``again`` new ones.

    The tier has ``lost`` messages that came after the back-up.
    """
    broker = start(folder, tiered_backend_service_provider=provider)
    put(broker, 0, before)
    upload(broker)
    broker.close()
    shutil.copytree(folder / "store", folder / "backup")
    broker = start(folder, broker.clock, tiered_backend_service_provider=provider)
    put(broker, before, lost)
    upload(broker)
    broker.close()
    shutil.rmtree(folder / "store")
    (folder / "backup").rename(folder / "store")
    clock = broker.clock
    clock.ms += 1_000_000
    broker = start(
        folder, clock, tiered_backend_service_provider=provider, tiered_storage_level=level
    )
    for number in range(again):
        broker.store_message(TOPIC, 0, b"%d " % (1000 + number) + body(number))
    return broker


def numbers(broker: BrokerUnderTest, offset: int = 0) -> list[int]:
    """The numbers that a consumer reads from an offset on."""
    found: list[int] = []
    reader = source(broker)
    while offset < reader.max_offset():
        result = ready(partial(reader.get, offset, 3, 100_000, None))
        assert result.status is GetStatus.FOUND, result
        for buffer in result.buffers:
            found += [int(message.body.split()[0]) for message in decode_records(buffer)]
        offset = result.next_offset
    return found


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("level", ["NOT_IN_DISK", "FORCE"])
@pytest.mark.parametrize(("before", "lost", "again"), [(0, 9, 9), (6, 9, 3), (6, 3, 9), (6, 9, 0)])
async def test_the_log_wins_where_the_tier_has_other_messages(
    tmp_path: Path, provider: str, level: str, before: int, lost: int, again: int
) -> None:
    broker = restored(tmp_path, provider, before=before, lost=lost, again=again, level=level)
    wanted = [*range(before), *range(1000, 1000 + again)]
    assert numbers(broker) == wanted
    for _ in range(3):
        upload(broker)
        assert numbers(broker) == wanted
        assert numbers(broker, before // 2) == wanted[before // 2 :]
    queue = tier_of(broker).access.queue(TOPIC, 0)
    assert queue is not None
    assert queue.commit_offset == before + lost  # nothing was uploaded over it
    status = ask(broker)
    assert (status.given_up_count, status.foreign_count) == (1, 1)
    (shown,) = status.queues
    assert shown.foreign_from == before
    assert shown.problem_since_ms == broker.clock.ms
    assert f"from queue offset {before} on the tier has other messages" in shown.problem
    info = tier_of(broker).runtime_info()
    assert info["tierForeignQueues"] == "1"
    assert info["tierStuckReason"] == shown.problem


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_history_of_such_a_queue_is_an_error_until_the_other_messages_are_forgotten(
    tmp_path: Path, provider: str
) -> None:
    broker = restored(tmp_path, provider, before=25, lost=9, again=4)
    upload(broker)
    # The log keeps all from the first other message on.
    local_min = await expire_log(broker)
    assert 0 < local_min <= 25
    assert numbers(broker, local_min) == [*range(local_min, 25), *range(1000, 1004)]
    for read in (
        partial(source(broker).get, 0, 3, 100_000, None),
        source(broker, Use.BEGIN).min_offset,
    ):
        with pytest.raises(RequestError, match="has other messages than the log") as refused:
            ready(read)
        assert refused.value.code == ResponseCode.SYSTEM_ERROR
    assert ready(source(broker, Use.LIST).min_offset) == local_min
    asked = forget(broker, 25)
    assert [queue.foreign_from for queue in asked.queues] == [25]
    upload(broker)
    assert ask(broker).given_up_count == 0
    queue = tier_of(broker).access.queue(TOPIC, 0)
    assert queue is not None
    assert (queue.min_offset, queue.commit_offset) == (0, 29)
    put(broker, 29, 30)
    upload(broker)
    await expire_log(broker)
    wanted = [*range(25), *range(1000, 1004), *range(29, 59)]
    assert numbers(broker) == wanted
    broker.close()
    broker = start(tmp_path, broker.clock, tiered_backend_service_provider=provider)
    upload(broker)
    assert numbers(broker) == wanted


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_all_of_the_tier_may_be_forgotten(tmp_path: Path, provider: str) -> None:
    broker = restored(tmp_path, provider, before=6, lost=9, again=4)
    upload(broker)
    forget(broker, 0)
    upload(broker)
    queue = tier_of(broker).access.queue(TOPIC, 0)
    assert queue is not None
    assert (queue.min_offset, queue.commit_offset) == (0, 10)


async def test_a_decision_that_comes_during_the_one_before_is_carried_out(tmp_path: Path) -> None:
    broker = restored(tmp_path, "posix", before=6, lost=9, again=4)
    store = wrap_driver(broker, FaultyDriver)
    upload(broker)
    access = tier_of(broker).access

    def decide_meanwhile(_call: str) -> Fault:
        store.fail()
        forget(broker, 0)
        return Fault.NONE

    store.fault = decide_meanwhile
    decide(broker, RequestCode.TIER_RESUME, TierResumeHeader())
    for _ in range(2):
        upload(broker)
    assert ask(broker).given_up_count == 0
    queue = access.queue(TOPIC, 0)
    assert queue is not None
    assert (queue.min_offset, queue.commit_offset) == (0, 10)


async def test_a_repaired_queue_is_resumed(tmp_path: Path) -> None:
    broker = start(tmp_path)
    put(broker, 0, 5)
    upload(broker)
    (segment,) = (tmp_path / "tier").rglob("CONSUME_QUEUE/*")
    whole = segment.read_bytes()
    segment.write_bytes(whole[:40])
    put(broker, 5, 5)
    with pytest.raises(OSError, match="bytes instead of"):
        upload(broker)
    upload(broker)
    status = ask(broker)
    assert status.given_up_count == 1
    assert "not uploaded" in status.upload_problem
    segment.write_bytes(whole)
    upload(broker)
    assert ask(broker).given_up_count == 1
    asked = decide(broker, RequestCode.TIER_RESUME, TierResumeHeader())
    assert [(queue.topic, queue.queue_id) for queue in asked.queues] == [(TOPIC, 0)]
    upload(broker)
    status = ask(broker)
    assert (status.given_up_count, status.upload_problem) == (0, "")
    assert status.queues[0].tier_end == 10


async def test_only_a_queue_that_is_given_up_can_be_forgotten(broker: BrokerUnderTest) -> None:
    put(broker, 0, 5)
    upload(broker)
    header = TierForgetHeader(topic=TOPIC, queue_id=0, from_offset=0)
    answer = broker.ask(RequestCode.TIER_FORGET, header)
    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert not decide(broker, RequestCode.TIER_RESUME, TierResumeHeader()).queues
    assert read_all(broker) == [*range(5)]
