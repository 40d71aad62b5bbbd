"""The response to a request, as returned by both client drivers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from headrace_protocol.bodies import Body
from headrace_protocol.codes import ResponseCode
from headrace_protocol.drivers.errors import (
    NEXT_ITEM,
    AccessDenied,
    BrokerError,
    MalformedAnswer,
    QueuePartAway,
    is_denial,
)
from headrace_protocol.quotas import RETRY_AFTER_MS

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_protocol.command import Command, Header

BodyType = TypeVar("BodyType", bound=Body)
T = TypeVar("T")

# Of an offset.
_DIGITS_MAX = 19
_BUSY = (ResponseCode.SYSTEM_BUSY, ResponseCode.FLOW_CONTROL)
# A server can't have a client wait for longer.
_RETRY_AFTER_MS_MAX = 60_000


class Response(NamedTuple):
    """A response.

    address: the server. request_code: code of the request.
    body: a view of the received bytes; copy small parts of large bodies instead of keeping a view.
    """

    address: str
    request_code: int
    command: Command
    body: memoryview

    def expect(self, *codes: int) -> Response:
        """This response if its code is one of ``codes`` (SUCCESS by default), else BrokerError."""
        if self.command.code not in (codes or (0,)):
            raise self.error()
        return self

    def error(self) -> BrokerError:
        """The error that the response's code means."""
        command = self.command
        where = command.code, command.remark, self.address, self.request_code
        if command.code == ResponseCode.SYSTEM_ERROR and command.ext_fields:
            next_offset = _number(command, NEXT_ITEM)
            if next_offset is not None:
                return QueuePartAway(*where, next_offset)
        if is_denial(command.code, command.remark):
            return AccessDenied(*where)
        error = BrokerError(*where)
        if command.code in _BUSY and command.ext_fields:
            error.retry_after_ms = min(_number(command, RETRY_AFTER_MS) or 0, _RETRY_AFTER_MS_MAX)
        return error

    def header(self, header_type: type[Header]) -> Header:
        """The extension fields as ``header_type``. Raises MalformedAnswer."""
        try:
            return self.command.header(header_type)
        except msgspec.ValidationError as error:
            raise self.malformed(error) from error

    def decode(self, body_type: type[BodyType]) -> BodyType:
        """The body as ``body_type``. Raises MalformedAnswer."""
        return self.read(body_type.decode)

    def read(self, decode: Callable[[memoryview], T]) -> T:
        """The result of ``decode`` for the body; its ValueError means a malformed body.

        Raises MalformedAnswer.
        """
        try:
            return decode(self.body)
        except (ValueError, RecursionError) as error:
            raise self.malformed(error) from error

    def malformed(self, reason: object) -> MalformedAnswer:
        """The error to raise for a response that violates the protocol."""
        return MalformedAnswer(self.address, self.request_code, reason)


def _number(command: Command, field: str) -> int | None:
    try:
        text = command.ext().get(field, "")
    except msgspec.ValidationError:
        return None
    return int(text) if text.isdecimal() and len(text) <= _DIGITS_MAX else None
