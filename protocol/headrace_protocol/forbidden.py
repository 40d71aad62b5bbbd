"""Reasons why a group may not read, as numbers in the answers to its pulls."""

from __future__ import annotations

from enum import IntEnum

from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError


class ForbiddenType(IntEnum):
    """The thing that forbids it; Apache's numbers."""

    BROKER = 1
    GROUP = 2
    TOPIC = 3
    BROADCASTING = 4
    SUBSCRIPTION = 5


def reading_forbidden(kind: ForbiddenType, remark: str) -> RequestError:
    """The error of a request to read that has no permission."""
    return RequestError(ResponseCode.NO_PERMISSION, remark, {"forbiddenType": str(int(kind))})
