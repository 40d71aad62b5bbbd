"""Requests for a logic queue as a sequence of requests for its physical queues.

They are coroutines that ask the brokers of items. This broker answers with the same functions as
for any client, another one over the network.
Source: docs/static-topics.md "Requests"; tests/broker/statictopic/test_static_offsets.py.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from headrace_broker.peers.callers import LOGIC_QUEUES
from headrace_broker.statictopic.answer import Answer
from headrace_protocol.codes import ResponseCode
from headrace_protocol.command import Command, header_fields
from headrace_protocol.drivers.errors import HeadraceError
from headrace_protocol.serving import Reply, Request
from headrace_protocol.waiting import Until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace_broker.peers.peers import Ask, Outcome, Peers
    from headrace_protocol.serving import Registry
    from headrace_protocol.waiting import Run


class _Part(Request, kw_only=True):
    """A request that this broker makes to itself on behalf of a client."""

    then: Callable[[Answer], None]

    def reply(self, reply: Reply) -> None:
        """Pass on the answer."""
        fields = header_fields(reply.header) or {}
        self.then(Answer(reply.code, reply.remark, fields, reply.body))


class Workers:
    """Asks brokers in the coroutine of a request: this one at once, others over the network."""

    registry: Registry

    def __init__(self, broker_name: str, peers: Peers) -> None:
        self._broker_name = broker_name
        self._peers = peers

    async def ask(self, ask: Ask) -> Answer:
        """The answer of a broker, an error if it did not answer."""
        (answer,) = await self.ask_many((ask,))
        return answer

    async def ask_many(self, asks: Sequence[Ask]) -> list[Answer]:
        """The answers of brokers that are asked at the same time."""
        if not asks:
            return []
        name = f"broker {asks[0].peer}" if len(asks) == 1 else "brokers"
        answers: list[Answer] = await Until(name, partial(self._begin, asks))
        return answers

    def _begin(self, asks: Sequence[Ask], run: Run) -> None:
        answers: dict[int, Answer] = {}

        def answered(index: int, answer: Answer) -> None:
            answers[index] = answer
            if len(answers) == len(asks):
                run.resume([answers[index] for index in range(len(asks))])

        for index, ask in enumerate(asks):
            self._ask(ask, run.request, partial(answered, index))

    def _ask(self, ask: Ask, request: Request, then: Callable[[Answer], None]) -> None:
        if ask.peer == self._broker_name:
            command = Command(ask.code, ext_fields=dict(ask.fields or {}))
            part = _Part(
                request.channel,
                request.serialize_type,
                command,
                ask.body,
                request.header_bytes,
                subject=request.subject,
                then=then,
            )
            self.registry.serve_request(part)
            return

        def answered(outcome: Outcome) -> None:
            if isinstance(outcome, HeadraceError):
                remark = f"broker {ask.peer} is needed for this request: {outcome}"
                then(Answer(ResponseCode.SYSTEM_ERROR, remark))
            else:
                then(Answer.of(outcome))

        self._peers.begin(LOGIC_QUEUES, ask._replace(payer=request.channel), answered)
