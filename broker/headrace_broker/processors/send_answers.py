"""Parts of the answers to sends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headrace_broker.store.errors import (
    BatchTooLong,
    RecordTooLarge,
    StoreBusy,
    StoreError,
    StoreNotWritable,
)
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import CorruptRecord, RequestError

if TYPE_CHECKING:
    from headrace_protocol.columns import Array
    from headrace_protocol.serving import Reply, Request

NOT_FLUSHED_REMARK: Final = "stored, but not known to be on disk"
_RESPONSE_CODES: dict[type[StoreError], ResponseCode] = {
    BatchTooLong: ResponseCode.MESSAGE_ILLEGAL,
    RecordTooLarge: ResponseCode.MESSAGE_ILLEGAL,
    StoreBusy: ResponseCode.SYSTEM_BUSY,
    StoreNotWritable: ResponseCode.SERVICE_NOT_AVAILABLE,
}


def rejection(error: StoreError | CorruptRecord, topic: str) -> RequestError:
    """The error for a producer whose messages the store rejected."""
    if isinstance(error, CorruptRecord):
        return RequestError(
            ResponseCode.MESSAGE_ILLEGAL,
            f"the batch to {topic} is torn at byte {error.position}: {error.reason}; "
            "nothing of it was stored, send whole messages",
        )
    return RequestError(_RESPONSE_CODES.get(type(error), ResponseCode.SYSTEM_ERROR), str(error))


class FlushedReply:
    """A reply that waits for the disk."""

    __slots__ = ("_reply", "_request")

    def __init__(self, request: Request, reply: Reply) -> None:
        self._request = request
        self._reply = reply

    def answer(self, is_flushed: bool) -> None:
        """Send the reply. is_flushed: whether the message is on disk."""
        if not is_flushed:
            self._reply.code = ResponseCode.FLUSH_DISK_TIMEOUT
            self._reply.remark = NOT_FLUSHED_REMARK
        self._request.reply(self._reply)


def message_ids(store_host_hex: str, physical_offsets: Array) -> str:
    """Offset message ids, joined by commas."""
    digits = physical_offsets.astype(">i8").tobytes().hex(",", 8).upper()
    return store_host_hex + digits.replace(",", f",{store_host_hex}")
