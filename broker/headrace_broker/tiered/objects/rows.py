"""Rows of ``tier_rows`` as bytes, and what is not readable as a failure."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, TypeVar

import msgspec

from headrace_broker.tiered.driver.interface import Failure, FailureKind
from headrace_protocol.tier_rows import Reference

if TYPE_CHECKING:
    from headrace_broker.tiered.driver.interface import Buffer

T = TypeVar("T")


def encode(value: object) -> bytes:
    """As JSON."""
    return msgspec.json.encode(value)


def reference(name: str, start: int, data: Buffer) -> Reference:
    """Names bytes of an object."""
    return Reference(name, start, start + len(data), zlib.crc32(data))


def decode(data: Buffer, kind: type[T], path: str, named: Reference | None = None) -> T | Failure:
    """Rows that were read. Fails with DAMAGED."""
    if named is not None and zlib.crc32(data) != named.crc:
        return Failure(FailureKind.DAMAGED, path, "its CRC is not that of the manifest")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Failure(FailureKind.DAMAGED, path, f"not readable: {error}")
