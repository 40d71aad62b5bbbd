"""Selection of the queue for a message."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zlib_ng.zlib_ng import crc32

if TYPE_CHECKING:
    from collections.abc import Iterable


def queue_index(key: str | bytes, queue_count: int) -> int:
    """The queue of a key: CRC-32 of its UTF-8 bytes, modulo the number of queues.

    key: text, or its UTF-8 bytes.
    Stable across processes, machines and versions: all producers that write to a topic by this
    rule keep the messages of a key in order. Source: docs/clients.md "Keys and queues".
    """
    return crc32(key.encode() if isinstance(key, str) else key) % queue_count


def queue_indices(keys: Iterable[bytes], queue_count: int) -> list[int]:
    """``queue_index`` of many keys, given in UTF-8."""
    return [crc32(key) % queue_count for key in keys]
