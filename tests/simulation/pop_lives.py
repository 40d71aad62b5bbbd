"""The lives of a broker whose members pop: what is out, acked, extended, and comes again.

The machinery is that of messages that wait: the same faulty disk, the services of a broker,
and members that act at random beside them. The clock jumps ahead, and each life ends by a stop, a
kill or a power cut, also in the middle of any operation of the disk. The model is what members were
told (``Told``). Three promises are kept: a message whose ack was answered in time comes never
again, no message comes to a second member before its time, and when the last life has let
enough time pass, each message has come that was not acked.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec
import trio

from headrace_broker.pop import pop_log
from headrace_broker.pop.feature import Pop
from headrace_broker.pop.parts import PopParts
from headrace_broker.timer.timers import Timers
from headrace_protocol.bodies import SubscriptionGroupConfig
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.pop.batch_ack import BatchAck, BatchAckBody
from headrace_protocol.pop.handle import Handle
from headrace_protocol.pop.headers import (
    AckMessageHeader,
    ChangeInvisibleTimeHeader,
    PopMessageHeader,
)
from tests.simulation.history import PromiseBroken
from tests.simulation.waiting_lives import WaitingClock, WaitingLife, WaitingLives
from tests.simulation.world import World
from tests.support.broker import Answer, broker_config
from tests.support.channel import LeavingChannel
from tests.support.faulty_files import FaultRates, FaultyFiles
from tests.support.features import services_of
from tests.support.pop_broker import BROKER, messages_of

TOPIC, GROUP, DEAD = "T", "g", "%DLQ%g"
QUEUES: Final = 2
_INVISIBLE_MS: Final = (300, 1000, 5000, 60_000)
_LAST_ROUNDS_MAX: Final = 40
_ROUND_MS: Final = 120_000


class Out(NamedTuple):
    """A message that a member was told of."""

    body: bytes
    handle: Handle


@dataclass
class Told:
    """What members were told in all lives.

    sent: messages that must come unless they are acked. acked: those that must not come again.
    unsure: those whose ack was not answered. out: by message, its newest handle. repeated: those
    that a power cut may have left in two places. late_ms: the latest time that the broker's clock
    has shown.
    """

    sent: set[bytes] = field(default_factory=set)
    acked: set[bytes] = field(default_factory=set)
    unsure: set[bytes] = field(default_factory=set)
    out: dict[bytes, Handle] = field(default_factory=dict)
    repeated: set[bytes] = field(default_factory=set)
    count: int = 0
    late_ms: int = 0

    def forget_lost(self, kept: set[bytes]) -> None:
        """A power cut took what was not on disk. kept: what is in the log."""
        self.sent &= kept
        self.repeated |= kept
        self.out.clear()

    def came(self, body: bytes, handle: Handle) -> None:
        """A message came to a member. Raises PromiseBroken."""
        if body in self.acked - self.repeated:
            raise PromiseBroken(f"{body!r} came again after its ack: {handle}")
        before = self.out.get(body)
        if before is not None and handle.pop_time < before.pop_time:
            return  # an answer that waited longer for the disk
        is_early = before is not None and handle.pop_time < before.visible_time
        if is_early and body not in self.repeated:
            raise PromiseBroken(f"{body!r} came at {handle.pop_time}, before its time: {before}")
        self.out[body] = handle

    def is_sure(self, handle: Handle) -> bool:
        """True if the time of a handle cannot be over yet."""
        return self.late_ms < handle.visible_time


class PopLife(WaitingLife):
    """One broker from its start to its end."""

    lives: PopLives

    def __init__(self, lives: PopLives, files: FaultyFiles) -> None:
        super().__init__(lives, files)
        self.pops = lives.popped
        self.services = services_of(self.broker.services, Pop, Timers)
        self.steps = [
            *[self.send] * 4,
            *[self.pop] * 6,
            self.pop_and_leave,
            *[self.ack] * 4,
            self.ack_many,
            *[self.change] * 2,
            *[self.pass_time] * 5,
            self.flush,
            self.jump_clock,
        ]

    def start(self) -> None:
        for service in self.services:
            if service.load is not None:
                service.load()
        if self.broker.topics.get(TOPIC) is None:
            self.broker.create_topic(TOPIC, QUEUES)
        self.broker.groups.put(SubscriptionGroupConfig(group_name=GROUP, retry_max_times=1000))
        if self.lives.has_lost:
            # The end of a record may be lost, and with it its topic.
            known = [each for each in self.log().messages if each.topic.endswith((TOPIC, DEAD))]
            self.pops.forget_lost({message.body for message in known})
        self.lives.has_lost = False

    @property
    def parts(self) -> PopParts:
        return self.broker.part(Pop).open()

    def run(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            super().run(work)
        except* PromiseBroken as broken:
            raise _first(broken) from None

    def loops(self) -> list[Callable[[], Awaitable[Any]]]:
        broker = self.broker
        return [
            *super().loops(),
            broker.topics.incarnations.saved.run,
            broker.topics.saved.run,
            lambda: broker.offsets.run(lambda: 1.0),
            broker.long_polling.run,
        ]

    async def ask(
        self, code: int, header: msgspec.Struct | None, body: bytes = b""
    ) -> Answer | None:
        self.pops.late_ms = max(self.pops.late_ms, self.clock.ms)
        answer = await self.clients.ask(code, header, body)
        self.pops.late_ms = max(self.pops.late_ms, self.clock.ms)
        return answer

    # -- what members do -----------------------------------------------------------------------

    async def send(self) -> None:
        self.pops.count += 1
        body = b"%d" % self.pops.count
        self.broker.store_message(TOPIC, self.rng.randrange(QUEUES), body)
        await self.store.write_path.wait_confirmed()
        self.pops.sent.add(body)
        self.counts["messages sent"] += 1

    async def pop(self) -> None:
        for out in await self.take(self.rng.choice(_INVISIBLE_MS), self.rng.choice((1, 3, 32))):
            self.counts["messages popped"] += 1
            self.counts["retries popped"] += out.handle.kind > 0

    async def pop_and_leave(self) -> None:
        """A member that is gone before its answer; all of it comes to others."""
        channel = LeavingChannel()
        channel.is_greeted = True
        header = self.pop_header(self.rng.choice(_INVISIBLE_MS), self.rng.choice((1, 3, 32)))
        self.broker.send(RequestCode.POP_MESSAGE, header, channel=channel)
        self.counts["members that left"] += 1

    def pop_header(self, invisible_ms: int, count: int) -> PopMessageHeader:
        return PopMessageHeader(
            consumer_group=GROUP,
            topic=TOPIC,
            queue_id=-1,
            max_msg_nums=count,
            invisible_time=invisible_ms,
            poll_time=self.rng.choice((0, 0, 500)),
            born_time=self.clock.ms,
            init_mode=0,
        )

    async def take(self, invisible_ms: int, count: int) -> list[Out]:
        header = self.pop_header(invisible_ms, count)
        answer = await self.ask(RequestCode.POP_MESSAGE, header)
        if answer is None or answer.code != ResponseCode.SUCCESS:
            return []
        found = [Out(message.body, handle) for message, handle in messages_of(answer)]
        for body, handle in found:
            self.pops.came(body, handle)
        return found

    def any_out(self) -> Out | None:
        out = self.pops.out
        body = self.rng.choice(list(out)) if out else None
        return None if body is None else Out(body, out[body])

    async def ack(self) -> None:
        if (out := self.any_out()) is not None:
            await self.ack_one(out)

    async def ack_one(self, out: Out) -> None:
        body, handle = out
        header = AckMessageHeader(
            consumer_group=GROUP,
            topic=handle.topic(TOPIC, GROUP),
            queue_id=handle.queue_id,
            extra_info=handle.text(),
            offset=handle.queue_offset or 0,
        )
        self.pops.unsure.add(body)
        self.told_acked(out, await self.ask(RequestCode.ACK_MESSAGE, header))

    async def ack_many(self) -> None:
        if (first := self.any_out()) is None:
            return
        start, time = first.handle.start_offset, first.handle.pop_time
        outs = [
            Out(body, handle)
            for body, handle in self.pops.out.items()
            if (handle.start_offset, handle.pop_time, handle.queue_id, handle.kind)
            == (start, time, first.handle.queue_id, first.handle.kind)
        ]
        offsets = [each.handle.queue_offset or 0 for each in outs]
        body = BatchAckBody(
            acks=[BatchAck.of(TOPIC, GROUP, first.handle, offsets)], broker_name=BROKER
        )
        self.pops.unsure.update(each.body for each in outs)
        answer = await self.ask(RequestCode.BATCH_ACK_MESSAGE, None, body.encode())
        for each in outs:
            self.told_acked(each, answer)

    def told_acked(self, out: Out, answer: Answer | None) -> None:
        if answer is None:
            return
        if answer.code == ResponseCode.SUCCESS and self.pops.is_sure(out.handle):
            self.pops.acked.add(out.body)
            self.counts["messages acked"] += 1
        if self.pops.out.get(out.body) == out.handle:
            del self.pops.out[out.body]

    async def change(self) -> None:
        if (out := self.any_out()) is None:
            return
        body, handle = out
        invisible_ms = self.rng.choice((0, *_INVISIBLE_MS))
        header = ChangeInvisibleTimeHeader(
            consumer_group=GROUP,
            topic=handle.topic(TOPIC, GROUP),
            queue_id=handle.queue_id,
            extra_info=handle.text(),
            offset=handle.queue_offset or 0,
            invisible_time=invisible_ms,
            suspend=self.rng.random() < 0.5,
        )
        # Until it is answered, either time may hold.
        self.pops.out.pop(body, None)
        answer = await self.ask(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, header)
        if answer is None or answer.code != ResponseCode.SUCCESS or body in self.pops.out:
            return
        ext = answer.command.ext()
        self.counts["times changed"] += 1
        self.pops.out[body] = handle._replace(
            start_offset=handle.queue_offset or 0,
            pop_time=int(ext["popTime"]),
            invisible_time=int(ext["invisibleTime"]),
        )

    async def jump_clock(self) -> None:
        self.clock.jump(self.rng.choice((1000, 60_000)))

    # -- the last life -------------------------------------------------------------------------

    def end(self) -> None:
        """Let all come that is not acked. Raises PromiseBroken."""
        self.run(self._drain)
        dead = {message.body for message in self.log().messages if message.topic == DEAD}
        lost = self.pops.sent - self.pops.acked - self.pops.unsure - self.drained - dead
        if lost:
            raise PromiseBroken(f"{sorted(lost)} never came")

    async def _drain(self) -> None:
        self.drained: set[bytes] = set()
        for _ in range(_LAST_ROUNDS_MAX):
            await trio.sleep(1)
            is_last = not self.parts.pops.out_count
            while outs := await self.take(_ROUND_MS // 2, 32):
                is_last = False
                for out in outs:
                    self.drained.add(out.body)
                    await self.ack_one(out)
            if is_last:
                return
            self.clock.ms += _ROUND_MS


def _first(error: BaseException) -> BaseException:
    """The first error in a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class PopLives(WaitingLives):
    """A directory, and what members were told."""

    name = "broker with pops"
    clock_type = WaitingClock
    constants = (*WaitingLives.constants, (pop_log, "FILE_BYTES", 8192))

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.popped = Told()
        self.config = broker_config(world.folder, mapped_file_size_timer_log=4096)

    def begin(self) -> None:
        self.live_calmly(lambda life: life.start())

    def finish(self) -> None:
        self.live_calmly(lambda life: life.start(), lambda life: life.end())

    def new_life(self, files: FaultyFiles) -> PopLife:
        return PopLife(self, files)

    def next_files(self, rates: FaultRates | None) -> FaultyFiles:
        """After a failed write or sync what was told may be half done, as after a power cut."""
        if self.files is not None:
            faults = self.files.faults
            self.has_lost |= bool(faults["failed write"] or faults["failed sync"])
        return super().next_files(rates)
