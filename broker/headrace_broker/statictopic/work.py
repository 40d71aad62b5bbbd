"""Requests for a logic queue as a sequence of requests for its physical queues.

A ``Work`` is a generator: it yields what it asks of the broker of an item, and gets the answer.
This broker answers with the same functions as for any client, another one over the network.
Source: docs/static-topics.md "Requests"; tests/broker/statictopic/test_static_offsets.py.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from time import perf_counter
from typing import TYPE_CHECKING, Final

from headrace_broker.peers.callers import LOGIC_QUEUES
from headrace_broker.peers.peers import Ask
from headrace_broker.statictopic.answer import Answer, MalformedField
from headrace_broker.statictopic.forward import reply_with
from headrace_protocol.codes import ResponseCode
from headrace_protocol.command import Command, header_fields
from headrace_protocol.drivers.errors import HeadraceError
from headrace_protocol.serving import Reply, Request

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace_broker.peers.peers import Outcome, Peers
    from headrace_protocol.serving import Registry


# As long as a slice of other long work.
_SLICE_S = 0.002
_BREAK_IS_OVER: Final = Answer(ResponseCode.SUCCESS)


# None is a break, after which the work gets any answer.
Work = Generator[Ask | None, Answer, Answer]
# Gets the answer of a work, or the error that ended it.
Then = Callable[[Answer | Exception], None]


class _Part(Request, kw_only=True):
    """A request that this broker makes to itself on behalf of a client."""

    then: Callable[[Answer], None]

    def reply(self, reply: Reply) -> None:
        """Pass on the answer."""
        fields = header_fields(reply.header) or {}
        self.then(Answer(reply.code, reply.remark, fields, reply.body))


class Workers:
    """Runs works: asks this broker at once, and others without blocking the loop."""

    registry: Registry

    def __init__(self, broker_name: str, peers: Peers) -> None:
        self._broker_name = broker_name
        self._peers = peers

    def serve(self, work: Work, request: Request) -> None:
        """Answer a request with the answer of a work, or with the error that ended it."""

        def then(outcome: Answer | Exception) -> None:
            if isinstance(outcome, Exception):
                self.registry.fail(request, outcome)
            else:
                reply_with(request, outcome)

        _Run(self, work, request, then).advance()

    def ask(self, ask: Ask, request: Request, then: Callable[[Answer], None]) -> None:
        """Ask a broker; ``then`` is called now or later."""
        if ask.peer == self._broker_name:
            command = Command(ask.code, ext_fields=dict(ask.fields or {}))
            part = _Part(
                request.channel,
                request.serialize_type,
                command,
                ask.body,
                request.header_bytes,
                then=then,
            )
            self.registry.serve_request(part)
            return

        def answered(outcome: Outcome) -> None:
            request.channel.charge(-ask.answer_bytes)
            if isinstance(outcome, HeadraceError):
                remark = f"broker {ask.peer} is needed for this request: {outcome}"
                then(Answer(ResponseCode.SYSTEM_ERROR, remark))
            else:
                then(Answer.of(outcome))

        request.channel.charge(ask.answer_bytes)
        self._peers.begin(LOGIC_QUEUES, ask, answered)


class _Run:
    """A work under way. Answers that come at once are passed on in a loop, however many.

    After ``_SLICE_S`` the rest of the loop runs in slices.
    """

    __slots__ = ("_answer", "_is_advancing", "_request", "_then", "_work", "_workers")

    def __init__(self, workers: Workers, work: Work, request: Request, then: Then) -> None:
        self._workers = workers
        self._work = work
        self._request = request
        self._then = then
        self._answer: Answer | None = None
        self._is_advancing = False

    def _answered(self, answer: Answer) -> None:
        self._answer = answer
        if not self._is_advancing:
            self.advance(is_begun=True)

    def advance(self, *, is_begun: bool = False) -> None:
        end = perf_counter() + _SLICE_S
        steps = self._steps(is_begun=is_begun)
        for _ in steps:
            if perf_counter() > end:
                self._workers.registry.run_long(steps)
                return

    def _steps(self, *, is_begun: bool) -> Iterator[None]:
        self._is_advancing = True
        while self._answer is not None or not is_begun:
            try:
                answer, self._answer = self._answer, None
                ask = next(self._work) if answer is None else self._work.send(answer)
            except StopIteration as end:
                self._then(end.value)
                return
            except MalformedField as error:
                self._then(Answer(ResponseCode.SYSTEM_ERROR, str(error)))
                return
            except Exception as error:  # noqa: BLE001 - answered like the error of any request
                self._then(error)
                return
            is_begun = True
            if ask is None:
                self._answer = _BREAK_IS_OVER
            else:
                self._workers.ask(ask, self._request, self._answered)
            yield
        self._is_advancing = False
