"""Nobody waits for what is there: held pulls amid sends, cold reads, and clients that go."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from anyio.abc import ByteStream

from headrace.embedded import run_daemons
from headrace_broker.store.files.residency import OLD_DATA
from headrace_broker.store.log.commit_log import CommitLog
from headrace_broker.store.store_queue import StoreQueue
from headrace_broker.store.store_source import GetResult, StoreSource
from headrace_daemon.network import MemoryNetwork
from headrace_protocol.blocks import encode_records
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.command import Command, header_fields
from headrace_protocol.errors import NotReady
from headrace_protocol.frame import PREFIX_BYTES, Frame, FrameReader
from headrace_protocol.header_codecs import SerializeType, decode_header, encode_frame
from headrace_protocol.headers import BulkPullHeader, PullMessageHeader
from headrace_protocol.serving import Then
from tests.support.broker import BrokerUnderTest, broker_config
from tests.support.channel import MemoryChannel
from tests.support.stores import HOST
from tests.support.wire import bulk_send_header

COMMIT_OFFSET, SUSPEND, SUBSCRIPTION = 1, 2, 4
SUSPEND_S = 15
QUEUES = 2
TOPIC = "T"


@pytest.fixture
def broker(tmp_path: Path) -> BrokerUnderTest:
    broker = BrokerUnderTest(
        tmp_path,
        broker_config(tmp_path, max_message_size=16 << 20),
        ring_rows=4096,
        commit_log_file_bytes=32 << 20,
        consume_queue_file_bytes=20 * 50_000,
        body_bytes_max=16 << 20,
    )
    broker.create_topic(TOPIC, QUEUES)
    return broker


def pull_frame(
    offset: int,
    tags: str = "*",
    *,
    queue_id: int = 0,
    opaque: int = 1,
    codec: SerializeType = SerializeType.JSON,
    bulk: bool = False,
    **changes: Any,
) -> bytes:
    fields: dict[str, Any] = {
        "consumer_group": "readers",
        "topic": TOPIC,
        "queue_id": queue_id,
        "queue_offset": offset,
        "max_msg_nums": 32,
        "sys_flag": SUSPEND | SUBSCRIPTION,
        "commit_offset": 0,
        "suspend_timeout_millis": SUSPEND_S * 1000,
        "subscription": tags,
        **changes,
    }
    header: msgspec.Struct
    if bulk:
        code, header = RequestCode.BULK_PULL, BulkPullHeader(max_msg_bytes=1 << 20, **fields)
    else:
        code, header = RequestCode.PULL_MESSAGE, PullMessageHeader(sub_version=0, **fields)
    return encode_frame(codec, code, opaque, fields=header_fields(header))


def bulk_frame(tags: list[str], queue_id: int = 0) -> bytes:
    """A block of messages with these tags."""
    properties = [f"TAGS\x01{tag}\x02".encode() for tag in tags]
    bodies = [b"body"] * len(tags)
    block = encode_records(TOPIC, bodies, properties, born_timestamp=1, born_host=HOST)
    header = bulk_send_header(
        queue_id,
        producer_group="producers",
        topic=TOPIC,
        default_topic_queue_nums=QUEUES,
        count=len(tags),
    )
    fields = header_fields(header)
    size = len(block.body)
    frame = encode_frame(
        SerializeType.JSON, RequestCode.BULK_SEND, 0, fields=fields, body_bytes=size
    )
    return frame + bytes(block.body)


def send_frame(tag: str, queue_id: int = 0) -> bytes:
    fields = {
        "a": "producers", "b": TOPIC, "c": "TBW102", "d": QUEUES, "e": queue_id, "f": 0, "g": 1,
        "h": 0, "i": f"TAGS\x01{tag}\x02",
    }  # fmt: skip
    code, body = RequestCode.SEND_MESSAGE_V2, b"body"
    return encode_frame(SerializeType.JSON, code, 0, fields=fields, body_bytes=len(body)) + body


def next_offset(reply: Command) -> int:
    return int(reply.ext()["nextBeginOffset"])


# -- each by itself --------------------------------------------------------------------------------


@pytest.mark.parametrize("bulk", [False, True])
async def test_a_filter_sees_all_that_came_at_once(broker: BrokerUnderTest, bulk: bool) -> None:
    channel = MemoryChannel()
    broker.take(pull_frame(0, "b", bulk=bulk), channel)
    assert channel.replies() == []
    # More than one look at a queue goes through, and what is wanted comes last.
    broker.take(bulk_frame(["a"] * 3000 + ["b"]), MemoryChannel())
    offset = 0
    while not (found := channel.replies()) or found[0][0].code:
        ((reply, _),) = found
        assert reply.code == ResponseCode.PULL_RETRY_IMMEDIATELY
        assert next_offset(reply) > offset
        offset = next_offset(reply)
        broker.take(pull_frame(offset, "b", bulk=bulk), channel)
    assert next_offset(found[0][0]) == 3001


async def test_a_held_pull_is_told_why_it_cannot_be_answered(broker: BrokerUnderTest) -> None:
    broker.faults = 1
    channel, other = MemoryChannel(), MemoryChannel()
    broker.take(pull_frame(0), channel)
    broker.take(pull_frame(0, queue_id=1), other)
    # It could be stored, but with the head of an answer it is more than a frame may have.
    broker.store_message(TOPIC, 0, bytes((16 << 20) - 200))
    broker.long_polling.arrived([broker.store.queue(TOPIC, 0)])
    ((reply, _),) = channel.replies()
    assert reply.code == ResponseCode.SYSTEM_ERROR
    assert "over the limit" in (reply.remark or "")
    assert broker.long_polling.held_count == 1
    broker.take(send_frame("a", 1), MemoryChannel())
    assert other.replies()[0][0].code == ResponseCode.SUCCESS


async def test_an_offset_is_committed_once_when_the_disk_must_be_asked(
    broker: BrokerUnderTest,
) -> None:
    disk = Disk(broker, random.Random(0), cold_share=1)
    broker.take(bulk_frame(["a"] * 10), MemoryChannel())
    channel = MemoryChannel()
    broker.take(pull_frame(5, commit_offset=5, sys_flag=COMMIT_OFFSET | SUBSCRIPTION), channel)
    assert channel.replies() == []
    # A member that leaves commits while its last pull still waits.
    broker.offsets.commit("readers", TOPIC, 0, 8)
    disk.cold_share = 0
    disk.answer_one()
    assert channel.replies()[0][0].code == ResponseCode.SUCCESS
    assert broker.offsets.query("readers", TOPIC, 0) == 8


async def test_what_came_before_garbage_is_handed_out(
    tmp_path: Path, autojump_clock: object
) -> None:
    network = MemoryNetwork()
    async with run_daemons(tmp_path, network=network) as daemons:
        reader, writer = [await network.connect(daemons.broker) for _ in range(2)]
        await writer.send(send_frame("a"))
        assert await answer_code(writer) == ResponseCode.SUCCESS
        await reader.send(pull_frame(1))
        await trio.testing.wait_all_tasks_blocked()
        began = trio.current_time()
        await writer.send(send_frame("a") + b"\0\0\0\x10\0\0\0\x02no json either..")
        assert await answer_code(reader) == ResponseCode.SUCCESS
        assert trio.current_time() - began < 1


async def answer_code(stream: ByteStream) -> int:
    frames: list[Frame] = []
    reader = FrameReader()
    while not frames:
        frames = reader.feed(await stream.receive())
    return decode_header(*frames[0][:2]).code


# -- all at once -----------------------------------------------------------------------------------


class ColdSource(StoreSource):
    """A queue whose reads may have to wait."""

    def __init__(
        self, queue: StoreQueue, commit_log: CommitLog, maybe_wait: Callable[[], None]
    ) -> None:
        super().__init__(queue, commit_log)
        self._maybe_wait = maybe_wait

    def get(self, *arguments: Any) -> GetResult:
        self._maybe_wait()
        return super().get(*arguments)

    def get_bulk(self, *arguments: Any) -> GetResult:
        self._maybe_wait()
        return super().get_bulk(*arguments)


class Disk:
    """Some reads are of what the disk must give first, which takes until it is told to answer."""

    def __init__(self, broker: BrokerUnderTest, rng: random.Random, cold_share: float) -> None:
        self.cold_share = cold_share
        self._rng = rng
        self._asked: list[tuple[Callable[[], None], Then]] = []
        broker.registry.run_fetch = lambda _, wait, then: self._asked.append((wait.fetch, then))
        store: Any = broker.store
        store.source = lambda queue: ColdSource(queue, store.commit_log, self._maybe_wait)

    def _maybe_wait(self) -> None:
        if self._rng.random() < self.cold_share:
            raise NotReady(lambda: None, OLD_DATA)

    def answer_one(self) -> bool:
        if not self._asked:
            return False
        fetch, then = self._asked.pop(self._rng.randrange(len(self._asked)))
        fetch()
        then(None)
        return True


class Company:
    """Consumers that ask, and the pulls of theirs that have no answer yet, by opaque."""

    def __init__(self, broker: BrokerUnderTest, seed: int) -> None:
        self.broker = broker
        self.rng = random.Random(seed)
        self.disk = Disk(broker, self.rng, cold_share=0.1)
        self.slices: list[Iterator[None]] = []
        broker.long_polling.run_long = self.slices.append
        self.channels = [MemoryChannel() for _ in range(4)]
        self.tags: list[list[str]] = [[] for _ in range(QUEUES)]
        self.waiting: dict[int, tuple[MemoryChannel, int, int, str]] = {}
        self.header_bytes: dict[int, int] = {}
        self.answered = 0
        self.codes: Counter[int] = Counter()

    def pull(self, channel: MemoryChannel, queue_id: int, offset: int, tags: str) -> None:
        opaque = self.answered + len(self.waiting) + 1
        while opaque in self.waiting:
            opaque += 1
        bulk = self.rng.random() < 0.3
        codec = SerializeType.JSON if bulk else self.rng.choice(list(SerializeType))
        self.waiting[opaque] = channel, queue_id, offset, tags
        frame = pull_frame(offset, tags, queue_id=queue_id, opaque=opaque, codec=codec, bulk=bulk)
        self.header_bytes[opaque] = len(frame) - PREFIX_BYTES
        self.broker.take(frame, channel)

    def pull_anything(self) -> None:
        queue_id = self.rng.randrange(QUEUES)
        end = len(self.tags[queue_id])
        back = self.rng.choice((0, 0, 0, 1, 50, 2000))
        tags = self.rng.choice(("*", "*", "b"))
        for _ in range(self.rng.choice((1, 1, 100))):
            self.pull(self.rng.choice(self.channels), queue_id, max(0, end - back), tags)

    def send(self) -> None:
        queue_id = self.rng.randrange(QUEUES)
        count = self.rng.choice((0, 1, 5, 1500))
        tags = [self.rng.choice("aaaaaaab") if count < 9 else "a" for _ in range(count or 1)]
        tags[-1] = self.rng.choice("ab")
        frame = bulk_frame(tags, queue_id) if count else send_frame(tags[0], queue_id)
        self.tags[queue_id] += tags
        self.broker.take(frame, MemoryChannel())

    def leave(self) -> None:
        number = self.rng.randrange(len(self.channels))
        gone, self.channels[number] = self.channels[number], MemoryChannel()
        gone.is_open = False
        self.broker.long_polling.channel_closed(gone)
        self.waiting = {key: held for key, held in self.waiting.items() if held[0] is not gone}

    def go_on(self) -> None:
        """A slice of what runs in slices, or a read of the disk."""
        self.disk.answer_one()
        for work in self.slices[:1]:
            if sum(1 for _, _ in zip(range(30), work, strict=False)) < 30:
                self.slices.remove(work)

    def read_answers(self) -> None:
        for channel in list(self.channels):
            for reply, _ in channel.replies():
                if reply.is_response:
                    self._take(reply)

    def _take(self, reply: Command) -> None:
        channel, queue_id, offset, tags = self.waiting.pop(reply.opaque)
        self.answered += 1
        self.codes[reply.code] += 1
        if reply.code == ResponseCode.PULL_RETRY_IMMEDIATELY:
            self.pull(channel, queue_id, next_offset(reply), tags)
        elif reply.code == ResponseCode.PULL_NOT_FOUND:
            assert not self._wanted(queue_id, offset, tags)
        else:
            assert reply.code == ResponseCode.SUCCESS, reply

    def _wanted(self, queue_id: int, offset: int, tags: str) -> bool:
        there = self.tags[queue_id][offset:]
        return bool(there) if tags == "*" else tags in there

    def settle(self) -> None:
        """Let everything that goes on by itself, without time passing, come to its end."""
        while True:
            self.read_answers()
            if self.slices:
                for _ in self.slices.pop():
                    pass
            elif not self.disk.answer_one() and not any(c.written for c in self.channels):
                return

    def check(self) -> None:
        for channel, queue_id, offset, tags in self.waiting.values():
            assert channel.is_open
            assert not self._wanted(queue_id, offset, tags), (queue_id, offset, tags)
        assert self.broker.long_polling.held_count == len(self.waiting)
        charged_bytes = sum(channel.charged_bytes for channel in self.channels)
        assert charged_bytes == sum(2048 + self.header_bytes[opaque] for opaque in self.waiting)


@pytest.mark.parametrize("seed", range(8))
async def test_nobody_waits_for_what_is_there(broker: BrokerUnderTest, seed: int) -> None:
    company = Company(broker, seed)
    steps = [
        *[company.pull_anything] * 4,
        *[company.send] * 3,
        *[company.go_on] * 3,
        *[company.read_answers] * 2,
        company.leave,
    ]
    for _ in range(12):
        for step in company.rng.choices(steps, k=12):
            step()
        company.settle()
        company.check()
    assert not broker.unexpected
    assert company.codes[ResponseCode.SUCCESS]
    assert company.codes[ResponseCode.PULL_RETRY_IMMEDIATELY]
    company.disk.cold_share = 0
    broker.long_polling.answer_all()
    company.settle()
    assert company.waiting == {}
