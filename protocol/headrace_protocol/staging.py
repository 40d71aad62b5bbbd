"""What STAGE_DECIDE and STAGE_ABORT carry: which staged attempts make up a batch.

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
    """What one attempt staged at one broker, as its seal was answered."""

    attempt: StagedName
    file_bytes: Int64
    record_count: Int64


class Decision(msgspec.Struct, frozen=True, rename="camel"):
    """The attempts that make up a batch of a query; all others of the batch are void.

    attempts: by name of broker, in the order in which their records go into the log.
    """

    decision_id: str
    batch_id: BatchId
    attempts: dict[str, tuple[StagedAttempt, ...]]

    def encode(self) -> bytes:
        """As bodies hold it."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, body: Buffer) -> Decision:
        """Read a body. Raises msgspec.MsgspecError."""
        return _read(_decode_decision, body)

    def part(self, broker_name: str) -> tuple[StagedAttempt, ...]:
        """What one broker has of it."""
        return self.attempts.get(broker_name, ())


_decode_decision = msgspec.json.Decoder(Decision).decode


def encode_names(attempts: list[str]) -> bytes:
    """Names of attempts, as the body of STAGE_ABORT."""
    return msgspec.json.encode(attempts)


def decode_names(body: Buffer) -> list[str]:
    """Read such a body. Raises msgspec.MsgspecError."""
    return _read(_decode_names, body)


_decode_names = msgspec.json.Decoder(list[StagedName]).decode


def _read(decode: Callable[[Buffer], Value], body: Buffer) -> Value:
    try:
        return decode(body)
    except RecursionError as error:
        raise msgspec.DecodeError("lists or objects that nest too deep") from error
