"""Groups of the broker's own: their progress is its state, so no client writes it.

Requests that name the group in their header are rejected by a guard, in front of static topics and
processors. Those that name it in their body call ``check_not_own`` where they read the body.
Source: docs/security.md; tests/abuse/test_own_names.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from headrace_protocol.admin_headers import (
    CloneGroupOffsetHeader,
    DeleteSubscriptionGroupHeader,
    ResetOffsetHeader,
)
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.headers import ConsumerSendMsgBackHeader, UpdateConsumerOffsetHeader
from headrace_protocol.system_topics import is_own_group

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from headrace_protocol.serving import Registry, Request

# The group that a request changes.
_CHANGED: Final[Mapping[RequestCode, Callable[[Request], str]]] = {
    RequestCode.UPDATE_CONSUMER_OFFSET: (
        lambda request: request.header(UpdateConsumerOffsetHeader).consumer_group
    ),
    RequestCode.CONSUMER_SEND_MSG_BACK: (
        lambda request: request.header(ConsumerSendMsgBackHeader).group
    ),
    RequestCode.DELETE_SUBSCRIPTIONGROUP: (
        lambda request: request.header(DeleteSubscriptionGroupHeader).group_name
    ),
    RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: (
        lambda request: request.header(ResetOffsetHeader).group
    ),
    RequestCode.CLONE_GROUP_OFFSET: (
        lambda request: request.header(CloneGroupOffsetHeader).dest_group
    ),
}


def check_not_own(group: str) -> None:
    """Raise RequestError for a group that only the broker itself may use."""
    if is_own_group(group):
        raise RequestError(
            ResponseCode.NO_PERMISSION,
            f"group {group} belongs to the broker, which alone consumes with it and moves its "
            "offsets: use a group of your own",
        )


def guard_own_groups(registry: Registry) -> None:
    """Reject requests that would change a group of the broker's own."""
    registry.guard(_guard, _CHANGED.keys())


def _guard(request: Request) -> None:
    try:
        group = _CHANGED[RequestCode(request.command.code)](request)
    except msgspec.ValidationError:
        return  # the function of the request reports it, and changes nothing
    check_not_own(group)
