"""Queries by key for more messages than a broker returns at once."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple, cast

import pytest

from headrace import Message, blocking
from headrace.admin.key_query import KEY_PAGE, newest
from headrace.embedded import Embedded
from headrace_protocol.headers import QueryMessageHeader
from headrace_protocol.message import StoredMessage
from tests.support.cli import succeed
from tests.support.seeds import seeds


class Stored(NamedTuple):
    store_timestamp: int
    physical_offset: int
    is_ours: bool = True

    @property
    def offset_message_id(self) -> str:
        return str(self.physical_offset)


class FakeBroker:
    """Answers with the newest messages of a range; ``reads_offsets`` as ours does."""

    def __init__(self, stored: Sequence[Stored], *, reads_offsets: bool) -> None:
        self._stored = stored
        self._reads_offsets = reads_offsets

    async def page(self, header: QueryMessageHeader) -> list[StoredMessage]:
        before = header.before_offset if self._reads_offsets else None
        found = [
            each
            for each in reversed(self._stored)
            if each.store_timestamp <= header.end_timestamp
            and (before is None or each.physical_offset < before)
        ]
        return cast("list[StoredMessage]", found[: min(header.max_num, KEY_PAGE)])


def header(max_count: int) -> QueryMessageHeader:
    return QueryMessageHeader(
        topic="t",
        key="k",
        max_num=min(max_count, KEY_PAGE),
        begin_timestamp=0,
        end_timestamp=2**63 - 1,
        unique_key_query=False,
    )


@pytest.mark.parametrize("reads_offsets", [True, False], ids=["ours", "apache"])
@pytest.mark.parametrize("seed", seeds(20))
async def test_all_that_match_are_found_the_newest_first(seed: int, *, reads_offsets: bool) -> None:
    random = Random(seed)
    time, stored = 0, []
    for index in range(random.choice([1, 63, 64, 65, 500])):
        time += random.choice([0, 0, 1, 5])
        stored.append(Stored(time, 100 * index, random.random() < 0.7))
    matching = [each for each in reversed(stored) if each.is_ours]
    broker = FakeBroker(stored, reads_offsets=reads_offsets)
    for max_count in (1, 64, 65, 400, 1000):
        found = await newest(
            broker.page, header(max_count), lambda each: cast("Stored", each).is_ours, max_count
        )
        assert found == (matching[:max_count], None)


@pytest.mark.parametrize("older", [0, 100])
async def test_more_messages_of_a_millisecond_than_fit_an_answer_are_reported(older: int) -> None:
    stored = [Stored(index, index) for index in range(older)]
    stored += [Stored(1000, 1000 + index) for index in range(65)]
    for reads_offsets, expected in ((True, (older + 65, None)), (False, (64, 1000))):
        broker = FakeBroker(stored, reads_offsets=reads_offsets)
        found = await newest(broker.page, header(500), lambda _: True, 500)
        assert (len(found.messages), found.stopped_ms) == expected


def test_a_query_lists_more_than_one_answer_holds(mq: Embedded, topic: str) -> None:
    with blocking.Producer(nameserver=mq.nameserver) as producer:
        producer.send_many([Message(topic, b"%d" % number, key="k") for number in range(200)])
    with blocking.Admin(nameserver=mq.nameserver) as admin:
        for max_count in (10, 64, 65, 199, 200, 1000):
            found = admin.query_by_key(topic, "k", max_count=max_count)
            newest_ones = range(max(200 - max_count, 0), 200)
            assert [int(each.body) for each in found] == list(newest_ones)
    listed = succeed("message", "query", topic, "k", "--max", "600", "--json")
    assert (len(listed.json()), listed.stderr) == (200, "")


def test_a_query_says_that_there_are_more(mq: Embedded, topic: str) -> None:
    with blocking.Producer(nameserver=mq.nameserver) as producer:
        producer.send_many([Message(topic, b"%d" % number, key="k") for number in range(70)])
    ran = succeed("message", "query", topic, "k", "--max", "69", "--json")
    assert [int(row["body"]) for row in ran.json()] == list(range(1, 70))
    assert "only the newest 69 messages are listed" in ran.stderr
    assert not succeed("message", "query", topic, "k", "--max", "70", "--json").stderr
