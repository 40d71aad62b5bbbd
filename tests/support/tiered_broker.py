"""A broker with a tier: messages for it, uploads of them, and a log that has lost the oldest."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from headrace_broker.queue_directory import Source, Use
from headrace_broker.store.files.filesystem import Files
from headrace_broker.store.store_source import GetStatus
from headrace_broker.tiered.access.tiered_storage import TieredStorage
from headrace_protocol.message import decode_records
from tests.support.broker import BrokerUnderTest, broker_config
from tests.support.stores import ready

Wrapper = TypeVar("Wrapper")
TOPIC = "Orders"
BODY_BYTES = 900


def start(
    folder: Path, clock: Any = None, files: Files | None = None, **settings: Any
) -> BrokerUnderTest:
    small: dict[str, Any] = {
        "message_store_plug_in": "tieredstore",
        "tiered_backend_service_provider": "posix",
        "tiered_store_file_path": folder / "tier",
        "tiered_store_index_file_max_hash_slot_num": 13,
        "tiered_store_index_file_max_index_num": 50,
        "tiered_store_commit_log_max_size": 5000,
        "tiered_store_consume_queue_max_size": 200,
        "delete_when": "",
    }
    config = broker_config(folder, **{**small, **settings})
    broker = BrokerUnderTest(folder, config, clock, files=files)
    if broker.topics.get(TOPIC) is None:
        broker.create_topic(TOPIC)
    return broker


def tier_of(broker: BrokerUnderTest) -> TieredStorage:
    assert broker.tier is not None
    return broker.tier


def wrap_driver(broker: BrokerUnderTest, wrap: Callable[[Any], Wrapper]) -> Wrapper:
    """Put another driver in front of that of the tier, before its first use; returns the other."""
    drivers = tier_of(broker).access.drivers
    driver = wrap(drivers.open())
    drivers.open = lambda: driver
    return driver


def body(number: int) -> bytes:
    return b"%d " % number + bytes(BODY_BYTES)


def put(broker: BrokerUnderTest, first: int, count: int, topic: str = TOPIC) -> None:
    for number in range(first, first + count):
        tags = "even" if number % 2 == 0 else "odd"
        broker.store_message(topic, 0, body(number), KEYS=f"k{number}", TAGS=tags)


def upload(broker: BrokerUnderTest) -> None:
    """Everything that is there, as the follower's thread does."""
    broker.store.index_tick()
    broker.store.flusher.flush_now()
    for following in broker.store.followers.all:
        following.catch_up()


def follow(broker: BrokerUnderTest) -> None:
    """Have the follower take what is on disk, but upload and save nothing yet."""
    broker.store.flusher.flush_now()
    for work in tier_of(broker).state.following._follow():
        work.run()


async def expire_log(broker: BrokerUnderTest) -> int:
    """Have the log forget all but its last file; returns the oldest local queue offset."""
    if broker.clock.ms < 1 << 41:  # a second jump would be distrusted
        broker.clock.ms += 1 << 40
    broker.store.cleaner.request()
    await broker.store.cleaner.round()
    queue = broker.store.queue(TOPIC, 0)
    return ready(broker.store.source(queue).min_offset)


def source(broker: BrokerUnderTest, use: Use = Use.PULL, topic: str = TOPIC) -> Source:
    return broker.directory.serve(topic, 0, use).source


def read_all(broker: BrokerUnderTest, topic: str = TOPIC, offset: int = 0) -> list[int]:
    """The numbers in all bodies from an offset on, as a consumer pulls them."""
    numbers: list[int] = []
    reader = source(broker, topic=topic)
    while True:
        result = ready(partial(reader.get, offset, 3, 100_000, None))
        if result.status is not GetStatus.FOUND:
            assert result.status is GetStatus.OFFSET_OVERFLOW_ONE, result
            return numbers
        assert (result.min_offset, result.max_offset) == reader.known_range()
        for buffer in result.buffers:
            for message in decode_records(buffer):
                assert message.queue_offset == offset
                numbers.append(int(message.body.split()[0]))
                offset += 1
        assert result.next_offset == offset
