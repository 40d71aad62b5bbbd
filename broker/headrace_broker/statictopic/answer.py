"""The answers to requests for physical queues: those of this broker and of others.

Source: docs/static-topics.md "Requests"; tests/broker/statictopic/test_static_offsets.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

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

    def number(self, name: str) -> int:
        """A field that is an integer. Raises MalformedField."""
        value = self.fields.get(name)
        try:
            return int(str(value))
        except ValueError:
            raise MalformedField(f"{name}={value} in the answer of a broker") from None


class MalformedField(Exception):
    """The answer of another broker lacks a field, or has a value of another type."""
