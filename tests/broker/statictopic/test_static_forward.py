"""Requests at a broker that no longer leads their queue: passed on once, and in order."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import trio

from headrace_broker.statictopic.forward import WAITING_BYTES_MAX
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.command import header_fields
from headrace_protocol.header_codecs import SerializeType, encode_frame
from headrace_protocol.headers import (
    GetMaxOffsetHeader,
    OffsetResponseHeader,
    SendMessageResponseHeader,
    UpdateConsumerOffsetHeader,
)
from headrace_protocol.statictopic.mapping import MappingInfo
from tests.support.channel import MemoryChannel
from tests.support.rights import signed
from tests.support.running import in_background
from tests.support.static_brokers import GROUP, TOPIC, Brokers, item
from tests.support.wire import pull_header, send_header

A, B = item("a", 0, 0), item("b", 1, 2)


@pytest.fixture
def brokers(tmp_path: Path) -> Brokers:
    """A queue with two messages that the strict mode moves from a to b: only a is changed yet."""
    brokers = Brokers(tmp_path)
    brokers.map((A,))
    for body in (b"0", b"1"):
        brokers.send("a", body)
    return brokers


def close_a(brokers: Brokers) -> None:
    brokers.map((A, item("b", 1, -1)), only="a")


def open_b(brokers: Brokers) -> None:
    brokers.map((A, B), only="b")


def send(brokers: Brokers, body: bytes) -> MemoryChannel:
    channel = MemoryChannel()
    brokers["a"].send(RequestCode.SEND_MESSAGE_V2, send_header(), body, channel)
    return channel


def offset_in(channel: MemoryChannel) -> int:
    ((command, _),) = channel.replies()
    assert command.code == ResponseCode.SUCCESS, command.remark
    return command.header(SendMessageResponseHeader).queue_offset


async def test_sends_wait_for_the_new_leader_in_order(brokers: Brokers) -> None:
    close_a(brokers)
    channels = [send(brokers, b"%d" % number) for number in range(2, 6)]
    assert not any(channel.written for channel in channels)
    assert len([code for _, code, _ in brokers.asked if code == RequestCode.SEND_MESSAGE_V2]) == 1
    open_b(brokers)
    late = send(brokers, b"6")
    brokers["a"].traffic.forwarding.retry()
    assert [offset_in(channel) for channel in [*channels, late]] == [2, 3, 4, 5, 6]
    assert [body for _, body in brokers.read_all("b")] == [b"%d" % number for number in range(7)]
    assert not any(channel.charged_bytes for channel in channels)
    assert offset_in(send(brokers, b"7")) == 7


async def test_sends_leave_without_a_wait_once_one_is_stored(brokers: Brokers) -> None:
    close_a(brokers)
    open_b(brokers)
    channels: list[MemoryChannel] = []
    for together in (1, 3):
        with brokers.holding() as held:
            channels += [send(brokers, b"x") for _ in range(3)]
            assert len(held) == together
        brokers.release(held)
    assert [offset_in(channel) for channel in channels] == [2, 3, 4, 5, 6, 7]


async def test_a_send_that_waits_creates_no_topic_at_the_new_leader(brokers: Brokers) -> None:
    close_a(brokers)
    send(brokers, b"2")
    assert brokers["b"].topics.get(TOPIC) is not None
    brokers["b"].topics.delete(TOPIC)
    brokers["b"].mappings.remove(TOPIC)
    brokers["b"].mappings.marks.remove(TOPIC)
    brokers["a"].traffic.forwarding.retry()
    assert brokers["b"].topics.get(TOPIC) is None


async def test_a_wait_ends_after_a_second(brokers: Brokers, autojump_clock: object) -> None:
    close_a(brokers)
    forwarding = brokers["a"].traffic.forwarding
    async with in_background(forwarding.run):
        channel, began = send(brokers, b"2"), trio.current_time()
        while not channel.written:  # noqa: ASYNC110 - the mock clock jumps
            await trio.sleep(0.01)
        assert 1 <= trio.current_time() - began < 1.1
    ((command, _),) = channel.replies()
    assert command.code == ResponseCode.SERVICE_NOT_AVAILABLE, "Java's clients repeat such sends"


async def test_the_sends_that_wait_are_bounded(brokers: Brokers) -> None:
    close_a(brokers)
    waiting = [send(brokers, bytes(1024 * 1024)) for _ in range(7)]
    assert not any(channel.written for channel in waiting)
    full = send(brokers, bytes(1024 * 1024))
    ((command, _),) = full.replies()
    assert command.code == ResponseCode.SYSTEM_BUSY
    assert sum(channel.charged_bytes for channel in waiting) <= WAITING_BYTES_MAX
    assert not full.charged_bytes


async def test_a_forwarded_request_has_no_signature_of_its_client(brokers: Brokers) -> None:
    close_a(brokers)
    open_b(brokers)
    pull = pull_header(0)
    offset = GetMaxOffsetHeader(topic=TOPIC, queue_id=0)
    for code, header, body in (
        (RequestCode.SEND_MESSAGE_V2, send_header(), b"x"),
        (RequestCode.PULL_MESSAGE, pull, b""),
        (RequestCode.GET_MAX_OFFSET, offset, b""),
    ):
        brokers.asked.clear()
        given = header_fields(header) or {}
        plain = {name: value for name, value in given.items() if value is not None}
        fields = signed("alice", plain, body) | {"SecurityToken": "t"}
        frame = encode_frame(SerializeType.JSON, code, 1, fields=fields, body_bytes=len(body))
        channel = MemoryChannel()
        brokers["a"].take(frame + body, channel)
        ((answer, _),) = (reply for reply in channel.replies() if reply[0].is_response)
        assert answer.code == ResponseCode.SUCCESS, answer.remark
        assert brokers.asked
        for _, _, asked in brokers.asked:
            assert not {"AccessKey", "Signature", "SecurityToken"} & asked.keys()


async def test_a_forwarded_request_is_not_forwarded_again(brokers: Brokers) -> None:
    close_a(brokers)
    for code, header, body in (
        (RequestCode.SEND_MESSAGE_V2, send_header(forwarded=True), b"x"),
        (RequestCode.PULL_MESSAGE, pull_header(0, forwarded=True), b""),
    ):
        asked = len(brokers.asked)
        answer = brokers["a"].ask(code, header, body)
        assert answer.code == ResponseCode.NOT_LEADER_FOR_QUEUE
        assert len(brokers.asked) == asked


async def test_a_pull_is_answered_by_the_leader(brokers: Brokers) -> None:
    close_a(brokers)
    open_b(brokers)
    brokers.send("a", b"2")
    assert [body for _, body in brokers.read_all("a")] == [b"0", b"1", b"2"]


async def test_a_passed_pull_has_the_subscription_of_its_group(brokers: Brokers) -> None:
    brokers["a"].join(GROUP, "c", TOPIC)
    close_a(brokers)
    open_b(brokers)
    header = pull_header(0, sys_flag=0, sub_version=1, subscription=None)
    assert brokers["a"].ask(RequestCode.PULL_MESSAGE, header).code == ResponseCode.SUCCESS
    (fields,) = (each for broker, _, each in brokers.asked if broker == "broker-b")
    assert (fields["subscription"], fields["sysFlag"]) == ("*", "4")


async def test_a_broker_that_leads_again_serves_what_waits(brokers: Brokers) -> None:
    close_a(brokers)
    channel = send(brokers, b"2")
    brokers.map((A, item("b", 1, 3), item("a", 2, 10, 1)), only="a")
    brokers["a"].traffic.forwarding.retry()
    assert offset_in(channel) == 10
    assert brokers["a"].store.queue(TOPIC, 1).next_offset == 1


async def test_a_broker_that_leads_again_maps_the_offsets_of_what_waits(brokers: Brokers) -> None:
    """Logic queue 0 is physical queue 1 here, whose first offset is 10."""
    brokers["a"].join(GROUP, "c", TOPIC)
    close_a(brokers)
    commit, end = MemoryChannel(), MemoryChannel()
    offset = UpdateConsumerOffsetHeader(
        consumer_group=GROUP, topic=TOPIC, queue_id=0, commit_offset=10
    )
    brokers["a"].send(RequestCode.UPDATE_CONSUMER_OFFSET, offset, channel=commit)
    queue = GetMaxOffsetHeader(topic=TOPIC, queue_id=0)
    brokers["a"].send(RequestCode.GET_MAX_OFFSET, queue, channel=end)
    brokers.map((A, item("b", 1, 3), item("a", 2, 10, 1)), only="a")
    brokers["a"].traffic.forwarding.retry()
    assert [command.code for command, _ in commit.replies()] == [ResponseCode.SUCCESS]
    assert brokers["a"].offsets.query(GROUP, TOPIC, 1) == 0
    ((answer, _),) = end.replies()
    assert answer.header(OffsetResponseHeader).offset == 10


async def test_a_broker_with_an_old_chain_finds_the_leader_by_the_route(tmp_path: Path) -> None:
    brokers = Brokers(tmp_path, "abc")
    brokers.map((A,))
    brokers.send("a", b"0")
    brokers.map((A, item("b", 1, 1)), only="ab")
    brokers.map((A, item("b", 1, 1), item("c", 2, 2)), only="cb")
    channel = send(brokers, b"1")
    assert not channel.written
    forwarding = brokers["a"].traffic.forwarding
    await forwarding.look_up()
    forwarding.retry()
    assert offset_in(channel) == 2
    assert offset_in(send(brokers, b"2")) == 3
    assert brokers["c"].store.queue(TOPIC, 0).next_offset == 2


async def test_a_route_is_not_believed_about_a_broker_that_has_just_denied(tmp_path: Path) -> None:
    """Apache's tools give both the same epoch, and a closed queue stays registered for a while."""
    brokers = Brokers(tmp_path, "abc")
    brokers.map((A,))
    brokers.map((A, item("b", 1, 1)), only="ab")
    brokers.map((A, item("b", 1, 1), item("c", 2, 2)), only="cb")
    forwarding = brokers["a"].traffic.forwarding

    async def infos(topic: str) -> list[MappingInfo]:
        found = {info.bname[-1]: info for info in await brokers.infos(topic)}
        claimed = msgspec.structs.replace(found["b"], curr_id_map={0: 1})
        return [found["a"], found["c"], claimed]

    forwarding.find_infos = infos
    channel = send(brokers, b"1")
    assert not channel.written
    await forwarding.look_up()
    forwarding.retry()
    assert offset_in(channel) == 2
