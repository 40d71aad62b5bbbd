"""Answers of compacted queues: from the compaction log, then from the CommitLog."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from random import Random
from typing import Any

import pytest

from headrace_broker.compaction.compactor import Request
from headrace_broker.compaction.run import Job, Run
from headrace_broker.compaction.run_state import MarkerTimes, RunState
from headrace_broker.compaction.segments import COMPACTING, Folders
from headrace_broker.topics.attributes import CompactionPolicy
from headrace_protocol.admin_headers import DeleteTopicHeader, GetTopicStatsHeader
from headrace_protocol.bodies import TopicConfig
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import (
    GetMinOffsetHeader,
    OffsetResponseHeader,
    PullMessageHeader,
    PullMessageResponseHeader,
)
from headrace_protocol.message import StoredMessage, decode_records
from tests.support.broker import BrokerUnderTest, broker_config
from tests.support.followers import local_queue
from tests.support.golden import CONFIG, STORES, copy_golden_store, golden_settings, manifest
from tests.support.stores import crash

C = "C"
SIZES = {"compaction_mapped_file_size": 4096, "compaction_cq_mapped_file_size": 460}


def start(folder: Path, **store: Any) -> BrokerUnderTest:
    config = broker_config(folder, **SIZES)
    return BrokerUnderTest(folder, config, commit_log_file_bytes=1 << 16, **store)


def create(broker: BrokerUnderTest) -> TopicConfig:
    return broker.create_topic(C, 1, attributes={"cleanup.policy": "COMPACTION"})


@pytest.fixture
def broker(tmp_path: Path) -> BrokerUnderTest:
    """With an empty compacted topic."""
    broker = start(tmp_path)
    create(broker)
    return broker


def fill(broker: BrokerUnderTest, first: int, end: int) -> None:
    """Messages with the tags t0, t1 and t2 in turn."""
    for number in range(first, end):
        broker.store_message(C, 0, b"%d" % number, KEYS=f"k{number}", TAGS=f"t{number % 3}")


def follow(broker: BrokerUnderTest) -> None:
    broker.store.flusher.flush_now()
    broker.store.followers.finish()


def follow_unsaved(broker: BrokerUnderTest) -> None:
    """As in the seconds before the next save."""
    broker.store.flusher.flush_now()
    for work in broker.store.followers.all[0]._follow():
        work.run()


def log_end(broker: BrokerUnderTest) -> int:
    """Queue offset at which the compaction log ends."""
    found = broker.compaction.queues.find(broker.store.queue(C, 0))
    return found.log.end_offset if found is not None else 0


def pull(
    broker: BrokerUnderTest, offset: int = 0, topic: str = C, **fields: Any
) -> tuple[int, PullMessageResponseHeader, list[StoredMessage]]:
    header = {
        "consumer_group": "g",
        "topic": topic,
        "queue_id": 0,
        "queue_offset": offset,
        "max_msg_nums": 32,
        "sys_flag": 4,
        "commit_offset": 0,
        "suspend_timeout_millis": 0,
        "sub_version": 0,
        "subscription": "*",
    }
    answer = broker.ask(RequestCode.PULL_MESSAGE, PullMessageHeader(**{**header, **fields}))
    head = answer.command.header(PullMessageResponseHeader)
    return answer.code, head, decode_records(answer.body) if answer.body else []


def read(broker: BrokerUnderTest, topic: str = C, queue_id: int = 0) -> list[StoredMessage]:
    """All messages from offset 0 on."""
    offset = 0
    found: list[StoredMessage] = []
    while True:
        code, head, messages = pull(broker, offset, topic, queue_id=queue_id)
        if code not in {ResponseCode.SUCCESS, ResponseCode.PULL_RETRY_IMMEDIATELY}:
            assert code == ResponseCode.PULL_NOT_FOUND
            return found
        found += messages
        assert head.next_begin_offset > offset
        offset = head.next_begin_offset


def numbers(broker: BrokerUnderTest) -> list[int]:
    return [int(message.body) for message in read(broker)]


# -- both logs -------------------------------------------------------------------------------------


def test_statistics_count_both_logs(tmp_path: Path) -> None:
    broker = start(tmp_path)
    start_ms = broker.clock.ms
    create(broker)
    fill(broker, 0, 30)
    follow(broker)
    fill(broker, 30, 40)
    stats = broker.ask(
        RequestCode.GET_TOPIC_STATS_INFO, GetTopicStatsHeader(topic=C, with_bytes=True)
    )
    record_bytes = sum(message.size for message in read(broker))
    assert f'"recordBytes":{record_bytes}'.encode() in stats.body
    assert f'"lastUpdateTimestamp":{start_ms + 39_000}'.encode() in stats.body


# -- runs ------------------------------------------------------------------------------------------


def compact(broker: BrokerUnderTest) -> None:
    """A run over everything that was followed."""
    queues = broker.compaction.queues
    found = queues.find(broker.store.queue(C, 0))
    assert found is not None
    with queues.lock:
        found.log.roll()
        found.log.sync()
        job = Job(0, broker.clock.ms, broker.clock.ms, 0, MarkerTimes([], []), 1 << 20)
        run = Run(found.log.segments, job, lambda _count: None)
        below = found.log.folders.below(COMPACTING)
        result = run.compact(below, found.log.sizes, broker.store.fs)
        found.swap.swap(found.log, result.groups, RunState(position=result.next_position))


def compact_when_due(broker: BrokerUnderTest) -> None:
    """A run as the schedule makes it, after the time of the delete markers in an earlier one."""
    policy = CompactionPolicy(delete_retention_ms=1000, max_lag_ms=0)
    broker.clock.ms += 2 * policy.delete_retention_ms
    request = Request((C, 0), policy, broker.clock.ms, 1 << 20, is_forced=True)
    assert broker.compaction.compactor.compact(request) is not None


def newest(broker: BrokerUnderTest) -> dict[str, int]:
    """The newest value of each key, read from offset 0 on, whose offsets ascend."""
    messages = read(broker)
    offsets = [message.queue_offset for message in messages]
    assert offsets == sorted(set(offsets))
    return {message.properties["KEYS"]: int(message.body) for message in messages}


@pytest.mark.parametrize("ending", ["none", "stop", "kill"])
def test_the_newest_value_of_each_key_stays_after_runs(tmp_path: Path, ending: str) -> None:
    broker = start(tmp_path)
    create(broker)
    table: dict[str, int] = {}
    rng = Random(5)
    for life in range(4):
        for number in range(life * 100, life * 100 + 60):
            key = f"k{rng.randrange(20)}"
            broker.store_message(C, 0, b"%d" % number, KEYS=key)
            table[key] = number
        assert newest(broker) == table
        follow(broker)
        compact(broker)
        assert newest(broker) == table
        assert len(read(broker)) == len(table)
        assert pull(broker, 0)[2][0].queue_offset == pull(broker)[1].min_offset > 0
        broker.store_message(C, 0, b"%d" % life, KEYS=f"life{life}")
        table[f"life{life}"] = life
        broker.topics.saved.finish()
        if ending != "none":
            broker.close() if ending == "stop" else crash(broker.store)
            broker = start(tmp_path)
        assert newest(broker) == table


# -- starts and stops ------------------------------------------------------------------------------


def test_messages_that_are_followed_again_have_been_part_of_no_run(broker: BrokerUnderTest) -> None:
    for value in (b"old", b""):
        broker.store_message(C, 0, value, KEYS="k")
    follow(broker)
    compaction = broker.compaction
    compact(broker)
    compacted = compaction.queues.open(C, 0)
    assert compacted.state_file.load().position == 2
    # After an error the follower cuts the log, and the dropped value is in it again.
    for _ in range(2):
        compaction.follower.resume(local_queue(broker, C), 0)
    assert compacted.log.end_offset == 0
    assert compacted.state_file.load().position == 0


@pytest.mark.parametrize("is_lost", [False, True])
def test_what_a_start_follows_again_has_been_part_of_no_run(tmp_path: Path, is_lost: bool) -> None:
    broker = start(tmp_path)
    create(broker)
    broker.topics.saved.finish()
    for value in (b"old", b""):
        broker.store_message(C, 0, value, KEYS="k")
    follow(broker)
    broker.store_message(C, 0, b"x", KEYS="other")
    broker.store.flusher.flush_now()
    follow_unsaved(broker)
    for _ in range(2):
        compact_when_due(broker)
    assert [message.body for message in read(broker)] == [b"x"]
    crash(broker.store)
    if is_lost:
        for path in (*tmp_path.glob("store/compaction/*/C/0/0*"),):
            path.unlink()
    # The log is cut where it was saved, and nothing is left of it.
    broker = start(tmp_path)
    follow(broker)
    compact_when_due(broker)
    # What runs have dropped is not followed again, unless the log was lost.
    assert [message.body for message in read(broker)] == ([b"", b"x"] if is_lost else [b"x"])


def test_messages_that_a_run_has_dropped_are_not_followed_again_after_an_error(
    broker: BrokerUnderTest,
) -> None:
    fill(broker, 0, 3)
    fill(broker, 2, 4)  # the second message of k2 replaces the one at queue offset 2
    follow(broker)
    compact(broker)
    compaction = broker.compaction
    compacted = compaction.queues.open(C, 0)
    compaction.follower.resume(local_queue(broker, C), 4)
    # Its file has other records where the dropped one was; a reply may be sending them.
    assert compaction.follower.resume(local_queue(broker, C), 3) == 3
    assert compacted.log.end_offset == 2


@pytest.mark.parametrize("is_clean", [True, False])
def test_a_start_goes_on_where_the_last_life_ended(tmp_path: Path, is_clean: bool) -> None:
    broker = start(tmp_path)
    create(broker)
    fill(broker, 0, 30)
    follow(broker)
    fill(broker, 30, 45)
    broker.topics.saved.finish()
    if is_clean:
        broker.close()
    else:
        crash(broker.store)
    broker = start(tmp_path)
    assert log_end(broker) == (45 if is_clean else 30)
    assert numbers(broker) == list(range(45))
    follow(broker)
    assert log_end(broker) == 45
    assert numbers(broker) == list(range(45))


def test_a_stop_is_not_clean_if_the_compaction_log_lacks_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = start(tmp_path)
    create(broker)
    fill(broker, 0, 10)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(broker.compaction.follower, "follow", fail)
        broker.topics.saved.finish()
        broker.close()
    assert (tmp_path / "store/abort").exists()
    broker = start(tmp_path)
    assert numbers(broker) == list(range(10))
    broker.close()
    assert not (tmp_path / "store/abort").exists()


def test_old_log_files_go_once_the_compaction_log_has_their_messages(
    broker: BrokerUnderTest,
) -> None:
    fill(broker, 0, 30)
    assert broker.store.followers.needed_from() == 0
    follow(broker)
    assert broker.store.followers.needed_from() > broker.store.commit_log.max_offset


# -- deletion --------------------------------------------------------------------------------------


def delete(broker: BrokerUnderTest) -> None:
    answer = broker.ask(RequestCode.DELETE_TOPIC_IN_BROKER, DeleteTopicHeader(topic=C))
    assert answer.code == ResponseCode.SUCCESS, answer.remark


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("is_told", [False, True])
def test_a_topic_made_again_is_empty(tmp_path: Path, is_told: bool, is_killed: bool) -> None:
    """is_told: whether the follower still learns of the deletion before the topic is made again."""
    broker = start(tmp_path)
    create(broker)
    fill(broker, 0, 30)
    follow(broker)
    delete(broker)
    if is_told:
        follow(broker)
        assert not Folders.of(tmp_path / "store", C, 0).log.exists()
    create(broker)
    fill(broker, 100, 110)
    if is_killed:
        broker.topics.saved.finish()
        broker.topics.incarnations.saved.finish()
        crash(broker.store)
        broker = start(tmp_path)
    assert numbers(broker) == list(range(100, 110))
    follow(broker)
    assert log_end(broker) == 10
    assert numbers(broker) == list(range(100, 110))


def test_a_topic_made_again_is_empty_without_its_id(tmp_path: Path) -> None:
    """As after a kill in the middle of its second deletion."""
    broker = start(tmp_path)
    create(broker)
    fill(broker, 0, 30)
    follow(broker)
    delete(broker)
    create(broker)
    fill(broker, 100, 102)
    broker.store.flusher.flush_now()
    broker.topics.saved.finish()
    crash(broker.store)
    for path in (tmp_path / "store/config").glob("topicIncarnation.json*"):
        path.unlink()
    broker = start(tmp_path)
    assert numbers(broker) == [100, 101]
    fill(broker, 102, 110)
    assert numbers(broker) == list(range(100, 110))
    follow(broker)
    assert log_end(broker) == 10


# -- stores of Apache RocketMQ ---------------------------------------------------------------------


def start_golden(folder: Path) -> BrokerUnderTest:
    sizes = dataclasses.asdict(golden_settings(folder / "store"))
    del sizes["root"]
    return BrokerUnderTest(folder, broker_config(folder, **CONFIG), **sizes)


def golden_messages(name: str) -> dict[int, dict[int, str]]:
    """Keys by queue and queue offset, as the official client read them."""
    found: dict[int, dict[int, str]] = {}
    for message in manifest(name)["messages"]:
        if message["topic"] == "G_COMPACT":
            found.setdefault(message["queueId"], {})[message["queueOffset"]] = message["keys"]
    return found


@pytest.mark.parametrize("name", STORES)
@pytest.mark.parametrize("is_expired", [False, True])
def test_a_compacted_topic_of_apaches_broker(tmp_path: Path, name: str, is_expired: bool) -> None:
    """is_expired: whether the CommitLog has lost its first files."""
    root = copy_golden_store(name, tmp_path / "store")
    expected = golden_messages(name)
    for number in range(2):
        broker = start_golden(tmp_path)
        for queue_id, keys in expected.items():
            kept = {
                m.queue_offset: m.properties["KEYS"] for m in read(broker, "G_COMPACT", queue_id)
            }
            assert kept.items() >= keys.items()
            header = GetMinOffsetHeader(topic="G_COMPACT", queue_id=queue_id)
            answer = broker.ask(RequestCode.GET_MIN_OFFSET, header)
            # After a crash of another broker the log is written again from the CommitLog.
            oldest = min(keys) if name == "clean" else 0
            assert answer.command.header(OffsetResponseHeader).offset == oldest
        follow(broker)
        broker.close()
        if not number and is_expired:
            for path in sorted((root / "commitlog").iterdir())[:-1]:
                path.unlink()
