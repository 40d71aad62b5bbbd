"""Five remaps of a static topic under 2,000 messages/s of our producer and consumer."""

from __future__ import annotations

import itertools
import struct
from collections import defaultdict
from typing import TYPE_CHECKING

import trio

from headrace import Consumer, Message, Producer
from headrace.admin.client import Admin

if TYPE_CHECKING:
    from headrace import SendResult
    from headrace_protocol.statictopic.plans import Mode
    from tests.bench.driver import Report

RATE, TICK_S = 2000, 0.005
LOADED_QUEUES = 8
WARM_UP_S, PAUSE_S = 3, 2
TARGETS = (
    ["broker-a"],
    ["broker-b", "broker-c"],
    ["broker-c"],
    ["broker-a", "broker-b"],
    ["broker-b"],
)
END_S = 30
_DUE = struct.Struct(">d")


class _Load:
    """Sends on a schedule, and what came of them. Times are those of the loop's clock."""

    def __init__(self, nameserver: str, topic: str) -> None:
        self.nameserver = nameserver
        self.topic = topic
        self.is_sending = True
        self.failed = self.received = 0
        # When it was due, and how long the answer took from then on.
        self.latencies: list[tuple[float, float]] = []
        self.latest_s = 0.0
        self.acknowledged: dict[int, list[float]] = defaultdict(list)
        self.spans: list[tuple[float, float]] = []

    async def produce(self) -> None:
        """Send on schedule until told to stop, whatever is unanswered."""
        async with (
            Producer(nameserver=self.nameserver) as producer,
            producer.pipeline(on_result=self._answered) as pipeline,
        ):
            due = trio.current_time()
            while self.is_sending:
                await trio.sleep_until(due)
                for _ in range(round(RATE * TICK_S)):
                    await pipeline.send(Message(self.topic, _DUE.pack(due)))
                due += TICK_S

    def _answered(self, message: Message, result: SendResult | Exception) -> None:
        if isinstance(result, Exception):
            self.failed += 1
            return
        now, due = trio.current_time(), _DUE.unpack(message.body)[0]
        self.latencies.append((due, now - due))
        self.acknowledged[result.queue.queue_id].append(now)

    async def consume(self) -> None:
        group = f"group-{self.topic}"
        async with Consumer(group, self.topic, nameserver=self.nameserver) as consumer:
            async for message in consumer:
                self.received += 1
                late = trio.current_time() - _DUE.unpack(message.body)[0]
                self.latest_s = max(self.latest_s, late)

    async def remap(self, mode: Mode) -> None:
        async with Admin(nameserver=self.nameserver) as admin:
            await trio.sleep(WARM_UP_S)
            self.latest_s = 0.0
            for target in TARGETS:
                began = trio.current_time()
                await admin.remap_static_topic(self.topic, target, mode=mode)
                self.spans.append((began, trio.current_time()))
                await trio.sleep(PAUSE_S)

    def report(self) -> Report:
        began = self.spans[0][0]
        during = sorted(
            took for due, took in self.latencies if any(a <= due <= b for a, b in self.spans)
        )
        others = sorted(took for _, took in self.latencies)
        silences = (
            later - earlier
            for times in self.acknowledged.values()
            for earlier, later in itertools.pairwise(times)
            if earlier >= began
        )
        return {
            "failed": float(self.failed),
            "unread": float(len(self.latencies) - self.received),
            "remap_p99_ms": during[len(during) * 99 // 100] * 1000,
            "any_p99_ms": others[len(others) * 99 // 100] * 1000,
            "silent_s": max(silences),
            "latest_s": self.latest_s,
            "longest_remap_s": max(b - a for a, b in self.spans),
        }


async def _run(nameserver: str, mode: Mode, topic: str) -> Report:
    async with Admin(nameserver=nameserver) as admin:
        await admin.create_static_topic(topic, LOADED_QUEUES)
    load = _Load(nameserver, topic)
    async with trio.open_nursery() as consuming:
        consuming.start_soon(load.consume)
        async with trio.open_nursery() as producing:
            producing.start_soon(load.produce)
            await load.remap(mode)
            load.is_sending = False
        with trio.move_on_after(END_S):
            while load.received < len(load.latencies):  # noqa: ASYNC110 - counted elsewhere
                await trio.sleep(0.05)
        consuming.cancel_scope.cancel()
    return load.report()


def under_load(nameserver: str, mode: Mode, number: int) -> Report:
    """One run on the brokers a, b and c."""
    return trio.run(_run, nameserver, mode, f"LOADED_{mode.value.upper()}_{number}")
