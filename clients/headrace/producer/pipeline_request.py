"""A request of a pipeline, from its submission to its outcome."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from headrace.errors import HeadraceError, RequestTimeout
from headrace_protocol.drivers.response import Response

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.messages import EncodedMessage, SendResult
    from headrace.producer.backlogs import Backlog, Outlet
    from headrace.producer.block import Block
    from headrace.producer.sender import AnyOutgoing
    from headrace.telemetry import SendSpan
    from headrace_protocol.command import Command
    from headrace_protocol.drivers.aio import AsyncConnection


class Request:
    """A request in flight; the connection calls it with the response.

    tick: when it was sent. newest_tick: when its newest message was accepted, at the latest.
    done_count: how many of the messages, from the first, have their outcome.
    span: until its end. outcome: for the span, that of the parts of a retry; an error counts most.
    """

    __slots__ = (
        "_answered",
        "_connection",
        "_opaque",
        "backlog",
        "block",
        "done_count",
        "messages",
        "newest_tick",
        "outcome",
        "outgoing",
        "outlet",
        "span",
        "tick",
    )

    def __init__(
        self,
        outlet: Outlet,
        backlog: Backlog,
        messages: list[EncodedMessage],
        block: Block,
        tick: int,
        span: SendSpan | None,
    ) -> None:
        self._answered: Callable[[Request, Response | HeadraceError], None]
        self._connection: AsyncConnection
        self._opaque = 0
        self.outlet = outlet
        self.backlog = backlog
        self.messages = messages
        self.block = block
        self.tick = tick
        self.newest_tick = backlog.newest_tick
        self.done_count = 0
        self.span = span
        self.outcome: SendResult | HeadraceError | None = None
        self.outgoing: AnyOutgoing

    @property
    def _code(self) -> int:
        return self.outgoing.code(self.backlog.target)

    def submit(
        self,
        connection: AsyncConnection,
        outgoing: AnyOutgoing,
        answered: Callable[[Request, Response | HeadraceError], None],
    ) -> None:
        """Submit the request to an open connection, which calls ``answered`` with the outcome."""
        self._connection, self.outgoing, self._answered = connection, outgoing, answered
        encode = partial(outgoing.frame, self.backlog.target)
        self._opaque = self._connection.submit_encoded(encode, self)

    def __call__(
        self, command: Command | None, body: memoryview | None, error: HeadraceError | None
    ) -> None:
        """Pass the response on, or why there is none."""
        if command is None or body is None:
            assert error is not None
            self._answered(self, error)
            return
        address = self._connection.address
        self._answered(self, Response(address, self._code, command, body))

    def forget(self) -> None:
        """Stop the connection from calling the pipeline with the response."""
        self._connection.forget(self._opaque)

    def end_span(self, outcome: SendResult | HeadraceError | None) -> None:
        """End the span, if there is one."""
        if self.span:
            self.span.end(outcome)

    def timeout(self, timeout_ms: float) -> RequestTimeout:
        """The error to report for a missing response."""
        return RequestTimeout(self._connection.address, self._code, timeout_ms)
