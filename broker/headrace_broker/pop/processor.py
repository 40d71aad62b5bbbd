"""POP_MESSAGE (200050), PEEK_MESSAGE (200052), NOTIFICATION (200054), POLLING_INFO (200055).

Source: docs/protocol.md "POP"; tests/broker/pop/test_pop.py.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from headrace_broker.consumer.long_polling import JudgedRequest
from headrace_broker.pop.acks import check_invisible_time
from headrace_broker.pop.popping import Ask
from headrace_broker.pop.targets import Wanted
from headrace_protocol.bounds import NAME_CHARS_MAX, check_text
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import NotReady, RequestError
from headrace_protocol.pop.headers import (
    INIT_MAX,
    INIT_MIN,
    POP_MESSAGES_MAX,
    NotificationHeader,
    NotificationResponseHeader,
    PeekMessageHeader,
    PeekMessageResponseHeader,
    PollingInfoHeader,
    PollingInfoResponseHeader,
    PopMessageHeader,
)
from headrace_protocol.serving import Reply
from headrace_protocol.waiting import later, now_or_later

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_broker.config import BrokerConfig
    from headrace_broker.consumer.long_polling import LongPolling
    from headrace_broker.pop.popping import Popping
    from headrace_broker.pop.progress import PopProgress
    from headrace_broker.pop.targets import PopTarget, PopTargets
    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.topics.table import TopicTable
    from headrace_protocol.rights.access import Access
    from headrace_protocol.serving import Registry, Request, RequestFunction, Work

    # The answer if there is something for a request; raises NotReady.
    Attempt = Callable[[PopTarget], Reply | None]

# A request that comes this much later than it would wait is too late.
_LATE_MS: Final = 500
_POLL_MS_MAX: Final = 60_000
_TIMED_OUT: Final = Reply(code=ResponseCode.POLLING_TIMEOUT, remark="POLLING_TIMEOUT")
_FULL: Final = Reply(code=ResponseCode.POLLING_FULL, remark="POLLING_FULL")


class _Wait(NamedTuple):
    """How a request waits: until when, and its answer then, or if too many wait."""

    until_ms: int
    timed_out: Reply
    full: Reply


class _HeldPop(JudgedRequest):
    """A request that waits for messages of all queues of its target."""

    __slots__ = ("_attempt", "_processor", "_target", "_wait")

    def __init__(
        self,
        processor: PopProcessor,
        request: Request,
        target: PopTarget,
        attempt: Attempt,
        wait: _Wait,
    ) -> None:
        held_bytes = request.held_bytes + target.filter_bytes
        super().__init__(processor.registry, processor.access, request, 0, held_bytes)
        self._processor: PopProcessor = processor
        self._target: PopTarget = target
        self._attempt: Attempt = attempt
        self._wait: _Wait = wait

    @property
    def wanted(self) -> Wanted:
        """The queues that it waits for, as the client named them."""
        return self._target.wanted

    @property
    def taking_group(self) -> str:
        """See HeldRequest."""
        return self.wanted.group

    def released(self) -> None:
        """See HeldRequest."""
        self._processor.released(self)

    def attempt(self, *, may_wait: bool) -> bool:
        """See JudgedRequest."""
        processor, request = self._processor, self.request
        target = processor.targets.find(request, self.wanted)
        try:
            reply = self._attempt(target)
        except NotReady as away:
            wait = self._wait if may_wait else self._wait._replace(until_ms=0)
            again = partial(processor.answer, request, target, self._attempt, wait)
            processor.registry.start(request, later(away, again))
            return True
        if reply is None and may_wait:
            if target is not self._target:
                self._target = target
                processor.long_polling.wait_at(self, target.queues)
            return False
        processor.progress.answer(request, reply or self._wait.timed_out)
        return True


class PopProcessor:
    """Serves POPs, and waits for messages. access: judges held ones again.

    held_count: the number of requests that wait.
    """

    def __init__(
        self,
        registry: Registry,
        config: BrokerConfig,
        access: Access,
        store: MessageStore,
        topics: TopicTable,
        long_polling: LongPolling,
        targets: PopTargets,
        popping: Popping,
        progress: PopProgress,
    ) -> None:
        self.registry = registry
        self._config = config
        self.access = access
        self._clock = store.clock
        self._topics = topics
        self.long_polling = long_polling
        self.targets = targets
        self._popping = popping
        self.progress = progress
        # Requests that wait, by group, topic and queue.
        self._held: Counter[tuple[str, str, int]] = Counter()
        self.held_count = 0

    def functions(self) -> dict[int, RequestFunction]:
        """The function that serves each code."""
        return {
            RequestCode.POP_MESSAGE: self.pop,
            RequestCode.PEEK_MESSAGE: self.peek,
            RequestCode.NOTIFICATION: self.notify,
            RequestCode.POLLING_INFO: self.polling_info,
        }

    def pop(self, request: Request) -> Reply | Work | None:
        """POP_MESSAGE: messages that are invisible to others for a time, or none after a wait."""
        header = request.header(PopMessageHeader)
        until_ms = self._until_ms(header.born_time, header.poll_time)
        if until_ms is None:
            return _TIMED_OUT
        self._check(header)
        wanted = Wanted(
            header.consumer_group, header.topic, header.queue_id, header.exp_type, header.exp
        )
        target = self.targets.find(request, wanted)
        check_invisible_time(self._config, header.invisible_time)
        count = max(header.max_msg_nums, 1)
        ask = Ask(
            count,
            header.invisible_time,
            header.init_mode,
            is_ordered=bool(header.order),
            attempt_id=header.attempt_id if header.order else None,
        )
        wait = _Wait(until_ms, _TIMED_OUT, _FULL)
        return now_or_later(partial(self.answer, request, target, partial(self._pop, ask), wait))

    def _pop(self, ask: Ask, target: PopTarget) -> Reply | None:
        self.progress.check()
        return self._popping.pop(target, ask)

    def _check(self, header: PopMessageHeader) -> None:
        """Raise RequestError for what is wrong before any topic is looked at."""
        self._topics.check_broker_readable()
        if header.max_msg_nums > POP_MESSAGES_MAX:
            raise RequestError(
                ResponseCode.INVALID_PARAMETER,
                f"maxMsgNums {header.max_msg_nums}: at most {POP_MESSAGES_MAX}",
            )
        if not self._config.timer_wheel_enable:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR,
                f"the broker[{self._config.broker_name}] pop message is forbidden because "
                "timerWheelEnable is false",
            )
        if header.init_mode not in {INIT_MIN, INIT_MAX}:
            raise RequestError(
                ResponseCode.INVALID_PARAMETER,
                f"initMode {header.init_mode}: expected {INIT_MIN} or {INIT_MAX}",
            )
        _check_attempt(header)

    def _until_ms(self, born_ms: int, poll_ms: int) -> int | None:
        """The time until which a request may wait; None if it came too late."""
        now_ms = self._clock.now_ms()
        # A client that does not poll sends no time.
        left_ms = (born_ms or now_ms) + poll_ms - now_ms
        if left_ms < -_LATE_MS:
            return None
        # The client's clock may be ahead.
        return now_ms + max(0, min(left_ms, poll_ms, _POLL_MS_MAX))

    # -- waiting -----------------------------------------------------------------------------------

    def answer(
        self, request: Request, target: PopTarget, attempt: Attempt, wait: _Wait
    ) -> Reply | None:
        """The answer to a request; None if that comes later, or nobody is there to get it.

        Raises NotReady.
        """
        if not request.channel.is_open:
            return None
        reply = attempt(target)
        if reply is None:
            # The clock may have been set back.
            left_ms = min(wait.until_ms - self._clock.now_ms(), _POLL_MS_MAX)
            if left_ms > 0 and not self._is_full(target.wanted):
                self._hold(_HeldPop(self, request, target, attempt, wait), target, left_ms)
                return None
            reply = wait.full if left_ms > 0 else wait.timed_out
        return self.progress.reply(request, reply)

    def _is_full(self, wanted: Wanted) -> bool:
        return (
            self.held_count >= self._config.max_pop_polling_size
            or self._held[wanted[:3]] >= self._config.pop_polling_size
        )

    def _hold(self, held: _HeldPop, target: PopTarget, wait_ms: int) -> None:
        held.request.body = b""
        before = self.long_polling.held_count
        self.long_polling.hold(held, target.queues, wait_ms / 1000)
        if self.long_polling.held_count > before:
            self._held[target.wanted[:3]] += 1
            self.held_count += 1

    def released(self, held: _HeldPop) -> None:
        """Note that a held request no longer waits."""
        name = held.wanted[:3]
        self.held_count -= 1
        self._held[name] -= 1
        if not self._held[name]:
            del self._held[name]

    # -- the others --------------------------------------------------------------------------------

    def peek(self, request: Request) -> Reply | Work | None:
        """PEEK_MESSAGE: messages as a POP would get them, which stay visible."""
        header = request.header(PeekMessageHeader)
        if not 0 < header.max_msg_nums <= POP_MESSAGES_MAX:
            raise RequestError(
                ResponseCode.INVALID_PARAMETER,
                f"maxMsgNums {header.max_msg_nums}: expected 1 to {POP_MESSAGES_MAX}",
            )
        wanted = Wanted(header.consumer_group, header.topic, header.queue_id, None, None)
        target = self.targets.find(request, wanted)
        ask = Ask(header.max_msg_nums, 0, INIT_MIN)

        def peek() -> Reply:
            found = self._popping.peek(target, ask)
            code = ResponseCode.SUCCESS if found.buffers else ResponseCode.PULL_NOT_FOUND
            return Reply(PeekMessageResponseHeader(rest_num=found.rest), tuple(found.buffers), code)

        return now_or_later(peek)

    def notify(self, request: Request) -> Reply | Work | None:
        """NOTIFICATION: wait until a POP would get a message."""
        header = request.header(NotificationHeader)
        until_ms = self._until_ms(header.born_time, header.poll_time)
        if until_ms is None:
            return _notification(has_message=False)
        _check_attempt(header)
        wanted = Wanted(
            header.consumer_group, header.topic, header.queue_id, header.exp_type, header.exp
        )
        target = self.targets.find(request, wanted)
        wait = _Wait(
            until_ms,
            timed_out=_notification(has_message=False),
            full=_notification(has_message=False, is_full=True),
        )
        ask = Ask(
            1,
            0,
            INIT_MIN,
            is_ordered=bool(header.order),
            attempt_id=header.attempt_id if header.order else None,
        )
        return now_or_later(partial(self.answer, request, target, partial(self._look, ask), wait))

    def _look(self, ask: Ask, target: PopTarget) -> Reply | None:
        found = self._popping.peek(target, ask)
        # What a filter has yet to look at may be wanted; a POP looks on where this ended.
        has_message = bool(found.buffers) or not found.is_complete
        return _notification(has_message=True) if has_message else None

    def polling_info(self, request: Request) -> Reply:
        """POLLING_INFO: the number of requests that wait."""
        header = request.header(PollingInfoHeader)
        count = self._held.get((header.consumer_group, header.topic, header.queue_id), 0)
        return Reply(PollingInfoResponseHeader(polling_num=count))


def _check_attempt(header: PopMessageHeader | NotificationHeader) -> None:
    """Raise OutOfBounds for the name of an attempt that no client gives."""
    if header.attempt_id is not None:
        check_text("attemptId", header.attempt_id, NAME_CHARS_MAX)


def _notification(*, has_message: bool, is_full: bool = False) -> Reply:
    return Reply(NotificationResponseHeader(has_msg=has_message, polling_full=is_full))
