"""Retries and dead letters: the ways of a message that a member cannot process."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from headrace.delays import LONGEST_S, level_of
from headrace.errors import ConfigurationError
from headrace.replies import reply
from headrace.sent_back import DEAD_LETTERS, send_back
from headrace.values import plain_number

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.consumer.assignment import Assignment, Membership
    from headrace.consumer.inbox import Inbox
    from headrace.instance import ClientInstance
    from headrace.received import ReceivedMessage

# RocketMQ's default: 16 retries.
_ATTEMPTS_MAX = 17
_LONGER_EACH_TIME = 0
# Delays of an ordered queue, in seconds.
_ORDERED_S_MIN = 0.01
_ORDERED_S_MAX = 30.0
_ORDERED_S = 1.0


class Retries(NamedTuple):
    """Consumer's ``max_attempts`` and ``retry_delay``."""

    max_attempts: int | None
    delay_s: float | None


class NoReturns:
    """Refuses to return messages: those of a broadcasting consumer are handled where they are."""

    def __init__(self, instance: ClientInstance, group: str) -> None:
        self._instance = instance
        self._group = group

    async def retry(self, message: ReceivedMessage, after: float | None) -> None:  # noqa: ARG002
        """Raise ConfigurationError."""
        raise _no_return(message)

    async def reject(self, message: ReceivedMessage) -> None:
        """Raise ConfigurationError."""
        raise _no_return(message)

    async def reply(self, message: ReceivedMessage, body: bytes) -> None:
        """See ``ReceivedMessage.reply``."""
        self._instance.check_open("Consumer")
        await reply(self._instance, self._group, message, body)


def _no_return(message: ReceivedMessage) -> ConfigurationError:
    return ConfigurationError(
        f"{message} cannot be returned: each consumer of a broadcasting group has it; handle its "
        "error in the program"
    )


class Returns:
    """Returns messages to the group of a consumer.

    Its settings are Consumer's.
    """

    def __init__(
        self,
        instance: ClientInstance,
        member: Membership,
        inbox: Inbox,
        assignment: Assignment,
        on_returned: Callable[[ReceivedMessage], None],
        retries: Retries,
    ) -> None:
        self._instance = instance
        self._group = member.group
        self._inbox = inbox
        self._assignment = assignment
        self._on_returned = on_returned
        self._ordered = member.ordered
        self._max_attempts = retries.max_attempts
        self._retry_delay = retries.delay_s
        if retries.delay_s is not None:
            self._check_delay("retry_delay", retries.delay_s)

    async def retry(self, message: ReceivedMessage, after: float | None) -> None:
        """See ``ReceivedMessage.retry``."""
        self._instance.check_open("Consumer")
        if after is None:
            after = self._retry_delay
        else:
            self._check_delay("after", after)
        if not self._ordered:
            await self._send_back(message, level_of(after) if after else _LONGER_EACH_TIME)
        elif self._max_attempts is not None and self._count(message) >= self._max_attempts:
            await self.reject(message)
        elif self._inbox.retry(message.queue, message.queue_offset, after or _ORDERED_S):
            self._count_failed(message)
        else:
            raise ConfigurationError(f"{message} is processed already; retry the current message")

    async def reject(self, message: ReceivedMessage) -> None:
        """See ``ReceivedMessage.reject``."""
        self._instance.check_open("Consumer")
        await self._send_back(message, DEAD_LETTERS)

    async def reply(self, message: ReceivedMessage, body: bytes) -> None:
        """See ``ReceivedMessage.reply``."""
        self._instance.check_open("Consumer")
        await reply(self._instance, self._group, message, body)

    def _check_delay(self, name: str, delay_s: float) -> None:
        plain_number(delay_s, name, ConfigurationError)
        shortest, longest = (_ORDERED_S_MIN, _ORDERED_S_MAX) if self._ordered else (0, LONGEST_S)
        if not shortest <= delay_s <= longest or not delay_s:
            above = "" if shortest else "more than "
            kind = "an ordered consumer" if self._ordered else "a consumer"
            raise ConfigurationError(
                f"{name}={delay_s}: must be {above}{shortest:g} to {longest:g} seconds for {kind}"
            )

    def _count(self, message: ReceivedMessage) -> int:
        process_queue = self._assignment.process_queues.get(message.queue)
        return process_queue.count_attempt(message.queue_offset) if process_queue else 0

    async def _send_back(self, message: ReceivedMessage, delay_level: int) -> None:
        self._on_returned(message)
        if self._instance.traces:
            self._instance.traces.returned(message)
        address = await self._instance.stored_at(message.queue, message.stored.store_host)
        retries_max = (self._max_attempts or _ATTEMPTS_MAX) - 1
        await send_back(self._instance, address, self._group, message, delay_level, retries_max)
        self._count_failed(message)
        if delay_level != DEAD_LETTERS:
            self._assignment.expect_retries()

    def _count_failed(self, message: ReceivedMessage) -> None:
        self._assignment.rates.of(message.queue.topic).failed()
