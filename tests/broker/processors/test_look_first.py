"""A request that waits at any of its looks has changed nothing yet, and ends as any other.

Every request that looks at the store is run with each of its looks failing once, in turn.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace_broker.store.files import page_cache
from headrace_broker.store.files.residency import OLD_DATA
from headrace_protocol.channel import Channel
from headrace_protocol.codes import RequestCode
from headrace_protocol.errors import NotReady
from headrace_protocol.header_codecs import SerializeType, encode_frame
from headrace_protocol.headers import BulkPullHeader, PullMessageHeader
from headrace_protocol.serving import Then
from tests.abuse.hostile import plain_fields
from tests.broker.processors.test_cold_lookups import LOOKUPS
from tests.support.broker import BrokerUnderTest
from tests.support.channel import MemoryChannel

COMMIT_OFFSET, SUSPEND, SUBSCRIPTION = 1, 2, 4
PULL: dict[str, Any] = {
    "consumer_group": "g",
    "topic": "t",
    "queue_id": 0,
    "max_msg_nums": 9,
    "suspend_timeout_millis": 1000,
    "subscription": "*",
}
PULLS = [
    (code, header)
    for sys_flag in (SUBSCRIPTION, SUBSCRIPTION | COMMIT_OFFSET, SUBSCRIPTION | SUSPEND)
    for offset in (2, 5)
    for code, header in (
        (
            RequestCode.PULL_MESSAGE,
            PullMessageHeader(
                **PULL, sys_flag=sys_flag, queue_offset=offset, commit_offset=4, sub_version=0
            ),
        ),
        (
            RequestCode.BULK_PULL,
            BulkPullHeader(
                **PULL,
                sys_flag=sys_flag,
                queue_offset=offset,
                commit_offset=4,
                max_msg_bytes=1 << 20,
            ),
        ),
    )
]
REQUESTS = [(code, header) for code, header, _ in LOOKUPS] + PULLS
LOOKING = {code for code, _ in REQUESTS} | {RequestCode.LITE_PULL_MESSAGE}


class Looks:
    """Looks at old data, counted; one of them has to wait for the disk."""

    def __init__(self) -> None:
        self.count = 0
        self.waits_at = 0
        self.waiting: list[Then] = []

    def look(self) -> None:
        self.count += 1
        if self.count == self.waits_at:
            raise NotReady(lambda: None, OLD_DATA)

    def run_fetch(self, _channel: Channel, wait: NotReady, then: Then) -> None:
        wait.fetch()
        self.waiting.append(then)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    looks = Looks()
    monkeypatch.setattr(page_cache.PageCache, "check", lambda *_: looks.look())
    return looks


class Brokers:
    """One broker after the other, all alike: five messages, of which a group has consumed three."""

    def __init__(self, folder: Path, looks: Looks) -> None:
        self._folder = folder
        self._looks = looks
        self._brokers: list[BrokerUnderTest] = []

    def new(self) -> BrokerUnderTest:
        broker = BrokerUnderTest(self._folder / str(len(self._brokers)))
        broker.store.commit_log.hot_bytes = broker.store.commit_log.hot_units = 0
        self._brokers.append(broker)
        broker.create_topic("t", queue_nums=2)
        broker.join("g", "c", "t")
        for number in range(10):
            broker.store_message("t", number % 2, KEYS=f"k{number // 2}")
        broker.store.index_tick()
        broker.offsets.commit("g", "t", 0, 3)
        broker.registry.run_fetch = self._looks.run_fetch
        self._looks.count = 0
        return broker

    def close(self) -> None:
        self._looks.waits_at = 0
        for broker in self._brokers:
            broker.close()
            assert not broker.unexpected


@pytest.fixture
def brokers(tmp_path: Path, looks: Looks) -> Brokers:
    return Brokers(tmp_path, looks)


def state(broker: BrokerUnderTest) -> dict[str, Any]:
    """Everything that a request may change."""
    offsets, statistics = broker.offsets, broker.statistics
    return {
        "committed": dict(offsets.committed()),
        "commit count": offsets._commits,
        "pulled": dict(offsets.pulled()),
        "resets": copy.deepcopy(offsets._resets),
        "topics": copy.deepcopy(list(broker.topics.all())),
        "topic changes": broker.topics.change_count,
        "group changes": broker.groups.change_count,
        "member changes": broker.consumers.change_count,
        "puts": counts(statistics.puts),
        "gets": counts(statistics.gets),
        "gets of groups": {key: counts(each) for key, each in statistics.group_gets.items()},
        "log": broker.store.commit_log.max_offset,
        "held": broker.long_polling.held_count,
    }


def counts(counter: Any) -> tuple[int, int]:
    return counter.count, counter.body_bytes


def with_commit(before: dict[str, Any], header: Any) -> dict[str, Any]:
    """The state once a pull's offset is committed, which does not wait for the disk."""
    if not getattr(header, "sys_flag", 0) & COMMIT_OFFSET:
        return before
    committed = {"t@g": before["committed"]["t@g"] | {0: header.commit_offset}}
    return before | {"committed": committed, "commit count": before["commit count"] + 1}


def replies(channel: MemoryChannel, code: RequestCode) -> list[Any]:
    """Answers to the client, without the values of the runtime info, which tell the time."""
    if code != RequestCode.GET_BROKER_RUNTIME_INFO:
        return channel.replies()
    return [
        (command.code, sorted(json.loads(body)["table"])) for command, body in channel.replies()
    ]


@pytest.mark.parametrize(("code", "header"), REQUESTS)
async def test_a_request_that_waits_at_any_look_has_changed_nothing(
    brokers: Brokers, looks: Looks, code: RequestCode, header: msgspec.Struct | None
) -> None:
    broker, channel = brokers.new(), MemoryChannel()
    start = state(broker)
    broker.send(code, header, channel=channel)
    look_count, answer, after = looks.count, replies(channel, code), state(broker)
    assert look_count or code in {code for code, _ in PULLS}  # at the end of a queue
    for looks.waits_at in range(1, look_count + 1):
        broker, channel = brokers.new(), MemoryChannel()
        broker.send(code, header, channel=channel)
        assert channel.replies() == []
        assert state(broker) == with_commit(start, header)
        (then,) = looks.waiting
        looks.waiting.clear()
        then(None)
        assert replies(channel, code) == answer
        assert state(broker) == after


def test_no_other_request_looks(brokers: Brokers, looks: Looks) -> None:
    """One that does belongs into the list above."""
    broker = brokers.new()
    for code in sorted(broker.registry.functions.keys() - LOOKING):
        fields = {
            name: "t" if value == "Foreign" else value for name, value in plain_fields(code).items()
        }
        frame = encode_frame(SerializeType.JSON, code, 1, fields=fields)
        broker.take(frame, MemoryChannel())
        assert (code, looks.count) == (code, 0)
