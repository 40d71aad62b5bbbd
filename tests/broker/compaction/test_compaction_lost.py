"""A compaction log that is not there: nothing passes for the topic, and nothing is written."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from headrace_broker.compaction.rebuilds import OtherQueue, Rebuild
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import (
    GetByKeyHeader,
    GetMinOffsetHeader,
    OffsetResponseHeader,
    SearchOffsetHeader,
)
from headrace_protocol.key_lookup import encode_keys
from tests.broker.compaction.test_compaction_lookups import key
from tests.broker.compaction.test_compaction_rebuild import (
    KEYS,
    MASTER,
    NAME,
    POLICY,
    compact,
    fill,
    found,
    give_up,
    lose_log,
    pulled,
    rebuild,
    save,
    send,
    start,
)
from tests.broker.compaction.test_compaction_source import C, create, follow
from tests.support.broker import Answer, BrokerUnderTest
from tests.support.wire import pull_header

LOST = r"the compaction log of queue 0 of topic C is lost, and the messages before queue offset"


def pull(broker: BrokerUnderTest, offset: int, code: int = RequestCode.PULL_MESSAGE) -> Answer:
    header = pull_header(offset, topic=C, sys_flag=0x14)
    return broker.ask(code, header)


def get_by_key(broker: BrokerUnderTest, name: str) -> Answer:
    header = GetByKeyHeader(topic=C, count=1, max_msg_bytes=1 << 20)
    return broker.ask(RequestCode.GET_BY_KEY, header, encode_keys([key(name)]))


def oldest(broker: BrokerUnderTest) -> int:
    """The oldest queue offset that the CommitLog has."""
    return broker.store.source(broker.store.queue(C, 0)).min_offset()


def require_lost(broker: BrokerUnderTest) -> None:
    first = oldest(broker)
    for answer in (
        pull(broker, 0),
        pull(broker, first - 1),
        pull(broker, 0, RequestCode.LITE_PULL_MESSAGE),
        *(get_by_key(broker, name) for name in (*KEYS, "nobody")),
    ):
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert answer.remark.startswith(f"{LOST} {first} are only there"), answer.remark
    assert pull(broker, first).code == ResponseCode.SUCCESS
    for code, header in (
        (RequestCode.GET_MIN_OFFSET, GetMinOffsetHeader(topic=C, queue_id=0)),
        (
            RequestCode.SEARCH_OFFSET_BY_TIMESTAMP,
            SearchOffsetHeader(topic=C, queue_id=0, timestamp=1),
        ),
    ):
        assert broker.ask(code, header).command.header(OffsetResponseHeader).offset == 0
    info = broker.compaction.runtime_info()
    assert info["compactionLostQueues"] == "1"
    assert info["compactionLostReason"].startswith(LOST)
    assert broker.store.followers.all[0].status().problem == "the log of C/0 is lost"


def test_reads_of_what_is_lost_fail_by_name_until_it_is_mounted(tmp_path: Path) -> None:
    values = fill(tmp_path / "a")
    lose_log(tmp_path / "a", tmp_path / "b")
    root = tmp_path / "b" / "store"
    for number in range(3):
        broker = start(tmp_path / "b")
        follow(broker)
        require_lost(broker)
        name = KEYS[number]
        values[name] = b"meanwhile %d" % number
        send(broker, name, values[name])
        follow(broker)
        compact(broker)
        require_lost(broker)
        kept_from = broker.store.source(broker.store.queue(C, 0)).unit(oldest(broker))[0]
        assert broker.store.followers.needed_from() <= kept_from
        broker.close()
    names = {path.name for path in (root / "compaction").rglob("*")}
    assert names <= {"headrace", "seed.json", "position-checkpoint"}, "nothing takes its place"
    shutil.rmtree(root / "compaction")
    shutil.copytree(tmp_path / "a/store/compaction", root / "compaction")
    broker = start(tmp_path / "b")
    assert found(broker) == values
    follow(broker)
    assert found(broker) == values
    assert broker.compaction.runtime_info()["compactionLostQueues"] == "0"


def test_a_rebuild_makes_it_whole(tmp_path: Path) -> None:
    values = fill(tmp_path / "a")
    lose_log(tmp_path / "a", tmp_path / "b")
    master, broker = start(tmp_path / "a"), start(tmp_path / "b")
    follow(broker)
    work = Rebuild(broker.compaction.queues, NAME, broker.clock.ms)
    assert work.begin(MASTER, POLICY.delete_retention_ms)
    work.take(pulled(master, 0))
    broker.compaction.queues.all()[NAME].replica.save(work.checkpoint)
    broker.close()
    broker = start(tmp_path / "b")
    follow(broker)
    require_lost(broker)
    assert rebuild(broker, master) > 0
    broker.compaction.rebuilds.on_rebuilt()
    assert found(broker) == values
    send(broker, "k0", b"later")
    follow(broker)
    assert not broker.store.followers.all[0].status().behind_messages
    assert found(broker) == values | {"k0": b"later"}
    broker.close()
    broker = start(tmp_path / "b")
    assert found(broker) == values | {"k0": b"later"}


def test_a_rebuild_from_another_queue_leaves_it_lost(tmp_path: Path) -> None:
    fill(tmp_path / "a")
    lose_log(tmp_path / "a", tmp_path / "b")
    other, broker = start(tmp_path / "other"), start(tmp_path / "b")
    create(other)
    send(other, "k0", b"x")
    follow(other)
    with pytest.raises(OtherQueue):
        rebuild(broker, other)
    follow(broker)
    broker.compaction.queues.all()[NAME].replica.discard()
    require_lost(broker)
    broker.close()
    broker = start(tmp_path / "b")
    follow(broker)
    require_lost(broker)


def test_what_is_lost_may_be_given_up(tmp_path: Path) -> None:
    values = fill(tmp_path / "a")
    lose_log(tmp_path / "a", tmp_path / "b")
    start(tmp_path / "b").close()
    give_up(tmp_path / "b")
    broker = start(tmp_path / "b")
    follow(broker)
    left = found(broker)
    assert left
    assert left.keys() < values.keys()


@pytest.mark.parametrize("ending", ["stop", "kill"])
def test_a_log_that_runs_have_emptied_is_not_lost(tmp_path: Path, ending: str) -> None:
    broker = start(tmp_path)
    create(broker)
    for number in range(100):
        send(broker, "k0", b"" if number == 99 else b"." * 100)
    follow(broker)
    for _ in range(3):
        compact(broker)
        broker.clock.ms += 2 * POLICY.delete_retention_ms
    log_files = sorted((tmp_path / "store/commitlog").iterdir())
    if ending == "stop":
        save(broker)
    else:
        broker.topics.saved.finish()
        broker.store.abandon()
    log_files[0].unlink()
    broker = start(tmp_path)
    assert oldest(broker) > 0
    assert found(broker) == {}
    assert get_by_key(broker, "k0").code == ResponseCode.SUCCESS
