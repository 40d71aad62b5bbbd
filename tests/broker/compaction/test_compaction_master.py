"""Rebuilds over a connection: what is asked of the master, and masters that can't be used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import trio

from headrace_broker.compaction.rebuilds import Rebuilds
from headrace_broker.peers.peers import Peers
from headrace_daemon.network import MemoryNetwork
from headrace_protocol.bodies import CompactedTopicState, HeartbeatData
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import CompactTopicHeader, PullMessageResponseHeader
from headrace_protocol.serving import Reply
from tests.broker.compaction.test_compaction_rebuild import POLICY, fill, found, lose, start
from tests.broker.compaction.test_compaction_source import C, follow
from tests.support.broker import BrokerUnderTest
from tests.support.running import in_background
from tests.support.scripted import Asked, close, scripted
from tests.support.wire import pull_header

PULL = RequestCode.LITE_PULL_MESSAGE


def answers_of(master: BrokerUnderTest) -> Callable[[Asked], Reply]:
    """Pulls as a broker answers them, five messages at a time."""

    def answer(asked: Asked) -> Reply:
        header = pull_header(
            int(asked.ext["queueOffset"]),
            int(asked.ext["queueId"]),
            topic=asked.ext["topic"],
            consumer_group=asked.ext["consumerGroup"],
            max_msg_nums=5,
            sys_flag=int(asked.ext["sysFlag"]),
            suspend_timeout_millis=0,
            subscription=asked.ext["subscription"],
        )
        reply = master.ask(asked.code, header)
        head = reply.command.header(PullMessageResponseHeader)
        return Reply(head, (reply.body,), reply.code, reply.remark)

    return answer


def records(broker: BrokerUnderTest, topic: str, next_offset: int = 1) -> Reply:
    """One message of a topic as the answer to a pull at 0."""
    queue = broker.store.queue(topic, 0)
    result = broker.store.source(queue).get(0, 1, 1, None)
    return pulled(b"".join(result.buffers), next_offset)


def pulled(body: bytes, next_offset: int = 1) -> Reply:
    head = PullMessageResponseHeader(
        suggest_which_broker_id=0, next_begin_offset=next_offset, min_offset=0, max_offset=1000
    )
    return Reply(head, (body,))


async def rebuild(broker: BrokerUnderTest, network: MemoryNetwork, address: str) -> str:
    """Rebuild by the service; returns the problem."""
    peers = Peers(network.connect, lambda: 3000)

    async def is_source(_address: str) -> bool:
        return True

    rebuilds = Rebuilds(
        broker.compaction.compactor,
        lambda _topic: POLICY,
        peers,
        is_source,
        broker.clock.now_ms,
        2000,
    )
    rebuilds.request(C, address)
    async with in_background(peers.run, rebuilds.run):
        with trio.fail_after(60):
            while rebuilds.is_pending(C):
                await trio.lowlevel.checkpoint()
    return rebuilds.problem(C)


async def test_a_queue_is_rebuilt_as_a_member_of_a_group(tmp_path: Path) -> None:
    values = fill(tmp_path / "a")
    lose(tmp_path / "a", tmp_path / "b")
    master, broker = start(tmp_path / "a"), start(tmp_path / "b")
    follow(broker)
    network = MemoryNetwork()
    async with scripted(network) as (script,):
        script.answer(PULL, answers_of(master))
        assert not await rebuild(broker, network, script.address)
        assert found(broker) == values
        first, *pulls, last = [asked.code for asked in script.asked]
        assert (first, last) == (RequestCode.HEART_BEAT, RequestCode.UNREGISTER_CLIENT)
        assert set(pulls) == {PULL}
        data = HeartbeatData.decode(script.asked[0].body)
        assert data.consumer_data_set[0].group_name == "C-0-pull-group"
        assert script.asked[-1].ext["consumerGroup"] == "C-0-pull-group"
        assert script.asked[-1].ext["clientID"] == data.client_id


async def test_masters_that_cannot_be_used_are_named_and_change_nothing(tmp_path: Path) -> None:
    fill(tmp_path / "a")
    lose(tmp_path / "a", tmp_path / "b")
    master, broker = start(tmp_path / "a"), start(tmp_path / "b")
    follow(broker)
    before = found(broker)
    master.create_topic("D", 1)
    master.store_message("D", 0, b"x", KEYS="k0")
    network = MemoryNetwork()
    moved = pulled(b"", 0)
    moved.code = ResponseCode.PULL_OFFSET_MOVED
    good = answers_of(master)
    async with scripted(network) as (script,):
        for answer, problem in (
            (Reply(code=ResponseCode.TOPIC_NOT_EXIST, remark="no such topic"), "no such topic"),
            (Reply(), "cannot be read"),
            (pulled(b"\0" * 99), "no message record at byte 0"),
            (pulled(b"garbage"), "no message record"),
            (records(master, "D"), "not all messages are of C/0"),
            (records(master, C, next_offset=0), "records with the queue offsets"),
            (moved, "nextBeginOffset=0 after 0"),
            (close, "the connection to"),
        ):
            for answers in ([answer], [good, answer]):
                script.answer(PULL, *answers)
                found_problem = await rebuild(broker, network, script.address)
                assert found_problem.startswith(f"C/0 not rebuilt from {script.address}: ")
                assert problem in found_problem or answers[0] is good
                assert found(broker) == before
        script.answer(PULL, good)
        assert not await rebuild(broker, network, script.address)
        assert found(broker) != before
    problem = await rebuild(broker, network, "127.0.0.1:9")
    assert "cannot connect to 127.0.0.1:9" in problem


def test_rebuilds_are_asked_for_by_request(tmp_path: Path) -> None:
    fill(tmp_path / "a")
    broker = start(tmp_path / "a")
    broker.create_topic("plain", 1)

    def ask(topic: str, address: str) -> tuple[int, str, bytes]:
        header = CompactTopicHeader(topic=topic, rebuild_from=address)
        answer = broker.ask(RequestCode.COMPACT_TOPIC, header)
        return answer.code, answer.remark, answer.body

    code, remark, _ = ask("plain", "127.0.0.1:1")
    assert (code, "is not compacted" in remark) == (ResponseCode.INVALID_PARAMETER, True)
    code, remark, _ = ask(C, "nowhere")
    assert (code, "expected HOST:PORT" in remark) == (ResponseCode.INVALID_PARAMETER, True)
    code, _, body = ask(C, "127.0.0.1:1")
    assert CompactedTopicState.decode(body).is_rebuilding
    assert broker.compaction.rebuilds.is_pending(C)
