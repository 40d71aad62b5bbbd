"""Reads the queues of a topic up to the ends that they have at first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from headrace.admin.goal import Goal
    from headrace.consumer.pull import PullConsumer
    from headrace.consumer.subscription import Choice
    from headrace.received import MessageBatch
    from headrace_protocol.bodies import MessageQueue

_CHECK_S = 0.25


class EndReader:
    """Reads the queues of a goal; those whose brokers do not answer are retried.

    is_over: True once all is read that can be; ``receive`` may be called further, past the ends.
    """

    def __init__(
        self,
        consumer: PullConsumer,
        goal: Goal,
        choice: Choice,
        start_of: Callable[[MessageQueue, int], Awaitable[int | None]],
        *,
        skips_parts: bool = False,
    ) -> None:
        """start_of: the offset to begin at in a queue, given its end; None leaves it to consumer.

        It may raise HeadraceError, and is called again then. skips_parts: read what is behind the
        part of a queue whose broker has been away for long; ``check`` names the part.
        """
        self.is_over = False
        self._consumer = consumer
        self._choice = choice
        self._start_of = start_of
        self._skips_parts = skips_parts
        self._goal = goal

    def check(self) -> None:
        """Print what is not read. Raises PartialRead if there is any."""
        self._goal.check(self._positions(), self._consumer.failures())

    def _positions(self) -> dict[MessageQueue, int]:
        return {queue: self._consumer.position(queue) for queue in self._goal.ends}

    async def receive(self) -> tuple[MessageBatch, int] | None:
        """The next batch and the end of its queue; None once it is over, or for a moment."""
        await self._begin()
        if self._skips_parts:
            self._skip_parts()
        was_over = self.is_over
        failing = self._consumer.failures(self._goal.give_up_ms)
        self.is_over = self._goal.is_over(self._positions(), failing)
        if self.is_over and not was_over:
            return None
        if not self._goal.ends:
            await self._goal.pause()
            return None
        batch = await self._consumer.receive_many(timeout_ms=_CHECK_S * 1000)
        return None if batch is None else (batch, self._goal.ends[batch.queue])

    async def _begin(self) -> None:
        """Begin to read the queues whose ends are known since now."""
        found = await self._goal.look()
        begun = self._goal.ends.keys() - found.keys()
        for queue, end in found.items():
            try:
                # First, since a pull that fails may close the connection.
                start = await self._start_of(queue, end)
                await self._consumer.assign(begun | {queue}, *self._choice)
            except HeadraceError as error:
                self._goal.failed(queue, error)
            else:
                begun.add(queue)
                if start is not None:
                    self._consumer.seek(queue, start)

    def _skip_parts(self) -> None:
        for queue, error in self._consumer.failures(self._goal.give_up_ms).items():
            next_offset = self._goal.skip(queue, self._consumer.position(queue), error)
            if next_offset is not None:
                self._consumer.seek(queue, next_offset)
