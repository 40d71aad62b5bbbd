"""Faults that Apache's tiered storage had, and a store of the tier that fails: none is here.

Numbers are those of apache/rocketmq; tests/conformance/FINDINGS.md names the tests of the others.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from threading import Thread

import pytest

from headrace_broker.store.store_source import GetStatus
from headrace_protocol.errors import NotReady, RequestError
from tests.support.broker import BrokerUnderTest
from tests.support.hanging import Hanging
from tests.support.object_tiers import Fault, FaultyDriver
from tests.support.stores import ready
from tests.support.tiered_broker import (
    TOPIC,
    expire_log,
    put,
    read_all,
    source,
    start,
    tier_of,
    upload,
    wrap_driver,
)


def commit_offset(broker: BrokerUnderTest) -> int:
    queue = tier_of(broker).access.queue(TOPIC, 0)
    return queue.commit_offset if queue is not None else 0


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


async def test_an_unexpected_error_does_not_end_the_upload(broker: BrokerUnderTest) -> None:
    """#8955: the next round uploads what the failed one did not."""
    driver = wrap_driver(broker, FaultyDriver)
    put(broker, 0, 10)
    driver.fail("append", fault=Fault.RAISES)
    with pytest.raises(ZeroDivisionError):
        upload(broker)
    driver.fail()
    put(broker, 10, 10)
    upload(broker)
    await expire_log(broker)
    assert read_all(broker) == [*range(20)]


async def test_what_has_expired_is_answered_with_the_least_offset(tmp_path: Path) -> None:
    """#11168: metadata goes first, so a read of a deleted file is not repeated for ever."""
    broker = start(tmp_path, tiered_store_file_reserved_time=1)
    driver = wrap_driver(broker, FaultyDriver)
    put(broker, 0, 20)
    upload(broker)
    await expire_log(broker)
    put(broker, 20, 3)
    upload(broker)
    driver.fail("delete", fault=Fault.RAISES)
    with pytest.raises(ZeroDivisionError):
        tier_of(broker).clean_up({})
    result = ready(partial(source(broker).get, 0, 3, 1000, None))
    assert result.status is GetStatus.OFFSET_TOO_SMALL
    assert read_all(broker, offset=result.next_offset)[-1] == 22


# -- a store that fails ----------------------------------------------------------------------------


async def test_a_store_that_hangs_holds_only_those_who_need_it(broker: BrokerUnderTest) -> None:
    """#9813: sends and pulls of new messages wait for no thread of the tier."""
    driver = wrap_driver(broker, Hanging)
    put(broker, 0, 20)
    upload(broker)
    local_min = await expire_log(broker)
    driver.hang("read")
    with pytest.raises(NotReady) as waits:
        source(broker).get(0, 3, 100_000, None)
    thread = Thread(target=waits.value.fetch)
    thread.start()
    put(broker, 20, 5)
    assert read_all(broker, offset=local_min) == [*range(local_min, 25)]
    assert driver.is_hung()
    assert thread.is_alive()
    driver.release_all()
    thread.join()
    assert source(broker).get(0, 3, 100_000, None).count == 3


@pytest.mark.parametrize("damage", ["segment removed", "byte changed", "cut short"])
async def test_damage_behind_our_back_is_an_error_where_it_is(tmp_path: Path, damage: str) -> None:
    """#8076, #7035: it is reported, passes no message, and other messages are read."""
    broker = start(tmp_path, tiered_store_crc_check_enable=True)
    put(broker, 0, 20)
    upload(broker)
    local_min = await expire_log(broker)
    folder = tmp_path / "tier"
    first = min(folder.rglob("COMMIT_LOG/*"), key=lambda path: path.name[8:])
    sound = first.read_bytes()
    match damage:
        case "segment removed":
            first.unlink()
        case "byte changed":
            first.write_bytes(sound[:300] + bytes([sound[300] ^ 1]) + sound[301:])
        case "cut short":
            first.write_bytes(sound[:100])
    for _ in range(5):  # it is no reason to give the store a pause
        with pytest.raises(RequestError, match="the tier can't serve this read"):
            ready(partial(source(broker).get, 0, 3, 1000, None))
    put(broker, 20, 2)
    assert read_all(broker, offset=local_min) == [*range(local_min, 22)]
    assert read_all(broker, offset=8) == [*range(8, 22)]
    first.write_bytes(sound)
    assert read_all(broker) == [*range(22)]
