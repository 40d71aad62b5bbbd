"""Bodies of STAGE_DECIDE and STAGE_ABORT: the staged attempts that make up a micro-batch.

Source: docs/protocol.md "Staged writes".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from headrace_protocol.headers import BatchId, Int64, StagedName

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_protocol.frame import Buffer

Value = TypeVar("Value")


class StagedAttempt(msgspec.Struct, frozen=True, rename="camel"):
    """The data staged by one attempt at one broker, as reported when it was sealed."""

    attempt: StagedName
    file_bytes: Int64
    record_count: Int64


class Decision(msgspec.Struct, frozen=True, rename="camel"):
    """The attempts that make up a micro-batch of a query; its other attempts are void.

    attempts: by broker name, in the order in which their records go into the log.
    """

    decision_id: str
    batch_id: BatchId
    attempts: dict[str, tuple[StagedAttempt, ...]]

    def encode(self) -> bytes:
        """Encode as a body."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, body: Buffer) -> Decision:
        """Decode a body. Raises msgspec.MsgspecError."""
        return _read(_decode_decision, body)

    def part(self, broker_name: str) -> tuple[StagedAttempt, ...]:
        """The attempts at one broker."""
        return self.attempts.get(broker_name, ())


_decode_decision = msgspec.json.Decoder(Decision).decode


def encode_names(attempts: list[str]) -> bytes:
    """Encode names of attempts as the body of STAGE_ABORT."""
    return msgspec.json.encode(attempts)


def decode_names(body: Buffer) -> list[str]:
    """Decode the body of STAGE_ABORT. Raises msgspec.MsgspecError."""
    return _read(_decode_names, body)


_decode_names = msgspec.json.Decoder(list[StagedName]).decode


def _read(decode: Callable[[Buffer], Value], body: Buffer) -> Value:
    try:
        return decode(body)
    except (RecursionError, UnicodeDecodeError) as error:
        raise msgspec.DecodeError(str(error)) from error
