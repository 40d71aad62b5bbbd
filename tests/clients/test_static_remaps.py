"""Our clients on running brokers while a static topic's queues move."""

from __future__ import annotations

from collections import defaultdict

import pytest
import trio

from headrace import Consumer, Message, Producer, SendResult
from headrace.admin.client import Admin
from headrace_protocol.statictopic.plans import Mode
from tests.support.fixtures import brokers_named
from tests.support.running_brokers import Brokers

pytestmark = pytest.mark.slow

QUEUES = 3
END = Message("T", b"end")


mq = pytest.fixture(brokers_named(["a", "b", "c"]))


class Flow:
    """Messages with keys that are sent one after the other, while a group reads them.

    sent, read: offsets and bodies by queue, in their order.
    """

    def __init__(self, mq: Brokers, *, ordered: bool) -> None:
        self._mq = mq
        self._ordered = ordered
        self.sent: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
        self.read: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
        self._count = 0
        self._is_sending = True

    async def send(self, task_status: trio.TaskStatus[None]) -> None:
        async with Producer(nameserver=self._mq.nameserver, connect=self._mq.network.connect) as p:
            while self._is_sending:
                for _ in range(5):
                    await self._send_one(p)
                async with p.pipeline(on_result=self._note) as pipeline:
                    for _ in range(20):
                        await pipeline.send(self._next())
                if self._count == 25:
                    task_status.started()
            for queue in await p.queues("T"):
                self._note(END, await p.send(END, queue=queue))

    async def _send_one(self, producer: Producer) -> None:
        message = self._next()
        self._note(message, await producer.send(message))

    def _next(self) -> Message:
        self._count += 1
        return Message("T", b"%d" % self._count, key=f"k{self._count % 7}")

    def _note(self, message: Message, result: SendResult | Exception) -> None:
        if isinstance(result, Exception):
            raise result
        self.sent[result.queue.queue_id].append((result.queue_offset, message.body))

    def stop(self) -> None:
        self._is_sending = False

    async def receive(self) -> None:
        ends = 0
        async with Consumer(
            "g",
            "T",
            nameserver=self._mq.nameserver,
            connect=self._mq.network.connect,
            ordered=self._ordered,
        ) as consumer:
            async for message in consumer:
                self.read[message.queue.queue_id].append((message.queue_offset, message.body))
                ends += message.body == END.body
                if ends == QUEUES:
                    break


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("mode", [Mode.STRICT, Mode.AVAILABLE])
async def test_nothing_is_lost_or_doubled_while_queues_move(
    mq: Brokers, mode: Mode, ordered: bool
) -> None:
    async with Admin(**mq.at) as admin:
        await admin.create_static_topic("T", QUEUES, brokers=["a"])
        flow = Flow(mq, ordered=ordered)
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                await nursery.start(flow.send)
                nursery.start_soon(flow.receive)
                for targets in (["b", "c"], ["a"], ["c"]):
                    await admin.remap_static_topic("T", targets, mode=mode)
                flow.stop()
        for queue, sent in flow.sent.items():
            decided = [pair for pair in sent if pair[0] >= 0]
            assert mode is Mode.AVAILABLE or decided == sent
            assert [body for _, body in flow.read[queue]] == [body for _, body in sent]
            assert set(decided) <= set(flow.read[queue])
            offsets = [offset for offset, _ in flow.read[queue]]
            assert offsets == sorted(set(offsets))
            if mode is Mode.STRICT:
                assert offsets == list(range(len(offsets)))
