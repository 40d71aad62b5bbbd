"""State that a host has brokers keep for it, such as groups, topics and progress, is bounded."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace_broker.consumer import filters
from headrace_broker.host_budget import Host, HostBudget
from headrace_broker.persistence import SavedFile
from headrace_broker.processors import pull as pulls
from headrace_protocol import bounds
from headrace_protocol.admin_headers import CloneGroupOffsetHeader, ResetOffsetHeader
from headrace_protocol.at_once import run_at_once
from headrace_protocol.bodies import (
    ConsumerData,
    HeartbeatData,
)
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.headers import (
    PullMessageHeader,
    StageAbortHeader,
    StageCommitHeader,
    StageDecideHeader,
    StageQueryHeader,
    StageSealHeader,
    UpdateConsumerOffsetHeader,
)
from headrace_protocol.java_hash import java_hash
from headrace_protocol.staging import Decision, StagedAttempt, encode_names
from headrace_protocol.waiting import at_once
from tests.broker.staging import test_staging
from tests.support.broker import Answer, BrokerUnderTest
from tests.support.channel import MemoryChannel
from tests.support.memory import HOST, kept_bytes
from tests.support.wire import send_header

# -- groups and topics -----------------------------------------------------------------------------


def pull(broker: BrokerUnderTest, **fields: Any) -> Answer:
    header: dict[str, Any] = {
        "consumer_group": "g",
        "topic": "t",
        "queue_id": 0,
        "queue_offset": 1,
        "max_msg_nums": 1,
        "sys_flag": 4,
        "commit_offset": 0,
        "suspend_timeout_millis": 0,
        "sub_version": 0,
        "subscription": "*",
    }
    return broker.ask(RequestCode.PULL_MESSAGE, PullMessageHeader(**{**header, **fields}))


def send(broker: BrokerUnderTest, topic: str, properties: str = "") -> Answer:
    return broker.ask(
        RequestCode.SEND_MESSAGE_V2, send_header(topic=topic, properties=properties), b"x"
    )


def join(broker: BrokerUnderTest, channel: MemoryChannel, data: HeartbeatData) -> Answer:
    return broker.ask(RequestCode.HEART_BEAT, body=data.encode(), channel=channel)


def test_groups_that_a_host_creates_are_bounded(broker: BrokerUnderTest) -> None:
    broker.create_topic("t")
    broker.budget.bytes_max = 20_000
    answers = [pull(broker, consumer_group=f"g{number}") for number in range(10)]
    refused = [answer for answer in answers if answer.code == ResponseCode.NO_PERMISSION]
    assert 0 < len(refused) < 10
    assert "the maximum for a host" in refused[0].remark
    body = HeartbeatData(client_id="c", consumer_data_set=[ConsumerData(group_name="more")])
    assert join(broker, MemoryChannel(), body).code == ResponseCode.NO_PERMISSION
    assert broker.groups.get("more") is None
    other = MemoryChannel()
    other.host_bytes = b"\x0a\0\0\1" + bytes(4)
    assert join(broker, other, body).code == ResponseCode.SUCCESS
    broker.groups.delete("g0")
    run_at_once(broker.offsets.delete_group("g0"))
    assert pull(broker, consumer_group="instead").code != ResponseCode.NO_PERMISSION


def test_topics_that_a_host_creates_are_bounded(broker: BrokerUnderTest) -> None:
    broker.budget.bytes_max = 10_000
    codes = [send(broker, f"t{number}").code for number in range(10)]
    assert codes[0] == ResponseCode.SUCCESS
    assert codes[-1] == ResponseCode.NO_PERMISSION
    assert broker.topics.get("t9") is None
    assert send(broker, "t0").code == ResponseCode.SUCCESS
    broker.topics.delete("t0")
    assert send(broker, "t9").code == ResponseCode.SUCCESS


@pytest.mark.slow
def test_a_host_is_charged_what_groups_and_topics_take(broker: BrokerUnderTest) -> None:
    # In their files too, which follow at once here.
    broker.groups.saved.finish = broker.topics.saved.finish = lambda: None  # type: ignore[method-assign]
    starts = iter(range(0, 1000, 100))

    def make() -> None:
        start = next(starts)
        for number in range(start, start + 100):
            broker.groups.get_or_create(f"group{number}", HOST)
            broker.topics.create_retry_topic(f"group{number}")
            broker.topics.create_on_send(f"topic{number}", "TBW102", 4, MemoryChannel())
        for saved in (broker.groups.saved, broker.topics.saved):
            SavedFile.finish(saved)

    # The least of three: other tests' threads allocate, too.
    kept = min(kept_bytes(make) for _ in range(3))
    assert 0 < kept <= broker.budget.kept_bytes(HOST) / 6


def test_a_network_is_one_host() -> None:
    channel = MemoryChannel()
    hosts = []
    for address in (2, 3, 1 << 64):
        channel.host_bytes = address.to_bytes(16, "big") + bytes(4)
        hosts.append(Host.of(channel))
    assert hosts[0] == hosts[1] != hosts[2]


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "127.0.0.2", "127.255.255.254", "::1", "::ffff:127.0.0.3"]
)
def test_this_machine_is_one_host(address: str) -> None:
    channel = MemoryChannel()
    channel.host_bytes = ip_address(address).packed + bytes(4)
    assert Host.of(channel) == HOST


def test_an_entry_that_grows_counts_once() -> None:
    budget = HostBudget(bytes_max=100)
    budget.keep(HOST, "a", 60)
    budget.keep(HOST, "a", 100)
    with pytest.raises(RequestError):
        budget.keep(HOST, "a", 101)
    assert budget.kept_bytes(HOST) == 100
    budget.keep(Host(b"x"), "a", 1)
    assert budget.kept_bytes(HOST) == 0
    budget.drop("a")
    budget.drop("a")
    assert budget.kept_bytes(HOST) == 0


def test_hosts_that_are_gone_keep_nothing() -> None:
    budget, numbers = HostBudget(), itertools.count()

    def come_and_go() -> None:
        for number in itertools.islice(numbers, 1000):
            budget.keep(Host(b"%d" % number), "a", 1)
            budget.drop("a")

    assert kept_bytes(come_and_go) < 10_000


# -- offsets ---------------------------------------------------------------------------------------


def test_a_commit_for_a_queue_that_is_not_there_is_rejected(broker: BrokerUnderTest) -> None:
    broker.create_topic("t", 2)
    broker.join("g", "c")
    for queue_id, code in ((1, ResponseCode.SUCCESS), (2, ResponseCode.INVALID_PARAMETER)):
        header = UpdateConsumerOffsetHeader(
            consumer_group="g", topic="t", queue_id=queue_id, commit_offset=1
        )
        assert broker.ask(RequestCode.UPDATE_CONSUMER_OFFSET, header).code == code
    assert broker.offsets.offsets_of("g", "t") == {1: 1}


def test_a_commit_for_a_queue_of_a_shrunk_topic_is_kept(broker: BrokerUnderTest) -> None:
    broker.create_topic("t", 4)
    broker.store_message("t", 3)
    broker.create_topic("t", 1)
    broker.join("g", "c")
    header = UpdateConsumerOffsetHeader(consumer_group="g", topic="t", queue_id=3, commit_offset=1)
    assert broker.ask(RequestCode.UPDATE_CONSUMER_OFFSET, header).code == ResponseCode.SUCCESS


def commit(broker: BrokerUnderTest, group: str, queue_id: int) -> int:
    header = UpdateConsumerOffsetHeader(
        consumer_group=group, topic="t", queue_id=queue_id, commit_offset=1
    )
    return broker.ask(RequestCode.UPDATE_CONSUMER_OFFSET, header).code


def test_a_host_makes_only_so_much_progress_be_kept(broker: BrokerUnderTest) -> None:
    broker.create_topic("t", 100)
    broker.join("g", "c")
    broker.join("h", "d")
    before = broker.budget.kept_bytes(HOST)
    assert commit(broker, "g", 0) == ResponseCode.SUCCESS
    first_bytes = broker.budget.kept_bytes(HOST) - before
    broker.budget.bytes_max = before + 2 * first_bytes
    codes = [commit(broker, "g", queue_id) for queue_id in range(100)]
    kept = codes.count(ResponseCode.SUCCESS)
    assert 1 < kept < 100
    assert codes[kept:] == [ResponseCode.NO_PERMISSION] * (100 - kept)
    assert pull(broker, consumer_group="h", queue_offset=0).code == ResponseCode.NO_PERMISSION
    run_at_once(broker.offsets.delete_group("g"))
    assert broker.budget.kept_bytes(HOST) == before
    assert pull(broker, consumer_group="h", queue_offset=0).code == ResponseCode.PULL_NOT_FOUND
    run_at_once(broker.offsets.delete_topic("t"))
    assert broker.budget.kept_bytes(HOST) == before


def test_a_pull_beyond_the_bound_of_its_host_makes_no_queue(broker: BrokerUnderTest) -> None:
    broker.create_topic("t", 50)
    broker.join("g", "c")
    pull(broker, consumer_group="g", queue_offset=0)
    broker.budget.bytes_max = broker.budget.kept_bytes(HOST)
    made = len(broker.store.queues)
    for queue_id in range(1, 50):
        answer = pull(broker, consumer_group="g", queue_id=queue_id, queue_offset=0)
        assert answer.code == ResponseCode.NO_PERMISSION
    assert len(broker.store.queues) == made


def test_a_host_is_charged_what_empty_queues_take(broker: BrokerUnderTest) -> None:
    broker.join("g", "c")
    before = broker.budget.kept_bytes(HOST)
    topics, charges = ["t", "u"], []
    names = iter(topics)
    for topic in topics:
        broker.create_topic(topic, 300)

    def pull_all() -> None:
        topic, charged = next(names), broker.budget.kept_bytes(HOST)
        for queue_id in range(300):
            pull(broker, topic=topic, queue_id=queue_id, queue_offset=0)
        charges.append(broker.budget.kept_bytes(HOST) - charged)

    assert 0 < kept_bytes(pull_all) <= charges[1]
    for topic in topics:
        at_once(broker.store.delete_queues(topic))
        run_at_once(broker.offsets.delete_topic(topic))
    assert broker.budget.kept_bytes(HOST) == before


def test_a_host_is_charged_what_progress_takes(broker: BrokerUnderTest) -> None:
    broker.create_topic("t", 200)
    names = iter("gh")
    charges = []

    def consume() -> None:
        group, before = next(names), broker.budget.kept_bytes(HOST)
        for queue_id in range(200):
            commit(broker, group, queue_id)
            broker.offsets.commit_pull(group, "t", queue_id, 1)
        broker.offsets.persist()
        charges.append(broker.budget.kept_bytes(HOST) - before)

    for name in "gh":
        broker.join(name, name)
    assert 0 < kept_bytes(consume) <= charges[1]


def move(broker: BrokerUnderTest, how: str, group: str) -> int:
    """Offsets for a group in all queues of t, by one request; returns the code of its answer."""
    if how == "clone":
        clone = CloneGroupOffsetHeader(src_group="source", dest_group=group, topic="t")
        return broker.ask(RequestCode.CLONE_GROUP_OFFSET, clone).code
    reset = ResetOffsetHeader(topic="t", group=group, timestamp=-1, is_force=True)
    return broker.ask(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, reset).code


@pytest.mark.parametrize("how", ["reset", "clone"])
def test_offsets_that_a_request_moves_count_for_its_host(broker: BrokerUnderTest, how: str) -> None:
    broker.create_topic("t", 500)
    for queue_id in range(500):
        broker.offsets.commit("source", "t", queue_id, 1)
    names = iter("gh")
    charges = []

    def do() -> None:
        group, before = next(names), broker.budget.kept_bytes(HOST)
        assert move(broker, how, group) == ResponseCode.SUCCESS
        broker.offsets.persist()
        charges.append(broker.budget.kept_bytes(HOST) - before)

    for name in "ghi":
        broker.groups.get_or_create(name, HOST)
    assert 0 < kept_bytes(do) <= charges[1]
    broker.budget.bytes_max = broker.budget.kept_bytes(HOST) + charges[1] - 1
    assert move(broker, how, "i") == ResponseCode.NO_PERMISSION
    assert broker.offsets.topics_of("i") == set()
    assert move(broker, how, "h") == ResponseCode.SUCCESS  # it counts already
    run_at_once(broker.offsets.delete_group("h"))
    assert move(broker, how, "i") == ResponseCode.SUCCESS


def test_progress_is_cloned_only_to_valid_groups(broker: BrokerUnderTest) -> None:
    broker.create_topic("t")
    broker.offsets.commit("g", "t", 0, 1)
    for name, code in (("D" * 121, ResponseCode.INVALID_PARAMETER), ("copy", 0)):
        header = CloneGroupOffsetHeader(src_group="g", dest_group=name, topic="t")
        assert broker.ask(RequestCode.CLONE_GROUP_OFFSET, header).code == code
    assert broker.offsets.groups_of("t") == {"g", "copy"}
    broker.budget.bytes_max = 0
    header = CloneGroupOffsetHeader(src_group="g", dest_group="other", topic="t")
    assert broker.ask(RequestCode.CLONE_GROUP_OFFSET, header).code == ResponseCode.NO_PERMISSION


# -- what is kept to save looking it up ------------------------------------------------------------


def test_long_tags_are_not_kept(tmp_path: Path) -> None:
    broker = BrokerUnderTest(tmp_path, commit_log_file_bytes=1 << 20)
    broker.create_topic("t")
    numbers = iter(range(1000))

    def store() -> None:
        for _ in range(50):
            tag = "t" * 3000 + str(next(numbers))
            answer = send(broker, "t", f"UNIQ_KEY\x01abc\x02TAGS\x01{tag}\x02")
            assert answer.code == ResponseCode.SUCCESS, answer.remark

    # The tags are 150 kB; a table of the store may grow meanwhile.
    assert kept_bytes(store) < 60_000


def test_subscriptions_of_pulls_are_kept_up_to_a_size(
    broker: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulls, "_TARGETS_BYTES_MAX", 200_000)
    monkeypatch.setattr(filters, "tags_code", java_hash)
    broker.create_topic("t")
    numbers = iter(range(1000))

    def ask() -> None:
        for _ in range(10):
            start = next(numbers) * 1000
            text = "||".join(f"{tag:07}" for tag in range(start, start + 1000))
            assert pull(broker, subscription=text).code != ResponseCode.SYSTEM_ERROR

    assert kept_bytes(ask) < 400_000


# -- staged writes ---------------------------------------------------------------------------------


def staged_requests(query_id: str) -> list[tuple[RequestCode, msgspec.Struct, bytes]]:
    query = {"query_id": query_id}
    attempt: dict[str, Any] = {**query, "batch_id": 0, "attempt": "a"}
    return [
        (RequestCode.STAGE_STATE, StageQueryHeader(**query), b""),
        (RequestCode.STAGE_FORGET, StageQueryHeader(**query), b""),
        (RequestCode.STAGE_SEAL, StageSealHeader(**attempt, block_count=1), b""),
        (RequestCode.STAGE_COMMIT, StageCommitHeader(**query, batch_id=0, decision_id="d"), b""),
        (RequestCode.STAGE_ABORT, StageAbortHeader(**query, batch_id=0), encode_names(["a"])),
    ]


@pytest.mark.parametrize("number", range(5))
def test_a_query_without_state_is_not_kept(broker: BrokerUnderTest, number: int) -> None:
    for query in range(10):
        code, header, body = staged_requests(f"q{query}")[number]
        broker.ask(code, header, body)
    assert broker.staging.queries == {}


def decide(broker: BrokerUnderTest, query_id: str, batch_id: int, names: int = 0) -> Answer:
    attempts = tuple(StagedAttempt(f"attempt-{n}", 1, 1) for n in range(names))
    decision = Decision("d", batch_id, {"another-broker": attempts})
    return broker.ask(
        RequestCode.STAGE_DECIDE, StageDecideHeader(query_id=query_id), decision.encode()
    )


def test_decisions_count_for_their_host_until_they_are_forgotten(broker: BrokerUnderTest) -> None:
    batches = iter((1, 2))

    def replace() -> None:
        batch_id = next(batches)
        for number in range(10):
            answer = decide(broker, f"q{number}", batch_id, 100 * batch_id)
            assert answer.code == ResponseCode.SUCCESS, answer.remark

    assert 0 < kept_bytes(replace) <= broker.budget.kept_bytes(HOST)
    counted = broker.budget.kept_bytes(HOST)
    broker.budget.bytes_max = counted
    assert decide(broker, "one-more", 1).code == ResponseCode.NO_PERMISSION
    assert "one-more" not in broker.staging.queries
    for query in broker.staging.queries.values():
        query.state = msgspec.structs.replace(query.state, applied_batch_id=2)
    for number in range(10):
        header = StageQueryHeader(query_id=f"q{number}")
        assert broker.ask(RequestCode.STAGE_FORGET, header).code == ResponseCode.SUCCESS
    assert broker.budget.kept_bytes(HOST) == 0
    assert broker.staging.queries == {}


async def test_staged_writes_count_for_their_host_until_expiry(
    broker: BrokerUnderTest,
) -> None:
    broker.create_topic("T")
    for query_id in ("q0", "q1"):
        assert test_staging.send(broker, "a", 0, b"b", query_id=query_id).code == 0
        assert test_staging.send(broker, "b", 0, b"b", query_id=query_id).code == 0
    broker.budget.bytes_max = broker.budget.kept_bytes(HOST)
    refused = test_staging.send(broker, "c", 0, b"b", query_id="q0")
    assert refused.code == ResponseCode.NO_PERMISSION
    abort = StageAbortHeader(query_id="q0", batch_id=0)
    assert broker.ask(RequestCode.STAGE_ABORT, abort, encode_names(["a"])).code == 0
    assert test_staging.send(broker, "c", 0, b"b", query_id="q0").code == 0
    old = broker.clock.ms / 1000 - broker.config.staged_reserved_ms / 1000 - 1
    for path in (broker.store.root / "staged").glob("*/*.blocks"):
        os.utime(path, (old, old))
    await broker.staging.expire()
    assert broker.staging.queries == {}
    assert broker.budget.kept_bytes(HOST) == 0


def test_a_decision_of_too_many_attempts_is_rejected(broker: BrokerUnderTest) -> None:
    answer = decide(broker, "q", 1, bounds.ITEMS_MAX + 1)
    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert broker.staging.queries == {}


def to_the_end(work: Iterator[None]) -> None:
    for _ in work:
        pass


def test_giving_up_thousands_of_attempts_lets_others_have_their_turn(
    broker: BrokerUnderTest,
) -> None:
    works: list[Iterator[None]] = []
    broker.registry.run_long = works.append
    broker.registry.slice_s = 0.0
    channel = MemoryChannel()
    names = encode_names([f"a{number}" for number in range(5000)])
    header = StageAbortHeader(query_id="q", batch_id=0)
    broker.send(RequestCode.STAGE_ABORT, header, names, channel)
    assert sum(1 for _ in works[0]) >= 5000 / 32
    ((answer, _),) = channel.replies()
    assert answer.code == ResponseCode.SUCCESS
    too_many = encode_names([f"a{number}" for number in range(bounds.ITEMS_MAX + 1)])
    broker.registry.run_long = to_the_end
    broker.registry.slice_s = 0.0
    assert broker.ask(RequestCode.STAGE_ABORT, header, too_many).code == (
        ResponseCode.INVALID_PARAMETER
    )
