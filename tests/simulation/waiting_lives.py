"""The lives of a broker with messages that wait: delayed ones, and those that are sent back.

The same faulty disk as that of a store alone. The clock jumps both ways, topics are deleted and
made anew, the disk fills up, tasks are cancelled in the middle of a delivery. The log is the judge:
whatever happens, a message that waited is delivered at most once and never early; when the last
life has let enough time pass, each of them is delivered.
"""

from __future__ import annotations

import math
from collections import Counter
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING, Final, NamedTuple

import trio

from headrace_broker.store.errors import StoreError, StoreFormatError, StoreNotWritable
from headrace_broker.store.log.log_rows import scan_from
from headrace_protocol.bodies import SubscriptionGroupConfig
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import ConsumerSendMsgBackHeader, SendMessageHeaderV2
from headrace_protocol.system_topics import SCHEDULE_TOPIC
from tests.simulation.determinism import decided_by, temporary_folder
from tests.simulation.history import PromiseBroken
from tests.simulation.store_lives import StoreClock, run_here
from tests.simulation.totals import Outcome
from tests.support.broker import BrokerUnderTest, broker_config
from tests.support.faulty_files import FaultRates, FaultyFiles, PowerCut, next_life

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from headrace_protocol.message import StoredMessage

NAME: Final = "broker with messages that wait"
TOPICS: Final = ("One", "Two")
LEVELS_MS: Final = (1000, 5000, 60_000)
LIVES: Final = 6
STEPS_MAX: Final = 50
HOUR_MS: Final = 3_600_000
# What a step gives a task of the broker; the rest is cancelled.
PATIENCE_S: Final = 3.0


class WaitingClock(StoreClock):
    """A clock that moves on while all tasks sleep."""

    def deadline_to_sleep_time(self, deadline: float) -> float:
        if deadline == math.inf:
            return math.inf
        self.ms = max(self.ms, math.ceil(deadline * 1000) + self.jumped_ms)
        return 0.0


class Jump(NamedTuple):
    """The clock went back. log_end: what lies before it in the log waited already."""

    log_end: int
    now_ms: int


class Life:
    """One broker from its start to its end."""

    def __init__(
        self, folder: Path, files: FaultyFiles, clock: WaitingClock, jumps: list[Jump]
    ) -> None:
        self.rng = files.rng
        self.files = files
        self.clock = clock
        self.jumps = jumps
        self.counts: Counter[str] = Counter()
        files.clock = clock
        self.broker = BrokerUnderTest(
            folder,
            broker_config(folder),
            clock,
            files=files,
            commit_log_file_bytes=65536,
            consume_queue_file_bytes=2000,
            delay_levels_ms=LEVELS_MS,
        )
        self.store = self.broker.store
        self.schedule = self.broker.parts.waiting.schedule
        self.steps: list[Callable[[], None]] = [
            *[self.send] * 6,
            *[self.send_back] * 3,
            *[self.deliver] * 6,
            *[self.pass_time] * 4,
            *[self.save] * 2,
            self.flush,
            self.jump_clock,
            self.fill_disk,
            self.change_topic,
        ]

    def live(self, step_count: int) -> None:
        # A power cut may have cut the log since.
        end = self.store.commit_log.max_offset
        self.jumps[:] = [jump._replace(log_end=min(jump.log_end, end)) for jump in self.jumps]
        self.schedule.load()
        self.check()
        for topic in TOPICS:
            self.create(topic)
        self.broker.groups.put(SubscriptionGroupConfig(group_name="g", retry_max_times=3))
        for _ in range(step_count):
            with suppress(OSError, StoreNotWritable):
                self.rng.choice(self.steps)()
            if not self.store.commit_log.life.is_writable:
                return

    # -- steps -------------------------------------------------------------------------------------

    def create(self, topic: str) -> None:
        if self.broker.topics.get(topic) is None:
            self.broker.create_topic(topic)

    def send(self) -> None:
        """A message with a delay, or a few."""
        for _ in range(self.rng.choice((1, 1, 5))):
            self.clock.ms += self.rng.choice((1, 300))
            self.send_one()

    def send_one(self) -> None:
        level = self.rng.choice((0, 1, 1, 2, 3, 9))
        header = SendMessageHeaderV2(
            producer_group="p",
            topic=self.rng.choice(TOPICS),
            default_topic="TBW102",
            default_topic_queue_nums=2,
            queue_id=self.rng.randrange(2),
            sys_flag=0,
            born_timestamp=1,
            flag=0,
            properties=f"a\x01b\x02DELAY\x01{level}\x02",
        )
        body = self.rng.randbytes(self.rng.choice((10, 300)))
        answer = self.broker.ask(RequestCode.SEND_MESSAGE_V2, header, body)
        self.counts["sends accepted"] += answer.code == ResponseCode.SUCCESS

    def send_back(self) -> None:
        """A consumer could not handle one of the newest messages."""
        messages = [each for each in self.messages() if each.topic != SCHEDULE_TOPIC][-9:]
        if messages:
            header = ConsumerSendMsgBackHeader(
                offset=self.rng.choice(messages).physical_offset,
                group="g",
                delay_level=self.rng.choice((0, 1, 2, -1)),
            )
            answer = self.broker.ask(RequestCode.CONSUMER_SEND_MSG_BACK, header)
            self.counts["messages sent back"] += answer.code == ResponseCode.SUCCESS

    def deliver(self) -> None:
        """The schedule runs for a moment, and may be cancelled anywhere."""
        self.run(self.deliver_all)

    async def deliver_all(self) -> None:
        while not await self.schedule.deliver_due():
            pass

    def save(self) -> None:
        self.run(self.save_flushed)

    async def save_flushed(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.store.flusher.run_group_commit)
            await self.schedule.save()
            nursery.cancel_scope.cancel()

    def run(self, work: Callable[[], Awaitable[None]]) -> None:
        async def run() -> None:
            with trio.move_on_after(PATIENCE_S):
                await work()

        try:
            trio.run(run, clock=self.clock)
        except* PowerCut:
            raise PowerCut from None
        except* (OSError, StoreNotWritable):
            pass

    def flush(self) -> None:
        self.store.flusher.flush_now()

    def pass_time(self) -> None:
        self.clock.ms += self.rng.choice((100, 1000, 5000, 60_000))

    def jump_clock(self) -> None:
        jump_ms = self.rng.choice((-HOUR_MS, HOUR_MS, 8 * 24 * HOUR_MS))
        self.clock.ms += jump_ms
        self.clock.jumped_ms += jump_ms
        if jump_ms < 0:
            self.jumps.append(Jump(self.store.commit_log.max_offset, self.clock.ms))

    def fill_disk(self) -> None:
        self.files.is_full = not self.files.is_full
        self.clock.ms += 2000

    def change_topic(self) -> None:
        topic = self.rng.choice(TOPICS)
        self.broker.topics.delete(topic)
        if self.rng.random() < 0.7:
            self.create(topic)

    # -- what the log says -------------------------------------------------------------------------

    def messages(self) -> list[StoredMessage]:
        columns = [block.columns for block in scan_from(self.store.commit_log.files, 0)]
        return [each.message(number) for each in columns for number in range(len(each))]

    def check(self) -> int:
        """Compare what waited with what was delivered; how many wait."""
        messages = self.messages()
        waited = {each.physical_offset: each for each in messages if each.topic == SCHEDULE_TOPIC}
        delivered = [
            each
            for each in messages
            if each.topic != SCHEDULE_TOPIC
            and "REAL_TOPIC" in each.properties
            and each.properties["DELAY"] != "0"  # a dead letter, which was delivered before
        ]
        counts = Counter(each.prepared_transaction_offset for each in delivered)
        if twice := [offset for offset, count in counts.items() if count > 1]:
            raise PromiseBroken(f"what waited at {twice} was delivered twice")
        for message in delivered:
            source = waited.get(message.prepared_transaction_offset)
            if source is None:
                raise PromiseBroken(f"{message} was delivered and never waited")
            if message.stored_body != source.stored_body:
                raise PromiseBroken(f"{message} has another body than {source}")
            if message.store_timestamp < self.due_ms(source, message):
                raise PromiseBroken(f"{message} was delivered early")
        return len(waited) - len(delivered)

    def due_ms(self, source: StoredMessage, delivered: StoredMessage) -> int:
        """The earliest time at which a message may have been delivered."""
        delay_ms = LEVELS_MS[min(int(source.properties["DELAY"]), len(LEVELS_MS)) - 1]
        jumps = [
            jump.now_ms
            for jump in self.jumps
            if source.physical_offset < jump.log_end <= delivered.physical_offset
        ]
        return min([source.store_timestamp, *jumps]) + delay_ms

    def deliver_everything(self) -> None:
        for _ in range(3):
            self.clock.ms += max(LEVELS_MS)
            trio.run(self.deliver_all, clock=self.clock)
        if waiting := self.check():
            raise PromiseBroken(f"{waiting} messages were not delivered")
        self.counts["messages in the last log"] = len(self.messages())


def run(seed: int) -> Outcome:
    """All lives of a broker. Raises PromiseBroken."""
    clock = WaitingClock()
    with temporary_folder() as folder, decided_by(seed, clock.current_time) as patch:
        patch.setattr(trio.to_thread, "run_sync", run_here)
        return _Broker(folder, Random(seed), clock).run()


class _Broker:
    """A directory, and what happened to it."""

    def __init__(self, folder: Path, rng: Random, clock: WaitingClock) -> None:
        self.folder = folder
        self.rng = rng
        self.clock = clock
        self.jumps: list[Jump] = []
        self.files: FaultyFiles | None = None
        self.outcome = Outcome(NAME, Counter(), Counter())

    def run(self) -> Outcome:
        for _ in range(LIVES):
            self.live()
        self.live_calmly()
        return self.outcome

    def live(self) -> None:
        rng = self.rng
        rates = FaultRates(write=rng.choice((0, 0, 0.01)), sync=rng.choice((0, 0, 0.02)))
        files = self.next_files(rates)
        files.cut_after = rng.choice((-1, -1, rng.randrange(300)))
        life = None
        try:
            life = Life(self.folder, files, self.clock, self.jumps)
            life.live(rng.randrange(STEPS_MAX))
            self.end(life, is_clean=rng.random() < 0.3)
        except PowerCut:
            pass
        except StoreFormatError:
            raise
        except (StoreError, OSError):
            if not (files.faults["failed write"] or files.faults["failed sync"] or files.is_full):
                raise
            files.cut_power()
        finally:
            self.over(life, files)

    def end(self, life: Life, *, is_clean: bool) -> None:
        if is_clean:
            life.schedule.finish()
            life.store.close()
        if life.files.faults["failed sync"] or self.rng.random() < 0.5:
            life.files.cut_power()
        else:
            life.files.kill()

    def live_calmly(self) -> None:
        life = Life(self.folder, self.next_files(None), self.clock, self.jumps)
        try:
            life.live(0)
            life.deliver_everything()
            life.store.close()
            life.files.stop()
        finally:
            self.over(life, life.files)

    def next_files(self, rates: FaultRates | None) -> FaultyFiles:
        root = broker_config(self.folder).store_path_root_dir
        self.files = next_life(root, self.rng, rates, self.files)
        return self.files

    def over(self, life: Life | None, files: FaultyFiles) -> None:
        self.outcome.faults.update(files.faults)
        self.outcome.counts["lives"] += 1
        if life is not None:
            life.store.abandon()
            self.outcome.counts.update(life.counts)
