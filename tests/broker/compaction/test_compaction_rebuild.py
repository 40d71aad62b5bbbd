"""Rebuilds of compacted queues: from another broker, resumed, refused, killed at any step."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest

from headrace_broker.compaction.compactor import Request
from headrace_broker.compaction.master import Pulled
from headrace_broker.compaction.rebuilds import OtherQueue, Rebuild
from headrace_broker.topics.attributes import CompactionPolicy
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.columns import RecordColumns
from headrace_protocol.headers import PullMessageResponseHeader
from tests.broker.compaction.test_compaction_lookups import get, key
from tests.broker.compaction.test_compaction_source import SIZES, C, create, follow, read
from tests.support.broker import BrokerUnderTest, broker_config
from tests.support.faulty_files import FaultyFiles, PowerCut
from tests.support.stores import SetClock
from tests.support.wire import pull_header

NAME = (C, 0)
POLICY = CompactionPolicy(delete_retention_ms=10**9, max_lag_ms=0)
KEYS = [f"k{number}" for number in range(12)]
MASTER = "127.0.0.1:1"
FIRST_MS = 1_700_000_000_000


def start(folder: Path, start_ms: int = FIRST_MS + 10**6, **store: Any) -> BrokerUnderTest:
    config, clock = broker_config(folder, **SIZES), SetClock(start_ms)
    return BrokerUnderTest(folder, config, clock, commit_log_file_bytes=1 << 13, **store)


def send(broker: BrokerUnderTest, key_: str, body: bytes) -> None:
    broker.store_message(C, 0, body, KEYS=key_, TAGS="t")


def compact(broker: BrokerUnderTest) -> None:
    request = Request(NAME, POLICY, broker.clock.ms, 2000, is_forced=True)
    broker.compaction.compactor.compact(request)


def fill(folder: Path) -> dict[str, bytes]:
    """A master's store; returns the newest values. Half of the keys are in its oldest part only."""
    broker = start(folder, FIRST_MS)
    create(broker)
    values = {}
    for number in range(100):
        name = KEYS[number % 12 if number < 30 else 6 + number % 6]
        values[name] = b"%d" % number + b"." * 100
        send(broker, name, values[name])
    send(broker, "k1", b"")
    del values["k1"]
    follow(broker)
    save(broker)
    return values


def save(broker: BrokerUnderTest) -> None:
    broker.topics.saved.finish()
    broker.topics.incarnations.saved.finish()
    broker.close()


def lose(master: Path, folder: Path) -> None:
    """Make a copy of a master's store that has lost the older messages and given them up."""
    lose_log(master, folder)
    give_up(folder)


def give_up(folder: Path) -> None:
    own = folder / "store/compaction/headrace" / C / "0"
    own.mkdir(parents=True, exist_ok=True)
    (own / "given-up").touch()


def lose_log(master: Path, folder: Path) -> None:
    """Make a copy of a master's store without its compaction logs and the oldest messages."""
    shutil.copytree(master, folder)
    shutil.rmtree(folder / "store" / "compaction")
    oldest, *_ = sorted((folder / "store" / "commitlog").iterdir())
    oldest.unlink()


def pulled(master: BrokerUnderTest, offset: int) -> Pulled:
    """A few messages at a time, as the pulls of a small limit return them."""
    header = pull_header(offset, topic=C, max_msg_nums=5, sys_flag=0x14)
    answer = master.ask(RequestCode.LITE_PULL_MESSAGE, header)
    head = answer.command.header(PullMessageResponseHeader)
    if answer.code == ResponseCode.SUCCESS:
        records = RecordColumns.from_records(answer.body)
        return Pulled(records, head.next_begin_offset, head.max_offset)
    assert answer.code == ResponseCode.PULL_NOT_FOUND
    return Pulled(None, None, head.max_offset)


def rebuild(broker: BrokerUnderTest, master: BrokerUnderTest) -> int:
    """Rebuild to the end; returns the queue offset at which it was resumed."""
    compaction = broker.compaction
    work = Rebuild(compaction.queues, NAME, broker.clock.ms)
    if not work.begin(MASTER, POLICY.delete_retention_ms):
        return -1
    first = work.checkpoint.position
    while not work.is_complete():
        work.take(pulled(master, work.checkpoint.position))
    request = Request(NAME, POLICY, broker.clock.ms, 2000, is_forced=True)
    assert work.merge(compaction.compactor, request)
    return first


def found(broker: BrokerUnderTest) -> dict[str, bytes]:
    """The newest values by pulls from offset 0; those by key must be the same."""
    messages = read(broker)
    offsets = [message.queue_offset for message in messages]
    assert offsets == sorted(set(offsets))
    values = {message.properties["KEYS"]: message.body for message in messages}
    by_key = dict(zip(KEYS, get(broker, *map(key, KEYS)), strict=True))
    assert {name: by_key[name] for name in values} == values
    return {name: value for name, value in values.items() if value}


def replicating(folder: Path) -> list[Path]:
    return [*(folder / "store").rglob("replicating/*"), *(folder / "store").rglob("rebuild.json*")]


def test_a_rebuilt_queue_has_the_newest_value_of_each_key(tmp_path: Path) -> None:
    values = fill(tmp_path / "a")
    lose(tmp_path / "a", tmp_path / "b")
    master, broker = start(tmp_path / "a"), start(tmp_path / "b")
    follow(broker)
    assert found(broker).keys() < values.keys()
    assert rebuild(broker, master) == 0
    assert found(broker) == values
    assert not replicating(tmp_path / "b")
    send(broker, "k0", b"later")
    follow(broker)
    compact(broker)
    assert found(broker) == values | {"k0": b"later"}
    broker.close()
    again = start(tmp_path / "b")
    assert found(again) == values | {"k0": b"later"}


def test_a_queue_whose_files_lie_beyond_2_gib_is_rebuilt(tmp_path: Path) -> None:
    values = fill(tmp_path / "a")
    lose(tmp_path / "a", tmp_path / "b")
    master, broker = start(tmp_path / "a"), start(tmp_path / "b")
    log = broker.compaction.queues.open(*NAME).log
    log.leave_names(-(-(1 << 32) // log.sizes.log_bytes))
    follow(broker)
    assert log.segments[0].base >= 1 << 32
    assert rebuild(broker, master) == 0
    assert found(broker) == values
    send(broker, "k0", b"later")
    follow(broker)
    assert log.segments[-1].base > 1 << 32
    compact(broker)
    broker.close()
    again = start(tmp_path / "b")
    assert found(again) == values | {"k0": b"later"}


def test_messages_that_arrive_during_a_rebuild_stay_newer(tmp_path: Path) -> None:
    values = fill(tmp_path / "a")
    lose(tmp_path / "a", tmp_path / "b")
    master, broker = start(tmp_path / "a"), start(tmp_path / "b")
    compaction = broker.compaction
    follow(broker)
    work = Rebuild(compaction.queues, NAME, broker.clock.ms)
    assert work.begin(MASTER, POLICY.delete_retention_ms)
    for number in range(100):
        if not work.is_complete():
            work.take(pulled(master, work.checkpoint.position))
        name = KEYS[number % 3]
        values[name] = b"new %d" % number
        send(broker, name, values[name])
        follow(broker)
        if number % 10 == 0:
            compact(broker)
    request = Request(NAME, POLICY, broker.clock.ms, 2000, is_forced=True)
    assert work.merge(compaction.compactor, request)
    assert found(broker) == values


def test_a_second_rebuild_brings_no_deleted_key_back(tmp_path: Path) -> None:
    values = fill(tmp_path / "a")
    lose(tmp_path / "a", tmp_path / "b")
    master, broker = start(tmp_path / "a"), start(tmp_path / "b")
    follow(broker)
    rebuild(broker, master)
    send(broker, "k0", b"x")
    follow(broker)
    broker.clock.ms += 2 * POLICY.delete_retention_ms
    compact(broker)
    assert not [message for message in read(broker) if message.properties["KEYS"] == "k1"]
    rebuild(broker, master)
    assert found(broker) == values | {"k0": b"x"}


def test_a_rebuild_brings_no_key_back_whose_marker_was_the_last_message(tmp_path: Path) -> None:
    values = fill(tmp_path / "a")
    lose(tmp_path / "a", tmp_path / "b")
    master, broker = start(tmp_path / "a"), start(tmp_path / "b")
    follow(broker)
    log = broker.compaction.queues.open(*NAME).log
    end = log.end_offset
    for _ in range(2):
        compact(broker)
        broker.clock.ms += 2 * POLICY.delete_retention_ms
    assert log.end_offset < end
    rebuild(broker, master)
    # Until then the marker is read from the CommitLog.
    send(broker, "k0", b"x")
    follow(broker)
    assert found(broker) == values | {"k0": b"x"}


def test_a_rebuild_resumes_after_a_start(tmp_path: Path) -> None:
    values = fill(tmp_path / "a")
    lose(tmp_path / "a", tmp_path / "b")
    master, broker = start(tmp_path / "a"), start(tmp_path / "b")
    follow(broker)
    work = Rebuild(broker.compaction.queues, NAME, broker.clock.ms)
    work.begin(MASTER, POLICY.delete_retention_ms)
    work.take(pulled(master, 0))
    queue = broker.compaction.queues.all()[NAME]
    queue.replica.save(work.checkpoint)
    broker.close()
    broker = start(tmp_path / "b")
    assert broker.compaction.rebuilds.is_pending(C)
    assert rebuild(broker, master) == work.checkpoint.position > 0
    assert found(broker) == values


def test_a_queue_with_other_messages_is_refused(tmp_path: Path) -> None:
    fill(tmp_path / "a")
    lose(tmp_path / "a", tmp_path / "b")
    other, short = start(tmp_path / "other"), start(tmp_path / "short")
    broker = start(tmp_path / "b")
    follow(broker)
    for each, count in ((other, 120), (short, 10)):
        create(each)
        each.clock.ms += 7
        for number in range(count):
            send(each, "other", b"%d" % number)
        follow(each)
    before = found(broker)
    with pytest.raises(OtherQueue, match="is not that of this broker"):
        rebuild(broker, other)
    with pytest.raises(OtherQueue, match="its queue ends at 10, before"):
        rebuild(broker, short)
    assert found(broker) == before
    for each in (other, short, broker):
        each.close()


def test_a_deleted_topic_ends_its_rebuild(tmp_path: Path) -> None:
    fill(tmp_path / "a")
    lose(tmp_path / "a", tmp_path / "b")
    master, broker = start(tmp_path / "a"), start(tmp_path / "b")
    follow(broker)
    queues = broker.compaction.queues
    work = Rebuild(queues, NAME, broker.clock.ms)
    assert work.begin(MASTER, POLICY.delete_retention_ms)
    work.take(pulled(master, 0))
    queues.delete(*NAME)
    work.take(pulled(master, 5))
    assert work.is_complete()
    request = Request(NAME, POLICY, broker.clock.ms, 2000, is_forced=True)
    assert work.merge(broker.compaction.compactor, request)
    assert not (tmp_path / "b/store/compaction/compactionLog" / C / "0").exists()


@pytest.mark.slow
@pytest.mark.parametrize("is_cut", [False, True], ids=["kill", "power cut"])
def test_a_rebuild_survives_a_crash_at_any_operation(tmp_path: Path, *, is_cut: bool) -> None:
    values = fill(tmp_path / "a")
    lose(tmp_path / "a", tmp_path / "lost")
    prepared = start(tmp_path / "lost")
    follow(prepared)
    left = found(prepared)
    prepared.close()
    master = start(tmp_path / "a")
    number, is_over = 0, False
    while not is_over:
        folder, rng = tmp_path / str(number), Random(number)
        shutil.copytree(tmp_path / "lost", folder)
        files = FaultyFiles(folder / "store", rng)
        broker = start(folder, files=files)
        files.end_in(number, is_cut=is_cut)
        try:
            rebuild(broker, master)
            is_over = True
        except PowerCut:
            pass
        broker.store.abandon()
        if files.image is not None:
            files.image.write_to(folder / "store")
        broker = start(folder)
        follow(broker)
        kept = found(broker)
        assert kept.items() >= left.items(), number
        assert kept in (left, values), number
        rebuild(broker, master)
        assert found(broker) == values, number
        assert not replicating(folder), number
        broker.close()
        shutil.rmtree(folder)
        number += rng.randrange(1, 16)
    assert number > 30
