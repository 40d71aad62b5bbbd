"""A broker in which messages wait, and what its producers do."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from headrace_protocol.codes import RequestCode
from headrace_protocol.header_codecs import SerializeType, encode_frame
from headrace_protocol.message import StoredMessage
from tests.support.broker import Answer, BrokerUnderTest, broker_config
from tests.support.channel import MemoryChannel
from tests.support.stores import read_all
from tests.support.until import until

_SIZES: dict[str, Any] = {"commit_log_file_bytes": 1 << 16, "consume_queue_file_bytes": 4000}


class WaitingBroker:
    """A broker, of whose services those in ``loads`` and ``runs`` are started."""

    loads: Sequence[Callable[[], None]]
    runs: Sequence[Callable[[], Awaitable[None]]]

    def __init__(
        self,
        folder: Path,
        ms: int | None = None,
        settings: Mapping[str, Any] | None = None,
        **store: Any,
    ) -> None:
        config = broker_config(folder, **(settings or {}))
        self.broker = BrokerUnderTest(folder, config, **{**_SIZES, **store})
        self.broker.clock.ms = ms or self.broker.clock.ms

    @property
    def clock(self) -> Any:
        return self.broker.clock

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        for load in self.loads:
            await trio.to_thread.run_sync(load)
        async with trio.open_nursery() as nursery:
            await nursery.start(self.broker.store.run)
            for run in self.runs:
                nursery.start_soon(run)
            yield
            nursery.cancel_scope.cancel()

    def produce(self, body: bytes, channel: MemoryChannel | None = None, **fields: Any) -> Answer:
        """The answer to a message, to queue 1 of T unless ``fields`` say otherwise."""
        ext = {"a": "g", "b": "T", "c": "TBW102", "d": 4, "e": 1, "f": 0, "g": 17, "h": 5}
        frame = encode_frame(
            SerializeType.JSON,
            RequestCode.SEND_MESSAGE_V2,
            7,
            fields={**ext, **fields},
            body_bytes=len(body),
        )
        channel = channel or MemoryChannel()
        channel.is_greeted = True
        self.broker.take(frame + body, channel)
        (reply,) = channel.replies()
        return Answer(*reply)

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Let the services look at the clock, which the test has moved, until something is so."""
        await until(is_so)

    def stored(self, topic: str = "T", queue_id: int = 1) -> list[StoredMessage]:
        return read_all(self.broker.store, self.broker.store.queue(topic, queue_id))

    def bodies(self, topic: str = "T", queue_id: int = 1) -> list[bytes]:
        return [message.body for message in self.stored(topic, queue_id)]
