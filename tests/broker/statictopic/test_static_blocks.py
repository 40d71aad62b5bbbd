"""Reads ahead of another broker's items: how much is fetched, for whom, and what is no answer."""

from __future__ import annotations

import gc
import struct
from pathlib import Path

import pytest
import trio

from headrace_broker.cold.queue import Block
from headrace_broker.statictopic.remote_queue import RemoteReader
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import BulkPullResponseHeader
from headrace_protocol.message import encode_record
from tests.support.channel import MemoryChannel
from tests.support.running import in_background
from tests.support.static_brokers import GROUP, TOPIC, Brokers, item, response
from tests.support.wire import bulk_pull_header, pull_header

COUNT = 400
PULL = RequestCode.PULL_MESSAGE


@pytest.fixture
def brokers(tmp_path: Path) -> Brokers:
    sizes = {"consume_queue_file_bytes": 20 * 1000, "commit_log_file_bytes": 1 << 18}
    return Brokers(tmp_path, store=sizes)


def remap(brokers: Brokers) -> list[tuple[int, bytes]]:
    """A queue with messages on a that b leads now; returns them."""
    brokers.map((item("a", 0, 0),))
    sent = [(number, b"%d" % number) for number in range(COUNT)]
    for _, body in sent:
        brokers.send("a", body)
    brokers.map((item("a", 0, 0), item("b", 1, COUNT)))
    brokers.asked.clear()
    return sent


def remote_of(brokers: Brokers) -> RemoteReader:
    return brokers["b"].traffic.remote


def blocks_in_memory() -> list[Block]:
    return [each for each in gc.get_objects() if isinstance(each, Block)]


def pulls_asked(brokers: Brokers) -> list[tuple[int, int]]:
    """Offset and count of each pull that a was asked for."""
    return [
        (int(fields["queueOffset"]), int(fields["maxMsgNums"]))
        for _, code, fields in brokers.asked
        if code == PULL
    ]


def test_a_reader_gets_larger_and_larger_blocks(brokers: Brokers) -> None:
    sent, before = remap(brokers), blocks_in_memory()
    assert brokers.read_all("b") == sent
    assert pulls_asked(brokers) == [(0, 32), (32, 256), (288, 112)]
    blocks = remote_of(brokers).blocks
    assert (len(blocks), blocks.byte_count) == (0, 0)
    assert not [each for each in blocks_in_memory() if each not in before]


async def test_a_block_that_nobody_reads_is_dropped(
    brokers: Brokers, autojump_clock: trio.testing.MockClock
) -> None:
    remap(brokers)
    brokers.pull("b", 0)
    remote = remote_of(brokers)
    async with in_background(remote.run):
        for passed_ms, block_count in ((5000, 1), (10_000, 0)):
            brokers["b"].clock.ms += passed_ms
            await trio.sleep(10.1)
            assert len(remote.blocks) == block_count


def test_readers_do_not_wait_for_each_other(brokers: Brokers) -> None:
    sent = remap(brokers)
    offsets = {"one": 0, "two": 100, "three": 200}
    found: dict[str, list[tuple[int, bytes]]] = {group: [] for group in offsets}
    while any(offset < COUNT for offset in offsets.values()):
        for group, offset in offsets.items():
            if offset < COUNT:
                _, header, messages = brokers.pull("b", offset, consumer_group=group)
                found[group] += messages
                offsets[group] = header.next_begin_offset
    assert found == {"one": sent, "two": sent[100:], "three": sent[200:]}


def test_groups_with_other_tags_get_other_blocks(brokers: Brokers) -> None:
    remap(brokers)
    _, _, everything = brokers.pull("b", 0)
    code, header, tagged = brokers.pull("b", 32, subscription="none")
    assert len(everything) == 32
    assert (code, tagged) == (ResponseCode.PULL_RETRY_IMMEDIATELY, [])
    assert header.next_begin_offset > 32


def test_a_pull_waits_for_the_block_that_is_under_way(brokers: Brokers) -> None:
    remap(brokers)
    channels = [MemoryChannel() for _ in range(5)]
    with brokers.holding() as held:
        for channel in channels:
            brokers["b"].send(PULL, pull_header(0), channel=channel)
    assert len(held) == 1
    brokers.release(held)
    answers = [body for channel in channels for _, body in channel.replies()]
    assert len(answers) == 5
    assert len(set(answers)) == 1
    assert answers[0]
    assert pulls_asked(brokers) == [(0, 32), (32, 256)]  # and what is read ahead


def test_the_client_that_asks_is_charged(brokers: Brokers) -> None:
    remap(brokers)
    channel = MemoryChannel()
    with brokers.holding() as held:
        brokers["b"].send(PULL, pull_header(0), channel=channel)
    ((_, ask, _),) = held
    assert (ask.payer, ask.answer_bytes) == (channel, 256 * 1024)
    channel.is_open = False  # it leaves; nothing more is fetched for it
    brokers.release(held)
    assert not channel.charged_bytes
    brokers.read_all("b", 0)
    assert pulls_asked(brokers)[:2] == [(0, 32), (32, 64)]
    assert not channel.charged_bytes


def test_without_room_pulls_are_relayed_one_by_one(brokers: Brokers) -> None:
    remote_of(brokers).blocks.bytes_max = 0
    sent = remap(brokers)
    assert brokers.read_all("b") == sent
    assert {count for _, count in pulls_asked(brokers)} == {32, 16}


def test_a_block_that_could_not_be_fetched(brokers: Brokers) -> None:
    sent = remap(brokers)
    brokers.pull("b", 0)
    brokers.away.add("a")
    _, header, _ = brokers.pull("b", 32)
    while header.next_begin_offset < 288:
        _, header, _ = brokers.pull("b", header.next_begin_offset)
    answer = brokers["b"].ask(PULL, pull_header(288))
    assert answer.code == ResponseCode.SYSTEM_ERROR
    brokers.away.clear()
    assert brokers.read_all("b", 288) == sent[288:]


def test_a_topic_that_is_created_again_has_no_old_blocks(brokers: Brokers) -> None:
    remap(brokers)
    brokers.pull("b", 0)
    marks = brokers["b"].mappings.marks
    marks.remove("T")
    marks.add("T", "static-2")
    brokers["b"].mappings.leads_changed()
    brokers.asked.clear()
    brokers.pull("b", 32)
    assert pulls_asked(brokers)[0] == (32, 32)


def test_answers_in_bulk_are_fetched_ahead(brokers: Brokers) -> None:
    remap(brokers)
    offset, counts = 0, []
    while offset < COUNT:
        answer = brokers["b"].ask(RequestCode.BULK_PULL, bulk_pull_header(offset))
        found = answer.command.header(BulkPullResponseHeader)
        counts.append(found.count)
        offset = found.next_begin_offset
    assert counts == [150, 150, 100]
    asked = [fields["queueOffset"] for _, code, fields in brokers.asked]
    assert asked == ["0", "150", "300"]


@pytest.mark.parametrize(
    ("count", "body"), [(0, b""), (1, b""), (-1, b""), (2, b"x" * 39), (151, b"x" * 4000)]
)
def test_a_bulk_answer_that_is_none(brokers: Brokers, count: int, body: bytes) -> None:
    remap(brokers)
    fields = {"nextBeginOffset": 9, "count": count}
    brokers.answer = lambda ask: response(ask, ResponseCode.SUCCESS, fields, body)
    header = bulk_pull_header(0, max_msg_bytes=100)
    answered = brokers["b"].ask(RequestCode.BULK_PULL, header)
    assert answered.code == ResponseCode.SYSTEM_ERROR
    assert "broker-a" in answered.remark


def record(offset: int, body_bytes: int = 100) -> bytes:
    return encode_record(topic="T", queue_id=0, body=bytes(body_bytes), queue_offset=offset)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"x" * 27,
        record(0)[:-1],
        record(0) + b"x",
        record(0) + record(1, 50)[:-1],
        record(9),
        record(1) + record(1),
        record(1) + record(0),
        record(0) + record(1, 300 * 1024),
        struct.pack(">i16xq", 0, 0),
        struct.pack(">i16xq", -100, 0) + b"x" * 100,
        struct.pack(">i16xq", 2**31 - 1, 0),
    ],
)
def test_an_answer_that_has_no_records(brokers: Brokers, body: bytes) -> None:
    sent = remap(brokers)
    fields = {"nextBeginOffset": 9, "minOffset": 0, "maxOffset": COUNT}
    brokers.answer = lambda ask: response(ask, ResponseCode.SUCCESS, fields, body)
    answered = brokers["b"].ask(PULL, pull_header(0))
    assert answered.code == ResponseCode.SYSTEM_ERROR
    assert "in the answer of broker-a to a pull of its queue 0 at 0" in answered.remark
    brokers.answer = None
    assert brokers.read_all("b") == sent


def test_a_relayed_pull_has_the_subscription_of_its_group(brokers: Brokers) -> None:
    remap(brokers)
    brokers["b"].join(GROUP, "c", TOPIC)
    header = pull_header(0, sys_flag=0, sub_version=1, subscription=None)
    assert brokers["b"].ask(PULL, header).code == ResponseCode.SUCCESS
    pulls = [fields for _, code, fields in brokers.asked if code == PULL]
    assert {(fields["subscription"], fields["sysFlag"]) for fields in pulls} == {("*", "4")}


def test_a_filter_that_passes_the_end_of_an_item(brokers: Brokers) -> None:
    """As of an old leader that took messages while another broker had closed its item."""
    remap(brokers)
    fields = {"nextBeginOffset": COUNT + 2, "minOffset": 0, "maxOffset": COUNT + 2}
    records = record(COUNT - 2) + record(COUNT + 1)
    brokers.answer = lambda ask: response(ask, ResponseCode.SUCCESS, fields, records)
    code, header, found = brokers.pull("b", COUNT - 5)
    assert (code, [offset for offset, _ in found]) == (ResponseCode.SUCCESS, [COUNT - 2])
    assert header.next_begin_offset == COUNT
