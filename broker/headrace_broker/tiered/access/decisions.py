"""TIER_RESUME and TIER_FORGET: what a person decides about queues that are not uploaded.

Source: docs/protocol.md "Tier decisions"; tests/broker/tiered/test_tiered_decisions.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_protocol.bounds import ITEMS_MAX
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.serving import Reply
from headrace_protocol.tier_bodies import TierQueueStatus, TierStatus
from headrace_protocol.tier_headers import TierForgetHeader, TierResumeHeader

if TYPE_CHECKING:
    from headrace_broker.tiered.access.standings import GivenUp, Name
    from headrace_broker.tiered.access.status import TierState
    from headrace_protocol.serving import Registry, Request


class TierDecisions:
    """Serves both requests; the answer has the queues that are tried again, as they were."""

    def __init__(self, state: TierState) -> None:
        self._state = state

    def register(self, registry: Registry) -> None:
        """Route the requests."""
        registry.route(RequestCode.TIER_RESUME, self.resume)
        registry.route(RequestCode.TIER_FORGET, self.forget)

    def resume(self, request: Request) -> Reply:
        """Have uploads tried at once, also of queues that were given up."""
        header, state = request.header(TierResumeHeader), self._state
        given_up = state.given_up()
        names = [name for name in given_up if header.topic in {None, name[0]}]
        reply = _reply(given_up, names)
        state.upload.retry(names)
        state.following.retry()
        return reply

    def forget(self, request: Request) -> Reply:
        """Have the tier drop messages of a queue that is given up."""
        header, state = request.header(TierForgetHeader), self._state
        name = header.topic, header.queue_id
        given_up = state.given_up()
        if name not in given_up:
            raise RequestError(
                ResponseCode.INVALID_PARAMETER,
                f"queue {header.topic}/{header.queue_id} is not given up: nothing is to be decided",
            )
        if header.from_offset < 0:
            raise RequestError(ResponseCode.INVALID_PARAMETER, "fromOffset must not be negative")
        reply = _reply(given_up, [name])
        state.upload.forget(name, header.from_offset)
        state.following.retry()
        return reply


def _reply(given_up: dict[Name, GivenUp], names: list[Name]) -> Reply:
    queues = [
        TierQueueStatus(
            topic=name[0],
            queue_id=name[1],
            problem=given_up[name].reason,
            problem_since_ms=given_up[name].since_ms,
            foreign_from=given_up[name].foreign_from,
        )
        for name in names[:ITEMS_MAX]
    ]
    status = TierStatus(queue_count=len(names), given_up_count=len(given_up), queues=queues)
    return Reply(body=(status.encode(),))
