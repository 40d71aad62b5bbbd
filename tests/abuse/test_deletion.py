"""A topic that is deleted a slice at a time, while others send to it and delete it too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.frame import FrameReader
from tests.support.broker import BrokerUnderTest
from tests.support.channel import MemoryChannel
from tests.support.wires import pull_fields, request, send_fields

TOPIC = "Gone"
QUEUES = 4


class Slices:
    """Long work that goes on when the test says so."""

    def __init__(self, broker: BrokerUnderTest) -> None:
        self.waiting: list[Iterator[None]] = []
        broker.registry.run_long = self.waiting.append
        broker.registry.slice_s = 0.0

    def step(self) -> None:
        """One slice of each."""
        self.waiting[:] = [work for work in self.waiting if next(work, self) is None]

    def finish(self) -> None:
        while self.waiting:
            self.step()


def answers(
    broker: BrokerUnderTest, code: int, fields: dict[str, Any], body: bytes = b""
) -> MemoryChannel:
    """The client that gets them."""
    channel = MemoryChannel()
    broker.registry.handle(channel, FrameReader().feed(request(code, fields, body)))
    broker.store.write_path.commit()
    return channel


def send(broker: BrokerUnderTest, queue_id: int) -> tuple[int, str]:
    channel = answers(broker, 310, send_fields(b=TOPIC, c="TBW102", d=QUEUES, e=queue_id), b"x")
    ((command, _),) = channel.replies()
    return command.code, command.remark or ""


def delete(broker: BrokerUnderTest) -> MemoryChannel:
    return answers(broker, RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": TOPIC})


def test_a_topic_is_not_made_anew_before_its_queues_are_gone(tmp_path: Path) -> None:
    broker = BrokerUnderTest(tmp_path)
    slices = Slices(broker)
    for queue_id in range(QUEUES):
        assert send(broker, queue_id)[0] == ResponseCode.SUCCESS
    broker.store.write_path.publish()
    first = delete(broker)
    slices.step()
    code, remark = send(broker, QUEUES - 1)
    assert code == ResponseCode.SYSTEM_BUSY
    assert "is being deleted: retry once" in remark
    second = delete(broker)
    slices.finish()
    for channel in (first, second):
        assert [command.code for command, _ in channel.replies()] == [ResponseCode.SUCCESS]
    assert broker.store.queues_of(TOPIC) == []
    for queue_id in range(QUEUES):
        assert send(broker, queue_id)[0] == ResponseCode.SUCCESS
    broker.store.write_path.publish()
    assert broker.store.commit_log.life.refusal is None
    channel = answers(broker, 11, pull_fields(topic=TOPIC, queueId=QUEUES - 1))
    assert [command.code for command, _ in channel.replies()] == [ResponseCode.SUCCESS]
