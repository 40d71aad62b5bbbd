"""Records of another broker's items that are fetched ahead: how they are cut, and how long kept."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
import trio

from headrace_broker.peers.callers import Caller
from headrace_broker.peers.peers import Ask, Then
from headrace_broker.statictopic import blocks as blocks_module
from headrace_broker.statictopic.blocks import LOOK_S, Blocks, MalformedRecords, RecordBlock
from headrace_broker.statictopic.relay import Relay
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.drivers.errors import ConnectFailed
from headrace_protocol.headers import BulkPullResponseHeader
from tests.support.channel import MemoryChannel
from tests.support.running import in_background
from tests.support.seeds import seeds
from tests.support.static_brokers import Brokers, item, response
from tests.support.wire import bulk_pull_header, pull_header

COUNT = 400
PULL = RequestCode.PULL_MESSAGE


def record(offset: int, record_bytes: int = 100) -> bytes:
    return struct.pack(">i16xq", record_bytes, offset).ljust(record_bytes, b"x")


def block_of(*offsets: int, end: int) -> RecordBlock:
    return RecordBlock(offsets[0], end, memoryview(b"".join(map(record, offsets))))


# -- blocks ----------------------------------------------------------------------------------------


def test_pulls_of_any_size_are_cut_from_a_block() -> None:
    block = block_of(5, 6, 9, end=12)  # a filter has dropped 7, 8, 10 and 11
    for offset, count, size, found, next_offset in (
        (5, 2, 1000, [5, 6], 7),
        (5, 9, 250, [5, 6], 7),
        (5, 9, 1, [5], 6),
        (7, 9, 1000, [9], 12),
        (9, 1, 1000, [9], 12),
    ):
        result = block.get(offset, count, size)
        assert result is not None
        assert b"".join(result.buffers) == b"".join(map(record, found))
        assert (result.count, result.next_offset) == (len(found), next_offset)
    assert block.get(10, 9, 1000) is None


@pytest.mark.parametrize("seed", seeds(20))
def test_records_of_one_size_and_of_many_are_cut_alike(seed: int) -> None:
    choice = random.Random(seed)
    sizes = [100] if seed % 2 else [100, 100, 101]
    offsets = sorted(choice.sample(range(5, 80), choice.randint(1, 40)))
    records = {offset: record(offset, choice.choice(sizes)) for offset in offsets}
    block = RecordBlock(5, 80, memoryview(b"".join(records.values())))
    for offset in range(5, offsets[-1] + 1):
        result = block.get(offset, 3, 250)
        assert result is not None
        found = [each for each in offsets if each >= offset][:2]
        assert b"".join(result.buffers) == b"".join(records[each] for each in found)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"x" * 27,
        record(5)[:-1],
        record(5) + b"x",
        record(4),
        record(12),
        record(6) + record(6),
        record(5, 27) + b"x" * 50,
        struct.pack(">i16xq", 0, 5),
        struct.pack(">i16xq", -100, 5) + b"x" * 100,
        struct.pack(">i16xq", 2**31 - 1, 5),
    ],
)
def test_what_is_no_block(body: bytes) -> None:
    with pytest.raises(MalformedRecords):
        RecordBlock(5, 12, memoryview(body))


async def test_a_block_that_nobody_reads_is_dropped(autojump_clock: object) -> None:
    blocks, channel = Blocks(), MemoryChannel()
    async with in_background(blocks.run):
        blocks.put("key", block_of(0, 1, end=2), channel, None)
        held_bytes = blocks.held_bytes
        assert channel.charged_bytes == held_bytes > 200
        await trio.sleep(LOOK_S * 1.5)
        assert blocks.get("key", 0, 1, 1000) is not None
        await trio.sleep(LOOK_S)
        assert blocks.held_bytes == held_bytes
        await trio.sleep(LOOK_S)
        assert blocks.get("key", 1, 1, 1000) is None
        assert channel.charged_bytes == blocks.held_bytes == 0


def test_a_reader_keeps_few_blocks() -> None:
    blocks, channel = Blocks(), MemoryChannel()
    for start in range(100):
        blocks.put("key", block_of(start, end=start + 1), channel, None)
    assert blocks.held_bytes == channel.charged_bytes < 5 * 200


# -- reading ahead ---------------------------------------------------------------------------------


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


def relay_of(brokers: Brokers) -> Relay:
    return brokers["b"].traffic.relay


def pulls_asked(brokers: Brokers) -> list[tuple[int, int]]:
    """Offset and count of each pull that a was asked for."""
    return [
        (int(fields["queueOffset"]), int(fields["maxMsgNums"]))
        for _, code, fields in brokers.asked
        if code == PULL
    ]


def test_a_reader_gets_larger_and_larger_blocks(brokers: Brokers) -> None:
    sent = remap(brokers)
    assert brokers.read_all("b") == sent
    assert pulls_asked(brokers) == [(0, 32), (32, 256), (288, 112)]
    assert relay_of(brokers).blocks.held_bytes == 0


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
    peers = brokers["b"].peers
    asked: list[tuple[Caller, Ask, Then]] = []
    peers.begin = lambda *arguments: asked.append(arguments)  # type: ignore
    channels = [MemoryChannel(), MemoryChannel()]
    for channel in channels:
        brokers["b"].send(PULL, pull_header(0), channel=channel)
    assert len(asked) == 1
    peers.begin = brokers.begin  # type: ignore
    brokers.begin(*asked[0])
    answers = [body for channel in channels for _, body in channel.replies()]
    assert len(answers) == 2
    assert answers[0] == answers[1] != b""


def test_the_client_that_asks_is_charged(brokers: Brokers) -> None:
    remap(brokers)
    channel = MemoryChannel()
    brokers["b"].send(PULL, pull_header(0), channel=channel)
    assert channel.charged_bytes == relay_of(brokers).blocks.held_bytes > 0
    channel.is_open = False  # it leaves; nothing more is fetched for it
    brokers.asked.clear()
    brokers.read_all("b", 32)
    assert pulls_asked(brokers)[0] == (288, 32)


def test_without_room_pulls_are_relayed_one_by_one(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks_module, "BLOCKS_BYTES_MAX", 0)
    sent = remap(brokers)
    assert brokers.read_all("b") == sent
    assert {count for _, count in pulls_asked(brokers)} == {32, 16}


def test_a_block_that_could_not_be_fetched(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = remap(brokers)

    def fail(_caller: Caller, ask: Ask, then: Then) -> None:
        then(ConnectFailed(ask.peer, "it is away"))

    brokers.pull("b", 0)
    monkeypatch.setattr(brokers["b"].peers, "begin", fail)
    _, header, _ = brokers.pull("b", 32)
    while header.next_begin_offset < 288:
        _, header, _ = brokers.pull("b", header.next_begin_offset)
    answer = brokers["b"].ask(PULL, pull_header(288))
    assert answer.code == ResponseCode.SYSTEM_ERROR
    monkeypatch.undo()
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
def test_a_bulk_answer_that_is_none(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch, count: int, body: bytes
) -> None:
    remap(brokers)

    def answer(_caller: Caller, ask: Ask, then: Then) -> None:
        fields = {"nextBeginOffset": 9, "count": count}
        then(response(ask, ResponseCode.SUCCESS, fields, body))

    monkeypatch.setattr(brokers["b"].peers, "begin", answer)
    header = bulk_pull_header(0, max_msg_bytes=100)
    answered = brokers["b"].ask(RequestCode.BULK_PULL, header)
    assert answered.code == ResponseCode.SYSTEM_ERROR
    assert "broker-a" in answered.remark
