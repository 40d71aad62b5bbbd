"""A window of blocks in flight: several at once, but one per queue to keep their order."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self

import anyio.lowlevel

from headrace.errors import HeadraceError, OutcomeUnknown
from headrace.telemetry import ended

if TYPE_CHECKING:
    from headrace.messages import SendResult
    from headrace.producer.block import Block
    from headrace.producer.chunks import Chunk
    from headrace.producer.encoding import Target
    from headrace.producer.sender import AnyOutgoing, Choose, Sender
    from headrace.telemetry import SendSpan
    from headrace_protocol.bodies import MessageQueue
    from headrace_protocol.drivers.aio import Answer

# A broker processes blocks one after another; more blocks would only wait in memory.
_BLOCKS_MAX = 4


class _InFlight(NamedTuple):
    """A block in flight; attempt: the request and its future answer, or why it was not sent."""

    block: Block
    choose: Choose
    target: Target
    attempt: tuple[AnyOutgoing, Answer] | HeadraceError
    span: SendSpan | None


class Window:
    """Sends blocks; use it in a ``with`` block, whose end abandons blocks still in flight.

    results: results of the stored blocks, in the order of sending.
    """

    def __init__(self, sender: Sender) -> None:
        self.results: list[SendResult] = []
        self._sender = sender
        self._in_flight: deque[_InFlight] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for in_flight in self._in_flight:
            if not isinstance(in_flight.attempt, HeadraceError):
                in_flight.attempt[1].forget()
            if in_flight.span:
                in_flight.span.end(OutcomeUnknown())

    async def send(self, chunk: Chunk, queue: MessageQueue | None) -> None:
        """Start sending messages, to ``queue`` if it is given.

        Raises the last error of any block that was not stored.
        """
        sender = self._sender
        if queue:
            await self._send_block(chunk.block, sender.to_queue(queue))
            return
        publication = await sender.lasting_publication(chunk.block.topic)
        if not publication.route.is_current:
            rest = await self._send_first(chunk)
            if rest is None:
                return
            chunk, publication = rest, await sender.lasting_publication(chunk.block.topic)
        for number, block in chunk.by_queue(len(publication.targets)).items():
            if number is None:
                await self._send_block(block, sender.by_key(b""))
            else:
                to_its_queue = sender.to_queue(publication.targets[number].queue)
                await self._send_block(block, to_its_queue)

    async def _send_first(self, chunk: Chunk) -> Chunk | None:
        """Send the message that creates its topic: the others need the new topic's queues."""
        key, first, rest = chunk.first_and_rest()
        sender = self._sender
        span = sender.start_span(first)
        sending = sender.send(first.topic, sender.by_key(key), first)
        self.results.append(await ended(span, sending))
        return rest

    async def _send_block(self, block: Block, choose: Choose) -> None:
        for part in block.parts():
            await self._send_part(part, choose)

    async def _send_part(self, block: Block, choose: Choose) -> None:
        target = await self._sender.target(block.topic, choose)
        span = self._sender.start_span(block)
        attempt = await self._attempt(block, target)
        self._in_flight.append(_InFlight(block, choose, target, attempt, span))
        # The connection's writer sends this block while the next one is encoded.
        await anyio.lowlevel.checkpoint()

    async def _attempt(
        self, block: Block, target: Target
    ) -> tuple[AnyOutgoing, Answer] | HeadraceError:
        """Send a block once its queue has no block in flight."""
        try:
            # Encode before waiting for the block ahead, while the broker is working on that.
            connection, outgoing = await self._sender.prepare(target, block)
        except HeadraceError as error:
            return error
        while self._must_wait(target):
            await self._finish_first()
        try:
            encode = partial(outgoing.frame, target)
            return outgoing, connection.begin_encoded(outgoing.code(target), encode)
        except HeadraceError as error:
            return error

    async def finish(self) -> None:
        """Wait for all blocks in flight. Raises the errors of ``send``."""
        while self._in_flight:
            await self._finish_first()

    def _must_wait(self, target: Target) -> bool:
        if len(self._in_flight) >= _BLOCKS_MAX:
            return True
        return any(in_flight.target.queue == target.queue for in_flight in self._in_flight)

    async def _finish_first(self) -> None:
        in_flight = self._in_flight.popleft()
        self.results.append(await ended(in_flight.span, self._result(in_flight)))

    async def _result(self, in_flight: _InFlight) -> SendResult:
        """The result of the attempt in flight, or of those after it."""
        block, target, sender = in_flight.block, in_flight.target, self._sender
        try:
            if isinstance(in_flight.attempt, HeadraceError):
                raise in_flight.attempt
            outgoing, answer = in_flight.attempt
            result = outgoing.result(target, await answer.response(sender.timeout_ms))
        except HeadraceError as failure:
            error = failure
        else:
            sender.instance.outages.answered(block.topic, target.address)
            return result
        sender.note_failure(target, error)
        return await sender.retry(block.topic, in_flight.choose, block, error)
