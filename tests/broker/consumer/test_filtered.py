"""Reads through a SQL92 filter: how far each looks, and what comes in between."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from headrace_broker.consumer.filtered import FilteredReader
from headrace_broker.store.files.residency import OLD_DATA
from headrace_broker.store.store_source import GetStatus
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import NotReady
from headrace_protocol.filters.expression import compiled
from headrace_protocol.message import decode_records
from headrace_protocol.waiting import Unfinished
from tests.broker.consumer.test_filters import SQL, SUBSCRIPTION, SUSPEND, own, put
from tests.support import stores
from tests.support.broker import BrokerUnderTest, broker_config
from tests.support.channel import MemoryChannel
from tests.support.stores import ready
from tests.support.wire import pull_header


@pytest.fixture
def broker(tmp_path: Path) -> BrokerUnderTest:
    broker = BrokerUnderTest(tmp_path)
    broker.create_topic("T", 1)
    return broker


def test_one_answer_looks_at_so_many_messages(tmp_path: Path) -> None:
    broker = BrokerUnderTest(tmp_path, broker_config(tmp_path, max_filter_message_size=32))
    put(broker, *[0] * 70)
    reader = filtered(broker, lambda: 0.0)
    assert [reader.get(offset, 5, 5000).next_offset for offset in (0, 32, 64)] == [32, 64, 70]


def filtered(broker: BrokerUnderTest, now_s: Callable[[], float]) -> FilteredReader:
    """The queue of a broker through a filter, where all is in memory."""
    source = broker.store.source(broker.store.queue("T", 0))

    class Warm:
        """Waits for what must be fetched."""

        known_range = source.known_range

        def get(self, *args: Any) -> Any:
            return ready(lambda: source.get(*args))

        def get_bulk(self, *args: Any) -> Any:
            return ready(lambda: source.get_bulk(*args))

    return FilteredReader(Warm(), compiled(SQL), broker.config, now_s)


class Seconds:
    """A clock that moves with each look at it."""

    def __init__(self, step: float) -> None:
        self.now = 0.0
        self.step = step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def test_a_read_that_has_found_nothing_is_repeated(broker: BrokerUnderTest) -> None:
    """Each time it resumes where it was, also if another read comes in between."""
    put(broker, *[0] * 200, *[9] * 10)
    reader = filtered(broker, Seconds(0.0004))
    reads = Counter({0: 0, 1: 0})
    for first in itertools.cycle(reads):
        reads[first] += 1
        with suppress(Unfinished):
            result = reader.get(first, 1, 1 << 20)
            break
    assert (result.count, result.next_offset) == (1, 201)
    # The second began with the first's judgements, and either resumed.
    assert 3 < reads[0] < 50
    assert abs(reads[0] - reads[1]) <= 1


def test_more_reads_than_are_repeated_at_a_time(broker: BrokerUnderTest) -> None:
    """Some return without a record, and their clients continue; all find the same."""
    put(broker, *[0] * 200, 9)
    reader = filtered(broker, Seconds(1.0))
    unfinished, found = [*range(70)], 0
    while unfinished:
        first = unfinished.pop(0)
        try:
            result = reader.get(first, 1, 1 << 20)
        except Unfinished:
            unfinished.append(first)
            continue
        if result.status is GetStatus.FOUND:
            assert result.next_offset == 201
            found += 1
        else:
            assert first < result.next_offset <= 200
            unfinished.append(result.next_offset)
    assert found == 70


class Paced:
    """A broker whose filters look at one message in a turn; the rest waits in ``slices``."""

    def __init__(self, broker: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
        self.broker = broker
        self.slices: list[Iterator[None]] = []
        broker.registry.run_long, broker.registry.slice_s = self.slices.append, 0.0
        monkeypatch.setattr("headrace_broker.consumer.filtered.READ_S", 0.0)

    def pull(self, **fields: Any) -> MemoryChannel:
        """The client of a pull."""
        channel = MemoryChannel()
        self.broker.send(RequestCode.PULL_MESSAGE, pull_header(0, **fields), channel=channel)
        return channel

    def turns(self) -> Iterator[int]:
        """The turns until no pull is unfinished."""
        for number in itertools.count():
            yield number
            if not self.slices:
                return
            work = self.slices.pop(0)
            if next(work, work) is not work:
                self.slices.append(work)


def test_a_filter_that_lets_nothing_through_slows_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are served between its turns, until it has looked at as many units as it may."""
    broker = BrokerUnderTest(tmp_path, broker_config(tmp_path, max_filter_message_size=40))
    broker.create_topic("T", 1)
    put(broker, *[0] * 60)
    paced = Paced(broker, monkeypatch)
    idle = [paced.pull(**own(SQL)) for _ in range(3)]
    turns = 0
    for _ in paced.turns():
        turns += 1
        assert paced.pull(**own("*", "TAG")).replies()[0][0].code == ResponseCode.SUCCESS
    assert turns > 3 * 30
    for channel in idle:
        ((reply, body),) = channel.replies()
        assert (reply.code, body) == (ResponseCode.PULL_RETRY_IMMEDIATELY, b"")
        assert reply.ext()["nextBeginOffset"] == "40"
        assert channel.charged_bytes == 0


def test_a_client_leaves_while_its_filter_looks_for_messages(
    broker: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of its pull is left, and others get what passes."""
    put(broker, *[0] * 20, 9)
    paced = Paced(broker, monkeypatch)
    gone, other = paced.pull(**own(SQL)), paced.pull(**own(SQL))
    gone.is_open = False
    *_, turns = paced.turns()
    assert turns > 10
    assert broker.registry.running == set()
    assert gone.charged_bytes == 0
    ((_, body),) = other.replies()
    assert [each.body for each in decode_records(body)] == [b"9"]


async def test_a_held_pull_resumes_where_it_waited(
    broker: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If many messages arrive at once, it looks at each of them once, over several turns."""
    paced = Paced(broker, monkeypatch)
    channel = paced.pull(**{**own(SQL), "sys_flag": SUSPEND | SUBSCRIPTION})
    for _ in range(50):
        put(broker, 0)
    queue = broker.store.queue("T", 0)
    for value in (*[0] * 39, 9):
        stores.put(broker.store, queue, str(value).encode(), a=str(value), dispatch=value == 9)
    broker.long_polling.arrived([queue])
    *_, turns = paced.turns()
    assert turns == 39
    ((_, body),) = channel.replies()
    assert [(each.body, each.queue_offset) for each in decode_records(body)] == [(b"9", 89)]


def test_an_answer_ends_where_the_next_messages_must_be_fetched(broker: BrokerUnderTest) -> None:
    """What is in memory is answered first; a read that begins there waits."""
    put(broker, *[9, 0] * 32)
    source = broker.store.source(broker.store.queue("T", 0))

    class Cold:
        """Has the first 40 messages in memory."""

        known_range = source.known_range

        def get_bulk(self, queue_offset: int, count_max: int, *others: Any) -> Any:
            if queue_offset >= 40:
                raise NotReady(lambda: None, OLD_DATA)
            count_max = min(count_max, 40 - queue_offset)
            return ready(lambda: source.get_bulk(queue_offset, count_max, *others))

    reader = FilteredReader(Cold(), compiled(SQL), broker.config, lambda: 0.0)  # type: ignore[arg-type]
    found = reader.get(0, 32, 1 << 20)
    assert (found.count, found.next_offset) == (20, 40)
    with pytest.raises(NotReady):
        reader.get(40, 32, 1 << 20)


def test_an_answer_keeps_to_its_bytes(broker: BrokerUnderTest) -> None:
    """At least one message, then no more than fit, over any number of blocks."""
    put(broker, *[9] * 40, *[0] * 40, *[8] * 40)
    reader = filtered(broker, lambda: 0.0)
    record_bytes = reader.get(0, 1, 1).body_bytes
    limits = (1, record_bytes * 3, record_bytes * 45, 1 << 20)
    for read, bytes_max in itertools.product((reader.get_bulk, reader.get), limits):
        offset, found = 0, 0
        while offset < 120:
            result = read(offset, 75, bytes_max)
            assert result.body_bytes <= max(bytes_max, record_bytes)
            assert result.count or result.next_offset == 120
            offset, found = result.next_offset, found + result.count
        assert found == 80


def test_what_is_judged_is_remembered(broker: BrokerUnderTest) -> None:
    """Reads of any size and order find the same, whatever was judged before them."""
    values = [9, 9, 0, 9, 0, 0, *[9] * 30, *[0] * 30, 9]
    put(broker, *values)
    wanted = [offset for offset, value in enumerate(values) if value == 9]
    reader = filtered(broker, lambda: 0.0)
    for count in (1, 3, 8, 100, 2):
        for begin in (0, 40, 7, 66, 1):
            expected, offset = [each for each in wanted if each >= begin], begin
            while offset < len(values):
                result = reader.get(offset, count, 1 << 20)
                records = decode_records(b"".join(result.buffers))
                found = [record.queue_offset for record in records]
                assert found == expected[: len(found)]
                assert len(found) <= count
                expected, offset = expected[len(found) :], result.next_offset
            assert expected == []
