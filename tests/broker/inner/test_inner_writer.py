"""The way into the log for services."""

from __future__ import annotations

import trio
import trio.testing

from headrace_broker.inner.waiting import WaitingQueue
from headrace_broker.inner.writer import InnerMessage
from headrace_broker.store.write.confirmation import Gate, OnConfirmed
from tests.support.broker import BrokerUnderTest

MESSAGE = InnerMessage("T", 0, b"body", b"", 0, 0, 0, 17, 0, b"\x7f\0\0\1\0\0\0\1")


class Turnstile:
    """A gate that the test moves."""

    def __init__(self) -> None:
        self.offset = 0
        self.waiting: list[tuple[int, OnConfirmed]] = []

    def gate(self) -> Gate:
        return Gate(
            lambda: self.offset,
            lambda: None,
            lambda end_offset, callback: self.waiting.append((end_offset, callback)),
        )

    def move(self, offset: int) -> None:
        self.offset = offset
        for end_offset, callback in self.waiting:
            if end_offset <= offset:
                callback(True)


async def test_messages_that_keep_coming_hold_no_reader_up(
    broker: BrokerUnderTest, autojump_clock: trio.testing.MockClock
) -> None:
    store, writer = broker.store, broker.writer
    queue, turnstile = WaitingQueue(store, "T", 0), Turnstile()
    broker.create_topic("T")
    store.write_path.confirmation.add(turnstile.gate())
    store.write_path.begin()
    writer.append_now(MESSAGE)
    first_end = store.commit_log.max_offset
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.published, queue)
            await trio.testing.wait_all_tasks_blocked()
            writer.append_now(MESSAGE)
            turnstile.move(first_end)
    assert (queue.end, queue.appended_end) == (1, 2)
    turnstile.move(store.commit_log.max_offset)
