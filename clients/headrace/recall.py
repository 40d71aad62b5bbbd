"""Recalls of messages that wait for their time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.errors import RecallRejected
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import RecallMessageHeader

if TYPE_CHECKING:
    from headrace.instance import ClientInstance

_REJECTIONS = frozenset(
    {
        ResponseCode.ILLEGAL_OPERATION,
        ResponseCode.NO_PERMISSION,
        ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
    }
)


async def recall(
    instance: ClientInstance, address: str, topic: str, handle: str, group: str | None = None
) -> None:
    """Recall the message to ``topic`` with a handle at its broker.

    Raises RecallRejected if it is too late, or if the broker recalls no messages.
    """
    header = RecallMessageHeader(topic=topic, recall_handle=handle, producer_group=group)
    code = RequestCode.RECALL_MESSAGE
    response = await instance.request(address, code, header)
    if response.command.code in _REJECTIONS:
        answer = response.command
        raise RecallRejected(answer.code, answer.remark, address, code)
    response.expect()
