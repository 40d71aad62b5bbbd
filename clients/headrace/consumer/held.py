"""Messages that a popping consumer has: kept out while it works on them, then acknowledged."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import anyio

from headrace.consumer.leases import by_broker, milliseconds
from headrace.consumer.polls import KEPT_SHARE
from headrace.tasks import gather

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable, Sequence

    from headrace.consumer.leases import MemberLeases
    from headrace.consumer.rates import Rates
    from headrace.consumer.returns import Retries
    from headrace.errors import HeadraceError
    from headrace.popped import PoppedMessage

_log = logging.getLogger("headrace.consumer")

# How long messages are out; the members of a group that is killed leave them for so long.
INVISIBLE_S: Final = 30.0
_RENEWED_S: Final = INVISIBLE_S / 2
_LOOK_S: Final = 1.0


class _Held:
    """A message that is out. until: when its time is up, unless it is renewed."""

    def __init__(self, message: PoppedMessage) -> None:
        self.message = message
        # It may have waited to be received; see ``Polls``.
        self.kept(INVISIBLE_S * (1 - KEPT_SHARE))

    def kept(self, seconds: float) -> None:
        """It is out for so long from now on."""
        now = anyio.current_time()
        self.until = now + seconds
        self.renew_at = now + min(_RENEWED_S, seconds / 2)


class HeldMessages:
    """What a program's messages settle themselves with; see PoppedMessage.

    leases: sends the requests. rates: counts those that are returned.

    Requests about one message never overlap: each gives it a new handle.
    """

    def __init__(self, leases: MemberLeases, retries: Retries, rates: Rates) -> None:
        self._leases = leases
        self._rates = rates
        self._max_attempts, self._retry_delay = retries
        if retries.delay_s is not None:
            milliseconds("retry_delay", retries.delay_s)
        self._held: dict[int, _Held] = {}
        self._processed: dict[int, _Held] = {}
        self._turn = anyio.Lock()
        self._changed = anyio.Event()

    def hold(self, messages: Iterable[PoppedMessage]) -> None:
        """Keep messages out that have just come."""
        self._held |= {id(message): _Held(message) for message in messages}

    def processed(self, messages: Iterable[PoppedMessage]) -> None:
        """Acknowledge messages soon; those that the program has settled itself are left out."""
        for message in messages:
            held = self._held.pop(id(message), None)
            if held is not None:
                self._processed[id(message)] = held
        if self._processed:
            self._changed.set()

    async def wait(self) -> None:
        """Wait until messages are processed, or for a moment."""
        with anyio.move_on_after(_LOOK_S):
            await self._changed.wait()
        self._changed = anyio.Event()

    async def settle(self) -> None:
        """Acknowledge what is processed, and keep the rest out. Raises the error of an ack."""
        async with self._turn:
            error = await self._acknowledge()
            await self._renew()
        if error is not None:
            raise error

    async def close(self, failed: Sequence[PoppedMessage]) -> None:
        """Acknowledge what is processed, and return the rest.

        failed: those of the rest that the program had; they come again as after ``retry``.
        """
        async with self._turn:
            await self._acknowledge()
            had = {id(message) for message in failed}
            rest, self._held = self._held, {}
        returned = [held.message for key, held in rest.items() if key in had]
        unseen = [held.message for key, held in rest.items() if key not in had]
        await gather(self._retry, returned)
        await self._leases.give_back(unseen)

    async def _acknowledge(self) -> HeadraceError | None:
        """Acknowledge what is processed; what fails is tried again while it is out."""
        processed, self._processed = self._processed, {}
        now, first_error = anyio.current_time(), None
        alive = [held.message for held in processed.values() if held.until > now]
        brokers = [*by_broker(alive).values()]
        outcomes = await gather(self._leases.ack_all, brokers)
        for messages, error in zip(brokers, outcomes, strict=True):
            if error is not None:
                first_error = first_error or error
                if error.retryable:
                    again = {id(message): processed[id(message)] for message in messages}
                    self._processed |= again
        return first_error

    async def _renew(self) -> None:
        now = anyio.current_time()
        due = [held for held in self._held.values() if held.renew_at <= now]
        lost = 0
        for held, error in zip(due, await gather(self._keep, due), strict=True):
            if error is not None and (not error.retryable or held.until <= now):
                self._held.pop(id(held.message), None)
                lost += 1
        if lost:
            _log.warning("%d messages were not kept out in time, and come again", lost)

    async def _keep(self, held: _Held) -> None:
        await self._leases.extend(held.message, INVISIBLE_S)
        held.kept(INVISIBLE_S)

    # -- for messages ------------------------------------------------------------------------------

    async def ack(self, message: PoppedMessage) -> None:
        """See ``PoppedMessage.ack``."""
        await self._end(message, self._leases.ack(message))

    async def extend(self, message: PoppedMessage, seconds: float) -> None:
        """See ``PoppedMessage.extend``; the time is extended further in any case."""
        async with self._turn:
            await self._leases.extend(message, seconds)
            if held := self._held.get(id(message)):
                held.kept(seconds)

    async def retry(self, message: PoppedMessage, after: float | None) -> None:
        """See ``PoppedMessage.retry``."""
        attempts = message.reconsume_times + 1
        if self._max_attempts is not None and attempts >= self._max_attempts:
            await self.reject(message)
        else:
            await self._end(message, self._retry(message, after))
            self._rates.of(message.topic).failed()

    async def reject(self, message: PoppedMessage) -> None:
        """See ``PoppedMessage.reject``."""
        await self._end(message, self._leases.reject(message))
        self._rates.of(message.topic).failed()

    async def reply(self, message: PoppedMessage, body: bytes) -> None:
        """See ``PoppedMessage.reply``."""
        await self._leases.reply(message, body)

    async def _end(self, message: PoppedMessage, ending: Awaitable[None]) -> None:
        async with self._turn:
            await ending
            self._held.pop(id(message), None)

    async def _retry(self, message: PoppedMessage, after: float | None = None) -> None:
        await self._leases.retry(message, self._retry_delay if after is None else after)
