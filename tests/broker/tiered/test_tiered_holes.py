"""Faults that Apache's tiered storage had, and a store of the tier that fails: none is here.

Numbers are those of apache/rocketmq; tests/conformance/FINDINGS.md names the tests of the others.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from headrace_broker.queue_directory import Use
from headrace_broker.store.store_source import GetStatus
from headrace_broker.tiered.driver.posix import PosixDriver
from headrace_protocol.errors import NotReady, RequestError
from headrace_protocol.message import decode_records
from tests.broker.tiered.test_tiered_storage import (
    BODY_BYTES,
    TOPIC,
    expire_log,
    put,
    read_all,
    source,
    start,
    tier_of,
    upload,
)
from tests.support.broker import BrokerUnderTest
from tests.support.stores import ready


def commit_offset(broker: BrokerUnderTest) -> int:
    queue = tier_of(broker).access.queue(TOPIC, 0)
    return queue.commit_offset if queue is not None else 0


def numbers_in(buffers: Any) -> list[int]:
    return [int(message.body.split()[0]) for part in buffers for message in decode_records(part)]


def test_the_end_of_a_full_file_is_uploaded(broker: BrokerUnderTest) -> None:
    """#8409: nothing has to arrive behind it."""
    for count in range(1, 10):  # a log file has four of these
        put(broker, count - 1, 1)
        upload(broker)
        assert commit_offset(broker) == count


async def test_uploaded_files_leave_the_disk(tmp_path: Path) -> None:
    """#8334: no reference to what was uploaded holds a file."""
    broker = start(tmp_path)
    put(broker, 0, 20)
    upload(broker)
    before = len(list((tmp_path / "store" / "commitlog").iterdir()))
    await expire_log(broker)
    assert len(list((tmp_path / "store" / "commitlog").iterdir())) < before
    assert not broker.store.cleaner.detached


@pytest.mark.parametrize("level", ["NOT_IN_DISK", "FORCE"])
async def test_pulls_advance_over_the_border_of_the_tiers(tmp_path: Path, level: str) -> None:
    """#7363: from any offset, with any count, nothing is read twice and nothing is skipped."""
    broker = start(tmp_path, tiered_storage_level=level)
    put(broker, 0, 20)
    upload(broker)
    await expire_log(broker)
    put(broker, 20, 5)
    reader = source(broker)
    for first in range(25):
        for count in (1, 2, 7):
            result = ready(partial(reader.get, first, count, 1 << 20, None))
            assert numbers_in(result.buffers) == [*range(first, result.next_offset)]
            assert result.next_offset > first


async def test_messages_behind_a_gap_have_their_own_offsets(tmp_path: Path) -> None:
    """A record that is missing does not shift what is read ahead with it."""
    broker = start(tmp_path, tiered_storage_level="FORCE", delete_untiered_enable=True)
    put(broker, 0, 4)
    upload(broker)
    put(broker, 4, 20)
    broker.store.index_tick()
    broker.store.flusher.flush_now()
    gap_end = await expire_log(broker)
    put(broker, 24, 6)
    upload(broker)
    reader, offset, found = source(broker), 0, []
    while offset < 30:
        result = ready(partial(reader.get, offset, 3, 100_000, None))
        messages = [each for part in result.buffers for each in decode_records(part)]
        found += [(each.queue_offset, int(each.body.split()[0])) for each in messages]
        assert result.next_offset > offset
        offset = result.next_offset
    assert gap_end > 4
    assert found == [(number, number) for number in (*range(4), *range(gap_end, 30))]


async def test_an_answer_keeps_to_the_size_asked_for(broker: BrokerUnderTest) -> None:
    """#9080: what was read ahead may be larger."""
    put(broker, 0, 20)
    upload(broker)
    await expire_log(broker)
    for bytes_max in (1, 3000, 5000):
        result = ready(partial(source(broker).get, 0, 32, bytes_max, None))
        sizes = sum(len(part) for part in result.buffers)
        assert sizes <= max(bytes_max, BODY_BYTES + 300)
        assert result.count == result.next_offset > 0


async def test_time_0_is_the_least_offset(broker: BrokerUnderTest) -> None:
    """#7345: not that of the last segment."""
    put(broker, 0, 20)
    upload(broker)
    await expire_log(broker)
    assert ready(partial(source(broker, Use.READ).offset_by_time, 0)) == 0


async def test_a_read_over_many_segments_is_whole(broker: BrokerUnderTest) -> None:
    """#10878: a segment has five of these messages at most."""
    put(broker, 0, 40)
    upload(broker)
    assert await expire_log(broker) > 30
    result = ready(partial(source(broker).get, 0, 30, 1 << 20, None))
    assert numbers_in(result.buffers) == [*range(30)]


async def test_an_unexpected_error_does_not_end_the_upload(
    broker: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """#8955: the next round uploads what the failed one did not."""
    put(broker, 0, 10)
    with monkeypatch.context() as patch:
        patch.setattr(PosixDriver, "append", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            upload(broker)
    put(broker, 10, 10)
    upload(broker)
    await expire_log(broker)
    assert read_all(broker) == [*range(20)]


async def test_what_has_expired_is_answered_with_the_least_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """#11168: metadata goes first, so a read of a deleted file is not repeated for ever."""
    broker = start(tmp_path, tiered_store_file_reserved_time=1)
    put(broker, 0, 20)
    upload(broker)
    await expire_log(broker)
    put(broker, 20, 3)
    upload(broker)
    with monkeypatch.context() as patch:
        patch.setattr(PosixDriver, "delete", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            tier_of(broker).clean_up({})
    result = ready(partial(source(broker).get, 0, 3, 1000, None))
    assert result.status is GetStatus.OFFSET_TOO_SMALL
    assert read_all(broker, offset=result.next_offset)[-1] == 22


# -- a store that fails ----------------------------------------------------------------------------


async def test_a_store_that_hangs_holds_only_those_who_need_it(
    broker: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """#9813: sends and pulls of new messages wait for no thread of the tier."""
    put(broker, 0, 20)
    upload(broker)
    local_min = await expire_log(broker)
    read, is_released = PosixDriver.read, Event()

    def hang(driver: PosixDriver, *args: Any) -> Any:
        assert is_released.wait(20)
        return read(driver, *args)

    monkeypatch.setattr(PosixDriver, "read", hang)
    with pytest.raises(NotReady) as waits:
        source(broker).get(0, 3, 100_000, None)
    thread = Thread(target=waits.value.fetch)
    thread.start()
    put(broker, 20, 5)
    assert read_all(broker, offset=local_min) == [*range(local_min, 25)]
    assert thread.is_alive()
    is_released.set()
    thread.join()
    assert source(broker).get(0, 3, 100_000, None).count == 3


@pytest.mark.parametrize("damage", ["segment removed", "byte changed"])
async def test_damage_behind_our_back_is_an_error_where_it_is(tmp_path: Path, damage: str) -> None:
    """#8076, #7035: it is reported, passes no message, and other messages are read."""
    broker = start(tmp_path, tiered_store_crc_check_enable=True)
    put(broker, 0, 20)
    upload(broker)
    local_min = await expire_log(broker)
    folder = tmp_path / "tier"
    first = min(folder.rglob("COMMIT_LOG/*"), key=lambda path: path.name[8:])
    if damage == "segment removed":
        first.unlink()
    else:
        data = bytearray(first.read_bytes())
        data[300] ^= 1
        first.write_bytes(data)
    for _ in range(5):  # it is no reason to give the store a pause
        with pytest.raises(RequestError, match="the tier can't serve this read"):
            ready(partial(source(broker).get, 0, 3, 1000, None))
    put(broker, 20, 2)
    assert read_all(broker, offset=local_min) == [*range(local_min, 22)]
    assert read_all(broker, offset=8) == [*range(8, 22)]
