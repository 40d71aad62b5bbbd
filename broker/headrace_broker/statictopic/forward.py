"""Requests that another broker serves: those for its queues, and pulls of its items.

A request for a queue that moved goes to the leader, one hop and marked. While the leader is not
ready, as between the close of the old leader and the opening of the new one, it waits here; sends
wait in the order of their arrival.
Source: docs/static-topics.md "Forwarding"; tests/broker/statictopic/test_static_forward.py.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog
import trio

from headrace_broker.peers.callers import FORWARDING
from headrace_broker.peers.peers import Ask
from headrace_broker.statictopic.answer import Answer
from headrace_broker.statictopic.rows import FORWARDED, LEADER, ROWS, add_subscription, fields_of
from headrace_protocol.codes import ResponseCode
from headrace_protocol.drivers.errors import ConnectFailed, HeadraceError
from headrace_protocol.errors import RequestError
from headrace_protocol.outages import Outages
from headrace_protocol.waiting import Until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from headrace_broker.peers.peers import Outcome, Peers
    from headrace_broker.statictopic.leaders import Leaders
    from headrace_broker.statictopic.rows import Subscription
    from headrace_protocol.serving import Registry, Reply, Request
    from headrace_protocol.statictopic.mapping import MappingInfo
    from headrace_protocol.waiting import Run

    FindInfos = Callable[[str], Awaitable[Iterable[MappingInfo]]]

log = structlog.get_logger("headrace.broker")

# How long a request waits for its leader, and the bytes of sends that wait for one queue.
WAIT_S: Final = 1.0
WAITING_BYTES_MAX: Final = 8 * 1024 * 1024
_RETRY_S: Final = 0.02
# A forwarded pull may be held at the leader for this part of the time that the answer may take.
_HELD_PART: Final = 0.5
_SUSPEND: Final = "suspendTimeoutMillis"
# The name of the wait, for logs.
_WAIT: Final = "the leader of a static topic's queue"
_NO_LEADER: Final = Answer(
    ResponseCode.NOT_LEADER_FOR_QUEUE, "no broker leads the queue now: ask for the route again"
)
_FULL: Final = Answer(
    ResponseCode.SYSTEM_BUSY,
    f"over {WAITING_BYTES_MAX >> 20} MiB of messages wait for the queue's new leader: send again "
    "later",
)
# How a broker answers that does not lead the queue yet.
_NOT_YET: Final = frozenset(
    {
        ResponseCode.NOT_LEADER_FOR_QUEUE,
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.INVALID_PARAMETER,
    }
)


class _Passed:
    """A request that is passed on.

    leader: the broker that was asked last. number: its rank among the sends of its queue.
    then: gets the outcome of a send; None if it is to be served here.
    """

    __slots__ = (
        "deadline",
        "held_bytes",
        "leader",
        "number",
        "queue_id",
        "request",
        "then",
        "topic",
    )

    then: Callable[[Answer | HeadraceError | None], None]

    def __init__(self, request: Request, topic: str, queue_id: int) -> None:
        self.request = request
        self.topic = topic
        self.queue_id = queue_id
        self.held_bytes = request.held_bytes
        self.deadline = trio.current_time() + WAIT_S
        self.leader = ""
        self.number = 0

    def may_come(self, outcome: Answer | HeadraceError) -> bool:
        """True if it was not served, and its leader may be ready soon."""
        is_unserved = (
            isinstance(outcome, ConnectFailed)
            if isinstance(outcome, HeadraceError)
            else outcome.code in _NOT_YET
        )
        return is_unserved and trio.current_time() < self.deadline

    def reply(self, outcome: Answer | HeadraceError) -> Reply:
        """The answer, which names the broker that has answered."""
        if isinstance(outcome, HeadraceError):
            outcome = Answer(ResponseCode.SYSTEM_ERROR, f"another broker is needed: {outcome}")
        elif self.leader:
            outcome = outcome._replace(fields={**outcome.fields, LEADER: self.leader})
        return outcome.reply


class _Sends:
    """The sends for one queue, in order.

    trying: the send that is tried alone; the others follow once it is stored. open_leader: the
    broker that stored the last one, and gets the next ones without a wait. is_paused: until the
    next attempt. is_advancing: ``_advance`` runs.
    """

    __slots__ = (
        "held_bytes",
        "is_advancing",
        "is_paused",
        "last_number",
        "open_leader",
        "trying",
        "waiting",
    )

    def __init__(self) -> None:
        self.waiting: deque[_Passed] = deque()
        self.held_bytes = self.last_number = 0
        self.trying: _Passed | None = None
        self.open_leader = ""
        self.is_paused = self.is_advancing = False

    def put(self, passed: _Passed) -> None:
        """Add a send behind the others."""
        self.last_number += 1
        passed.number = self.last_number
        self.held_bytes += passed.held_bytes
        self.waiting.append(passed)

    def put_back(self, passed: _Passed) -> None:
        """Return a send to where it was."""
        index = 0
        while index < len(self.waiting) and self.waiting[index].number < passed.number:
            index += 1
        self.waiting.insert(index, passed)


class Forwarding:
    """Passes requests to the leaders of their queues.

    forwarded_count: for the runtime info.
    """

    leaders: Leaders
    registry: Registry

    def __init__(
        self,
        peers: Peers,
        find_infos: FindInfos,
        subscription: Subscription,
        timeout_ms: Callable[[], int],
    ) -> None:
        """find_infos: returns what a route says of a static topic. Raises HeadraceError."""
        self._subscription = subscription
        self.forwarded_count = 0
        self.find_infos = find_infos
        # By topic and queue, the broker that has denied that it leads.
        self._denied: dict[str, dict[int, str]] = {}
        self._peers = peers
        self._timeout_ms = timeout_ms
        self._outages = Outages(log.warning, trio.current_time)
        self._sends: dict[tuple[str, int], _Sends] = {}
        # What is tried again after a pause: single requests, and queues of sends.
        self._waiting: list[Callable[[], None]] = []
        self._has_waiting = trio.Event()

    async def pass_on(self, topic: str, queue_id: int, request: Request) -> Reply | None:
        """The answer of the leader of a queue; None if this broker has become the leader."""
        row = ROWS.get(request.command.code)
        if row is None or FORWARDED in request.command.ext():
            raise RequestError(
                ResponseCode.NOT_LEADER_FOR_QUEUE,
                f"queue {queue_id} of the static topic {topic} is not led here: ask for the route "
                "again",
            )
        passed = _Passed(request, topic, queue_id)
        if row.is_send:
            outcome = await Until(_WAIT, partial(self._put, passed))
        else:
            outcome = await self._outcome(passed)
        if outcome is None:
            self.registry.admit(request)
            return None
        return passed.reply(outcome)

    async def run(self) -> None:
        """Try waiting requests again at intervals, until cancelled."""
        while True:
            await self._has_waiting.wait()
            await trio.sleep(_RETRY_S)
            await self.look_up()
            self.retry()

    async def look_up(self) -> None:
        """Ask for the leaders of the topics whose leaders have denied that they lead."""
        denied, self._denied = self._denied, {}
        for topic, brokers in denied.items():
            name = f"the route of the static topic {topic}"
            try:
                self.leaders.note_route(topic, await self.find_infos(topic), brokers)
            except HeadraceError as error:
                self._outages.failed(name, error)
            else:
                self._outages.worked(name)

    def retry(self) -> None:
        """Try all waiting requests again."""
        self._has_waiting = trio.Event()
        waiting, self._waiting = self._waiting, []
        for attempt in waiting:
            attempt()

    def _later(self, attempt: Callable[[], None]) -> None:
        self._waiting.append(attempt)
        self._has_waiting.set()

    def _ask_for(self, passed: _Passed, leader: str, run: Run) -> None:
        self._ask(passed, leader, run.resume)

    def _ask(
        self, passed: _Passed, leader: str, then: Callable[[Answer | HeadraceError], None]
    ) -> None:
        self.forwarded_count += 1
        passed.leader = leader
        request = passed.request
        fields = self._fields(request, leader)

        def answered(outcome: Outcome) -> None:
            then(outcome if isinstance(outcome, HeadraceError) else Answer.of(outcome))

        ask = Ask(leader, request.command.code, fields, request.body)
        self._peers.begin(FORWARDING, ask, answered)

    def _fields(self, request: Request, leader: str) -> dict[str, str]:
        row = ROWS[request.command.code]
        fields = {**fields_of(request), FORWARDED: "true", row.broker: leader}
        if row.is_send:
            # A leader that doesn't know the topic yet must not create a plain one.
            fields[row.default_topic] = ""
        if _SUSPEND in fields:
            with suppress(RequestError):
                add_subscription(fields, self._subscription)
            longest_ms = int(self._timeout_ms() * _HELD_PART)
            fields[_SUSPEND] = str(min(int(fields[_SUSPEND]), longest_ms))
        return fields

    def _doubt(self, passed: _Passed) -> None:
        if passed.leader:
            self._denied.setdefault(passed.topic, {})[passed.queue_id] = passed.leader

    # -- single requests ---------------------------------------------------------------------------

    async def _outcome(self, passed: _Passed) -> Answer | HeadraceError | None:
        """The outcome of a request that keeps no order; None if it is to be served here."""
        may_hold = _SUSPEND in passed.request.command.ext()
        while True:
            leader = self.leaders.leader_of(passed.topic, passed.queue_id)
            if leader == self.leaders.mappings.broker_name:
                return None
            outcome: Answer | HeadraceError = _NO_LEADER
            if leader is not None:
                begin = partial(self._ask_for, passed, leader)
                outcome = await Until(f"broker {leader}", begin, may_hold)
            if not passed.may_come(outcome):
                return outcome
            self._doubt(passed)
            await Until(_WAIT, lambda run: self._later(run.resume))

    # -- sends -------------------------------------------------------------------------------------

    def _put(self, passed: _Passed, run: Run) -> None:
        passed.then = run.resume
        key = passed.topic, passed.queue_id
        sends = self._sends.get(key) or self._sends.setdefault(key, _Sends())
        if sends.held_bytes + passed.held_bytes > WAITING_BYTES_MAX:
            run.resume(_FULL)
            return
        sends.put(passed)
        self._advance(sends)

    def _advance(self, sends: _Sends) -> None:
        """Send what may leave now."""
        if sends.is_advancing:
            return
        sends.is_advancing = True
        while sends.waiting and sends.trying is None and not sends.is_paused:
            passed = sends.waiting.popleft()
            leader = self.leaders.leader_of(passed.topic, passed.queue_id)
            if leader is None:
                self._sent(sends, passed, _NO_LEADER)
            elif leader == self.leaders.mappings.broker_name:
                sends.held_bytes -= passed.held_bytes
                passed.then(None)
            else:
                sends.trying = None if leader == sends.open_leader else passed
                self._ask(passed, leader, partial(self._sent, sends, passed))
        sends.is_advancing = False

    def _sent(self, sends: _Sends, passed: _Passed, outcome: Answer | HeadraceError) -> None:
        if sends.trying is passed:
            sends.trying = None
        if passed.may_come(outcome):
            self._doubt(passed)
            sends.open_leader = ""
            sends.put_back(passed)
            if not sends.is_paused:
                sends.is_paused = True
                self._later(partial(self._resume, sends))
            return
        sends.held_bytes -= passed.held_bytes
        is_stored = isinstance(outcome, Answer) and outcome.code not in _NOT_YET
        sends.open_leader = passed.leader if is_stored else ""
        if isinstance(outcome, Answer) and outcome.code == ResponseCode.NOT_LEADER_FOR_QUEUE:
            # Java's client sends again at this code, and fails at the other.
            outcome = outcome._replace(code=ResponseCode.SERVICE_NOT_AVAILABLE)
        passed.then(outcome)
        self._advance(sends)

    def _resume(self, sends: _Sends) -> None:
        sends.is_paused = False
        self._advance(sends)
