"""What can go wrong in a store: each error names the thing, the place and the way out."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class StoreError(Exception):
    """The store cannot do what was asked."""


class StoreLocked(StoreError):
    """Another broker has the directory open."""

    def __init__(self, root: Path, holder: str) -> None:
        super().__init__(
            f"store {root} is in use by {holder}: stop it, or give this broker its own directory"
        )
        self.root = root


class StoreFormatError(StoreError):
    """A file in the directory is not what a store with these settings would hold."""

    def __init__(self, path: Path, problem: str, remedy: str) -> None:
        super().__init__(f"{path}: {problem}; {remedy}")
        self.path = path


class LoadInterrupted(StoreError):
    """Told to stop while the store was being loaded; the next start begins again."""


class StoreNotWritable(StoreError):
    """Appends are refused; reads go on.

    error_number: of the OSError that was the reason.
    """

    def __init__(self, reason: str, path: Path, error_number: int | None = None) -> None:
        super().__init__(f"store takes no messages: {reason} ({path})")
        self.reason = reason
        self.path = path
        self.error_number = error_number


class StoreBusy(StoreError):
    """The dispatch ring is full: a taker has not kept up with the log."""

    def __init__(self, taker: str) -> None:
        super().__init__(
            f"dispatch is behind: {taker} has not taken the rows of the ring; send again"
        )
        self.taker = taker


class RecordTooLarge(StoreError):
    """A message part exceeds its limit."""

    def __init__(self, part: str, part_bytes: int, bytes_max: int) -> None:
        super().__init__(f"{part} has {part_bytes} bytes, more than {bytes_max}")
        self.part = part
        self.part_bytes = part_bytes
        self.bytes_max = bytes_max


class BatchTooLong(StoreError):
    """A batch has more messages than are stored at once."""

    def __init__(self, count_max: int) -> None:
        super().__init__(
            f"a batch of more than {count_max} messages: nothing of it was stored, send smaller "
            "ones"
        )
