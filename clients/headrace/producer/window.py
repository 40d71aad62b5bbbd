"""Blocks on their way: several at once, but one per queue, so that their order is kept."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self

import anyio.lowlevel

from headrace.errors import ConnectionLost, HeadraceError
from headrace.producer.sender import is_retryable

if TYPE_CHECKING:
    from headrace.messages import SendResult
    from headrace.producer.block import Block
    from headrace.producer.chunks import Chunk
    from headrace.producer.encoding import Target
    from headrace.producer.sender import AnyOutgoing, Choose, Sender
    from headrace_protocol.bodies import MessageQueue
    from headrace_protocol.drivers.aio import Answer

# A broker takes them one after the other; more would only wait in memory.
_BLOCKS_MAX = 4


class _UnderWay(NamedTuple):
    """A block, and what will tell how its first attempt ends, or why there was none."""

    block: Block
    choose: Choose
    target: Target
    attempt: tuple[AnyOutgoing, Answer] | HeadraceError


class Window:
    """Sends blocks; use it in a ``with`` block, whose end forgets what is still under way.

    results: of the blocks that were stored, in the order of sending.
    """

    def __init__(self, sender: Sender) -> None:
        self.results: list[SendResult] = []
        self._sender = sender
        self._under_way: deque[_UnderWay] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for under_way in self._under_way:
            if not isinstance(under_way.attempt, HeadraceError):
                under_way.attempt[1].forget()

    async def send(self, chunk: Chunk, queue: MessageQueue | None) -> None:
        """Put messages under way, to ``queue`` if one is given.

        Raises the last error of any block that was not stored.
        """
        sender = self._sender
        if queue:
            await self._send_block(chunk.block, sender.to_queue(queue))
            return
        publication = await sender.publication(chunk.block.topic)
        if not publication.route.is_current:
            rest = await self._send_first(chunk)
            if rest is None:
                return
            chunk, publication = rest, await sender.publication(chunk.block.topic)
        for number, block in chunk.by_queue(len(publication.targets)).items():
            if number is None:
                await self._send_block(block, sender.by_key(""))
            else:
                to_its_queue = sender.to_queue(publication.targets[number].queue)
                await self._send_block(block, to_its_queue)

    async def _send_first(self, chunk: Chunk) -> Chunk | None:
        """Wait for the message that makes its topic: the others need to know its queues."""
        key, first, rest = chunk.first_and_rest()
        sender = self._sender
        self.results.append(await sender.send(first.topic, sender.by_key(key), first))
        return rest

    async def _send_block(self, block: Block, choose: Choose) -> None:
        for part in block.parts():
            await self._send_part(part, choose)

    async def _send_part(self, block: Block, choose: Choose) -> None:
        target = choose(await self._sender.publication(block.topic))
        attempt = await self._attempt(block, target)
        self._under_way.append(_UnderWay(block, choose, target, attempt))
        # The writer sends it while the next one is made.
        await anyio.lowlevel.checkpoint()

    async def _attempt(
        self, block: Block, target: Target
    ) -> tuple[AnyOutgoing, Answer] | HeadraceError:
        """Put a block under way once its queue is free."""
        try:
            # Encoded before the one ahead of it is waited for: the broker works meanwhile.
            connection, outgoing = await self._sender.prepare(target, block)
        except HeadraceError as error:
            return error
        while self._must_wait(target):
            await self._finish_first()
        try:
            encode = partial(outgoing.frame, target)
            return outgoing, connection.begin_encoded(outgoing.code(target), encode)
        except ConnectionLost as error:
            return error

    async def finish(self) -> None:
        """Wait for all that is under way. Raises as ``send``."""
        while self._under_way:
            await self._finish_first()

    def _must_wait(self, target: Target) -> bool:
        if len(self._under_way) >= _BLOCKS_MAX:
            return True
        return any(under_way.target.queue == target.queue for under_way in self._under_way)

    async def _finish_first(self) -> None:
        block, choose, target, attempt = self._under_way.popleft()
        try:
            if isinstance(attempt, HeadraceError):
                raise attempt
            outgoing, answer = attempt
            result = outgoing.result(target, await answer.response(self._sender.timeout_ms))
        except HeadraceError as error:
            result = await self._again(block, choose, target, error)
        self.results.append(result)

    async def _again(
        self, block: Block, choose: Choose, target: Target, error: HeadraceError
    ) -> SendResult:
        """What comes of the attempts after the first one."""
        sender = self._sender
        sender.note_failure(target, error)
        if not (is_retryable(error) and sender.retries):
            raise error
        return await sender.send(block.topic, choose, block, attempts=sender.retries)
