"""The answers to requests for physical queues: those of this broker and of others.

Source: docs/static-topics.md "Requests"; tests/broker/statictopic/test_static_offsets.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.serving import Reply

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace_protocol.columns import Buffer
    from headrace_protocol.drivers.response import Response


class Answer(NamedTuple):
    """The answer of a broker, this one or another."""

    code: int
    remark: str | None = None
    fields: Mapping[str, object] = {}
    body: tuple[Buffer, ...] = ()

    @classmethod
    def of(cls, response: Response) -> Answer:
        """The answer of another broker."""
        command, body = response.command, response.body
        try:
            fields = command.ext()
        except msgspec.ValidationError:
            fields = {}
        return cls(command.code, command.remark, fields, (body,) if len(body) else ())

    @property
    def reply(self) -> Reply:
        """The same, as the answer to a client."""
        return Reply(self.fields or None, self.body, self.code, self.remark)

    def number(self, name: str) -> int:
        """A field that is an integer. Raises MalformedField."""
        value = self.fields.get(name)
        try:
            return int(str(value))
        except ValueError:
            raise MalformedField(f"{name}={value} in the answer of a broker") from None


class MalformedField(RequestError):
    """The answer of another broker lacks a field, or has a value of another type."""

    def __init__(self, problem: str) -> None:
        super().__init__(ResponseCode.SYSTEM_ERROR, problem)
