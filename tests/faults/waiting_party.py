"""A producer of messages that wait, and a consumer that sends some of them back.

``python -m tests.faults.waiting_party KIND NUMBER NAMESERVER FILE``. The lane of a message is its
kind; what happens to it follows from its identity (``waiting_history``).
"""

from __future__ import annotations

import json
import signal
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import trio

from headrace import Consumer, Message, Producer, ReceivedMessage
from headrace.errors import HeadraceError
from tests.faults.history import LANES, Recorder, identify
from tests.faults.party import AFTER_FAILURE_S, Sender, run
from tests.faults.waiting_history import ATTEMPTS_MAX, GROUP, TOPIC, Kind, is_committed, plan_of

PAUSE_S = 0.03
RETRY_S = 1
RECALL_S = 0.1


class RolledBack(Exception):
    """Ends the block of a transaction."""


class WaitingSender:
    """Sends messages of all kinds, each in one attempt, and answers checks."""

    def __init__(self, producer: Producer, number: int, path: Path) -> None:
        self.notes = Sender(number, path)
        self._producer = producer
        self._recalled = Recorder(path.with_suffix(".recalled"))
        self._recalled.add([])  # the file exists, also without a recall

    async def run(self, lane: int, ends: trio.Event) -> None:
        """Send one message of a kind after the other; what fails is left at that."""
        while not ends.is_set():
            message = self._next(lane)
            try:
                await self._send(Kind(lane), message)
            except HeadraceError:
                await trio.sleep(AFTER_FAILURE_S)
            await trio.sleep(PAUSE_S)

    def _next(self, lane: int) -> Message:
        message = msgspec.structs.replace(self.notes.next(lane), topic=TOPIC)
        plan = plan_of(identify(message.body))
        message.delay_level, message.delay = plan.level, plan.timer_s
        if Kind(lane) is Kind.DELIVER_AT:
            message.delay = 0
            message.deliver_at = round((time.time() + plan.timer_s) * 1000)
        return message

    async def _send(self, kind: Kind, message: Message) -> None:
        """Raises HeadraceError."""
        if kind in {Kind.COMMIT, Kind.ROLL_BACK}:
            with suppress(RolledBack):
                async with self._producer.transaction(TOPIC) as transaction:
                    self.notes.told(message, await transaction.send(message))
                    if kind is Kind.ROLL_BACK:
                        raise RolledBack
        elif kind in {Kind.COMMIT_IF_ASKED, Kind.ROLL_BACK_IF_ASKED}:
            transaction = self._producer.transaction(TOPIC)
            self.notes.told(message, await transaction.send(message))
        else:
            sent = await self._producer.send(message)
            self.notes.told(message, sent)
            if kind is Kind.RECALL:
                await trio.sleep(RECALL_S)
                await self._producer.recall(sent)
                place = sent.queue.queue_id, sent.queue_offset
                self._recalled.add([(*place, identify(message.body))])


async def _answer(message: ReceivedMessage) -> bool:
    return is_committed(identify(message.body))


async def produce(number: int, nameserver: str, path: Path) -> None:
    """Send until the first SIGTERM, and answer checks until the second."""
    ends = trio.Event()
    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        async with Producer(
            nameserver=nameserver, group=GROUP, delivery_timeout_ms=0, on_check=_answer
        ) as producer:
            sender = WaitingSender(producer, number, path)
            async with trio.open_nursery() as nursery:
                for lane in range(LANES):
                    nursery.start_soon(sender.run, lane, ends)
                await anext(signals)
                ends.set()
            path.with_suffix(".sent").write_text(json.dumps(sender.notes.sent))
            await anext(signals)


async def handle(_number: int, nameserver: str, path: Path) -> None:
    """A member of the group, which notes each attempt and sends back what its plan says."""
    attempts = [Recorder(path, attempt) for attempt in range(ATTEMPTS_MAX)]
    consumer = Consumer(GROUP, TOPIC, nameserver=nameserver, max_attempts=ATTEMPTS_MAX)

    async def receive() -> None:
        async for message in consumer:
            identity, attempt = identify(message.body), message.reconsume_times
            attempts[attempt].add([(message.queue.queue_id, message.queue_offset, identity)])
            await _return(message, rejects=plan_of(identity).rejects(attempt))

    async def _return(message: ReceivedMessage, *, rejects: bool | None) -> None:
        while rejects is not None:
            try:
                await (message.reject() if rejects else message.retry(after=RETRY_S))
            except HeadraceError:
                await trio.sleep(AFTER_FAILURE_S)
            else:
                return

    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        async with consumer, trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            await anext(signals)
            nursery.cancel_scope.cancel()


if __name__ == "__main__":
    run({"waiting": produce, "handler": handle})
