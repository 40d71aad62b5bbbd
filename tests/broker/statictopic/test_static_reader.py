"""Sends to and pulls of a static topic: offsets, items on other brokers, and where they end."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import BulkPullResponseHeader, PullMessageResponseHeader
from headrace_protocol.message import decode_records
from tests.support.channel import MemoryChannel
from tests.support.static_brokers import Brokers, item
from tests.support.wire import bulk_pull_header, pull_header

SUSPEND = 2 + 4
# Logic queue 1, so that logic and physical ids differ.
OTHER = (item("a", 0, 0, 0),)


@pytest.fixture
def brokers(tmp_path: Path) -> Brokers:
    return Brokers(tmp_path)


def fill(brokers: Brokers, broker: str, count: int, first: int = 0) -> list[tuple[int, bytes]]:
    sent = []
    for number in range(first, first + count):
        body = b"%d" % number
        queue_id, offset = brokers.send(broker, body)
        assert queue_id == 0
        sent.append((offset, body))
    return sent


def remap(brokers: Brokers) -> list[tuple[int, bytes]]:
    """A queue moved from a to b without a gap, with 5 messages on either; returns them."""
    brokers.map((item("a", 0, 0, 1),), OTHER)
    sent = fill(brokers, "a", 5)
    brokers.map((item("a", 0, 0, 1), item("b", 1, 5, 0)), OTHER)
    return sent + fill(brokers, "b", 5, 5)


def test_sends_get_the_logic_queue_and_the_static_offset(brokers: Brokers) -> None:
    sent = remap(brokers)
    assert [offset for offset, _ in sent] == list(range(10))
    assert brokers["a"].store.queue("T", 1).next_offset == 5
    assert brokers["b"].store.queue("T", 0).next_offset == 5


def test_a_reader_passes_through_the_items(brokers: Brokers) -> None:
    sent = remap(brokers)
    assert brokers.read_all("b") == sent
    assert brokers.read_all("b", 3) == sent[3:]
    relayed = [fields for _, code, fields in brokers.asked if code == RequestCode.PULL_MESSAGE]
    assert {(each["lo"], each["queueId"], each["bname"]) for each in relayed} == {
        ("false", "1", "broker-a")
    }


def test_a_closed_item_ends_where_the_next_begins(brokers: Brokers) -> None:
    brokers.map((item("a", 0, 0),))
    fill(brokers, "a", 3)
    brokers.map((item("a", 0, 0, end=3), item("b", 1, 10_000)))
    assert fill(brokers, "b", 2, 3)[0] == (10_000, b"3")
    for offset in (3, 4, 9999):
        code, header, found = brokers.pull("b", offset)
        assert (code, found) == (ResponseCode.PULL_RETRY_IMMEDIATELY, [])
        assert header.next_begin_offset == 10_000
    assert len(brokers.read_all("b")) == 5


@pytest.mark.parametrize("leader", ["a", "b"])
def test_messages_behind_the_end_of_a_closed_item_are_not_read(
    brokers: Brokers, leader: str
) -> None:
    """As of an old leader that took messages while another broker had closed its item."""
    brokers.map((item("a", 0, 0),))
    sent = fill(brokers, "a", 5)
    brokers.map((item("a", 0, 0, end=3), item(leader, 1, 10_000, 1)))
    for offset in (3, 4, 5, 9999):
        code, header, found = brokers.pull(leader, offset)
        assert (code, found) == (ResponseCode.PULL_RETRY_IMMEDIATELY, [])
        assert header.next_begin_offset == 10_000
        answer = brokers[leader].ask(RequestCode.BULK_PULL, bulk_pull_header(offset))
        assert answer.code == ResponseCode.PULL_RETRY_IMMEDIATELY
        assert answer.command.header(BulkPullResponseHeader).next_begin_offset == 10_000
    assert brokers.read_all(leader) == sent[:3]


@pytest.mark.parametrize(("offset", "code"), [(11, 21), (10, 19), (10_000, 21)])
def test_only_the_leader_tells_a_reader_that_it_is_too_far(
    brokers: Brokers, offset: int, code: int
) -> None:
    remap(brokers)
    found, header, _ = brokers.pull("b", offset)
    assert (found, header.next_begin_offset) == (code, 10)


def test_a_reader_below_the_first_item_goes_on_there(brokers: Brokers) -> None:
    """As after a clean-up, which has taken the earliest items out of the chain."""
    brokers.map((item("b", 1, 500),))
    sent = fill(brokers, "b", 2)
    assert [offset for offset, _ in sent] == [500, 501]
    for offset in (0, 499):
        code, header, _ = brokers.pull("b", offset)
        assert (code, header.next_begin_offset) == (ResponseCode.PULL_OFFSET_MOVED, 500)


async def test_an_undecided_leader_takes_messages_and_is_not_read(brokers: Brokers) -> None:
    brokers.map((item("a", 0, 0),))
    sent = fill(brokers, "a", 3)
    brokers.map((item("a", 0, 0), item("b", 1, -1)), only="b")
    assert fill(brokers, "b", 2, 3) == [(-1, b"3"), (-1, b"4")]
    assert brokers.read_all("b") == sent
    brokers.map((item("a", 0, 0), item("b", 1, 10_000)))
    assert brokers.read_all("b") == [*sent, (10_000, b"3"), (10_001, b"4")]


@pytest.mark.parametrize(("count", "end"), [(3, -1), (5, 3)], ids=["open", "closed, and longer"])
async def test_a_reader_waits_at_the_end_of_an_item_until_the_next_is_decided(
    brokers: Brokers, count: int, end: int
) -> None:
    brokers.map((item("a", 0, 0),))
    fill(brokers, "a", count)
    brokers.map((item("a", 0, 0, end=end), item("b", 1, -1)), only="b")
    fill(brokers, "b", 1, count)
    channel = MemoryChannel()
    brokers["b"].send(RequestCode.PULL_MESSAGE, pull_header(3, sys_flag=SUSPEND), channel=channel)
    assert not channel.written
    asked = len(brokers.asked)
    brokers.map((item("a", 0, 0, end=end), item("b", 1, 10_000)))
    (answer,) = channel.replies()
    assert answer[0].header(PullMessageResponseHeader).next_begin_offset == 10_000
    assert len(brokers.asked) - asked < 3


async def test_a_held_pull_follows_its_queue_to_the_new_leader(brokers: Brokers) -> None:
    brokers.map((item("a", 0, 0),))
    fill(brokers, "a", 3)
    channel = MemoryChannel()
    brokers["a"].send(RequestCode.PULL_MESSAGE, pull_header(3, sys_flag=SUSPEND), channel=channel)
    assert not channel.written
    brokers.map((item("a", 0, 0), item("b", 1, 3)), only="b")
    fill(brokers, "b", 1, 3)
    brokers.map((item("a", 0, 0), item("b", 1, 3)), only="a")
    (answer,) = channel.replies()
    assert answer[0].code == ResponseCode.SUCCESS
    assert answer[0].header(PullMessageResponseHeader).next_begin_offset == 4


async def test_a_queue_that_moves_while_an_item_elsewhere_is_read(brokers: Brokers) -> None:
    remap(brokers)
    channel = MemoryChannel()
    with brokers.holding() as held:
        brokers["b"].send(RequestCode.PULL_MESSAGE, pull_header(2), channel=channel)
    brokers.map((item("a", 0, 0, 1), item("b", 1, 5, 0), item("a", 2, 10, 2)), OTHER)
    brokers.release(held)
    ((answer, body),) = channel.replies()
    assert answer.code == ResponseCode.SUCCESS
    assert [bytes(record.body) for record in decode_records(body)] == [b"2", b"3", b"4"]


def test_a_broker_that_is_away_hides_only_its_own_items(brokers: Brokers) -> None:
    sent = remap(brokers)
    brokers.away.add("a")
    answer = brokers["b"].ask(RequestCode.PULL_MESSAGE, pull_header(2))
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert answer.remark.startswith("the offsets from 0 to 5 are on broker broker-a: ")
    assert answer.command.ext()["nextItemOffset"] == "5"
    assert brokers.read_all("b", 5) == sent[5:]
